"""Compares all exchanges and shardings for one attention call, and says which is better."""

from collections.abc import Callable
from typing import NamedTuple

from ..plan.dealing import check_dealing
from ..plan.sharding import SHARDINGS, WITHOUT_DOCUMENTS, Borders
from .call_cost import Counted, Exchange, Figures, PlannedCall, count, forecast
from .clock import Hardware

# Ways that take at most ALIKE times the least time are alike. The best of them sends least.
ALIKE = 1.02
WORTH_IT = 0.95  # name another way only if it brings a step's time down to this share or less
# documents times ranks squared: zigzag_documents makes each document a ring of all ranks
MOST_DEALT = 2**17


class Alternative(NamedTuple):
    """One exchange with one sharding. figures: None if the exchange is impossible; `why_not` then gives the reason."""

    exchange: Exchange
    sharding: str
    figures: Figures | None = None
    why_not: str = ""


def exchanges_of(call: PlannedCall, hardware: Hardware | None) -> list[Exchange]:
    """Every exchange that the call may take; of 2-D meshes the one whose groups deal heads within a host."""
    groups = [
        d
        for d in range(2, call.num_ranks)
        if call.num_ranks % d == 0 and call.num_kv_heads % d == 0
    ]
    if hardware is not None and hardware.gpus_per_host:
        groups = [d for d in groups if hardware.gpus_per_host % d == 0]
    return [
        *map(Exchange, ("ring", "all_gather", "all_to_all")),
        *(Exchange("ring", d) for d in groups[-1:]),
    ]


def alternatives(
    call: PlannedCall,
    hardware: Hardware | None,
    documents: Borders = None,
    step: Callable[[], object] = lambda: None,
) -> list[Alternative]:
    """All exchanges and shardings with their figures, the fastest first. step: called after each."""
    shardings = list(WITHOUT_DOCUMENTS)
    if documents is not None and len(documents) * call.num_ranks**2 <= MOST_DEALT:
        shardings = list(SHARDINGS)
    rows: list[Alternative] = []
    for sharding in shardings:
        undealt: Counted | None = None
        for exchange in exchanges_of(call, hardware):
            try:
                if exchange.name == "all_to_all":
                    check_dealing(call.num_kv_heads, call.num_ranks)
            except ValueError as error:
                rows.append(Alternative(exchange, sharding, why_not=str(error).split(":")[0]))
                continue
            job = call.job(sharding, exchange.inner, documents=documents)
            if exchange.is_dealt:
                counted = count(job, exchange)
            else:  # a ring and an all-gather receive the same
                undealt = (
                    count(job, exchange) if undealt is None else undealt._replace(exchange=exchange)
                )
                counted = undealt
            figures = forecast(job, exchange, call.sizes, hardware=hardware, counted=counted)
            rows.append(Alternative(exchange, sharding, figures))
            step()
    return sorted(rows, key=_rank_of)


def _rank_of(row: Alternative) -> tuple[float, ...]:
    """Sorts timed ways by time, then the others by balance and bytes, then the impossible ones."""
    if row.figures is None:
        return (2,)
    if row.figures.step is None:
        return (1, -row.figures.balance, row.figures.most_moved[1])
    return (0, row.figures.seconds)


def best_of(rows: list[Alternative]) -> Alternative | None:
    """Among the ways that are as fast as the fastest (see ALIKE), the one that sends least; None if none was timed."""
    timed = [row for row in rows if row.figures is not None and row.figures.step is not None]
    if not timed:
        return None
    fastest = min(row.figures.seconds for row in timed if row.figures is not None)
    alike = [
        row for row in timed if row.figures is not None and row.figures.seconds <= ALIKE * fastest
    ]
    return min(
        alike,
        key=lambda row: (row.figures.most_moved[1], row.exchange.inner) if row.figures else (0, 0),
    )


def better(figures: Figures, rows: list[Alternative]) -> str:
    """A sentence on the best way, if its step takes at most WORTH_IT of the time; else ""."""
    best = best_of(rows)
    if best is None or best.figures is None or figures.step is None:
        return ""
    if best.figures.seconds > WORTH_IT * figures.seconds:
        return ""
    times = f"{best.figures.time_text} instead of {figures.time_text}"
    return f"Exchange {best.exchange} with {best.sharding} shards would be faster: {times} a step."
