"""Compares all exchanges and shardings for one attention call, and says which is better."""

from collections.abc import Callable
from typing import NamedTuple

from ..plan.sharding import SHARDINGS, WITHOUT_DOCUMENTS, Borders
from .call_cost import Exchange, Figures, PlannedCall, forecast
from .clock import Hardware, time_text

# An exchange is advised only if its time is at most this share of the time with the exchange that the user asked for.
WORTH_IT = 0.95
# The sharding zigzag_documents is tried only if documents * ranks**2 is at most this number. Planning this sharding
# takes long, because each document has a ring of all ranks.
MOST_DOCUMENT_WORK = 2**10


class Alternative(NamedTuple):
    """One exchange with one sharding, and the figures (work, bytes sent, time) that a call with both would have."""

    exchange: Exchange
    sharding: str
    figures: Figures


def exchanges_of(call: PlannedCall, hardware: Hardware | None) -> list[Exchange]:
    """Every exchange that the call can use.

    On a 2-D mesh ranks use all_to_all inside groups, and rings between groups. Of all 2-D meshes, only the one with the
    largest groups is listed. If `gpus_per_host` is given, the size of a group must divide `gpus_per_host`.
    """
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
    """Predict the call with every exchange and sharding. Returns the alternatives, the fastest first.

    step: a function that is called after each alternative, to show progress.
    """
    shardings = list(WITHOUT_DOCUMENTS)
    if documents is not None and len(documents) * call.num_ranks**2 <= MOST_DOCUMENT_WORK:
        shardings = list(SHARDINGS)
    rows = []
    for sharding in shardings:
        for exchange in exchanges_of(call, hardware):
            sharded_call = call.sharded_call(sharding, exchange.inner, documents=documents)
            figures = forecast(sharded_call, exchange, call.sizes, hardware=hardware)
            rows.append(Alternative(exchange, sharding, figures))
            step()
    return sorted(rows, key=_rank_of)


def _rank_of(row: Alternative) -> tuple[float, ...]:
    """The key by which alternatives are sorted. Alternatives with a time come first, the fastest at the top.
    Alternatives without a time follow, the best balanced at the top. Ties are broken by the bytes sent."""
    if row.figures.step is None:
        return (1, -row.figures.balance, row.figures.most_sent)
    return (0, row.figures.seconds, row.figures.most_sent)


def better(figures: Figures, rows: list[Alternative]) -> str:
    """A sentence that advises to use `rows[0]`. "" if `rows[0]` takes more than WORTH_IT times as long as `figures`.

    figures: the figures of the call as the user asked for it. rows: alternatives, the fastest first.
    """
    if not rows or rows[0].figures.step is None or figures.step is None:
        return ""
    best = rows[0]
    if best.figures.seconds > WORTH_IT * figures.seconds:
        return ""
    return (
        f"Exchange {best.exchange} with {best.sharding} shards would be faster: {time_text(best.figures.seconds)} "
        f"instead of {time_text(figures.seconds)} a step."
    )
