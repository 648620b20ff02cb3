"""Compares all exchanges and shardings for one attention call, and says which is better."""

from collections.abc import Callable
from typing import NamedTuple

from ..plan.sharding import SHARDINGS, WITHOUT_DOCUMENTS, Borders
from .call_cost import Exchange, Figures, PlannedCall, forecast
from .clock import Hardware, time_text

WORTH_IT = 0.95  # advise another exchange only if a step takes at most this share of the time
# The largest documents * ranks**2 at which zigzag_documents is tried: each document becomes a ring of all ranks.
MOST_DOCUMENT_WORK = 2**17


class Alternative(NamedTuple):
    """One exchange with one sharding."""

    exchange: Exchange
    sharding: str
    figures: Figures


def exchanges_of(call: PlannedCall, hardware: Hardware | None) -> list[Exchange]:
    """Every exchange that the call may take. Of 2-D meshes only the one with the largest groups within a host."""
    num_ranks = call.num_ranks
    sizes = [d for d in range(2, num_ranks + 1) if num_ranks % d == call.num_kv_heads % d == 0]
    exchanges = [Exchange("ring"), Exchange("all_gather")]
    if num_ranks in sizes:
        exchanges.append(Exchange("all_to_all"))
        sizes.remove(num_ranks)
    if hardware is not None and hardware.gpus_per_host:
        sizes = [d for d in sizes if hardware.gpus_per_host % d == 0]
    return exchanges + [Exchange("ring", d) for d in sizes[-1:]]


def alternatives(
    call: PlannedCall,
    hardware: Hardware | None,
    documents: Borders = None,
    step: Callable[[], object] = lambda: None,
) -> list[Alternative]:
    """All exchanges and shardings with their figures, the fastest first. step: called after each of them."""
    shardings = list(WITHOUT_DOCUMENTS)
    if documents is not None and len(documents) * call.num_ranks**2 <= MOST_DOCUMENT_WORK:
        shardings = list(SHARDINGS)
    rows: list[Alternative] = []
    for sharding in shardings:
        for exchange in exchanges_of(call, hardware):
            job = call.job(sharding, exchange.inner, documents=documents)
            figures = forecast(job, exchange, call.sizes, hardware=hardware)
            rows.append(Alternative(exchange, sharding, figures))
            step()
    return sorted(rows, key=_rank_of)


def _rank_of(row: Alternative) -> tuple[float, ...]:
    """The key to sort by: alternatives with a time come first, by time; then the others, by balance.

    Of equal alternatives the one that sends least comes first.
    """
    if row.figures.step is None:
        return (1, -row.figures.balance, row.figures.most_sent)
    return (0, row.figures.seconds, row.figures.most_sent)


def better(figures: Figures, rows: list[Alternative]) -> str:
    """Advises the fastest of `rows` in a sentence, or "" if its step takes more than WORTH_IT of that of `figures`."""
    if not rows or rows[0].figures.step is None or figures.step is None:
        return ""
    best = rows[0]
    if best.figures.seconds > WORTH_IT * figures.seconds:
        return ""
    times = f"{time_text(best.figures.seconds)} instead of {time_text(figures.seconds)}"
    return f"Exchange {best.exchange} with {best.sharding} shards would be faster: {times} a step."
