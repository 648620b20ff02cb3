"""`explain` tells which kernel and exchange an attention call would use, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..kernels.choose import choose, reasons
from ..pattern import DilatedPattern
from ..plan.sharded_call import ShardedCall
from ..plan.sharding import documents_of
from ..plan.step import Sizes
from ..ranks.call import borders_of
from ..ranks.context import ContextParallel
from ..ranks.ranks import ALONE
from .validate import autocast, call_of, refuse_others


@dataclass(frozen=True)
class Explanation:
    """The kernel and the exchange that a call would use. `str` gives a text that also lists the reasons.

    reasons: maps the name of each backend, op and exchange to the reason why it would be used or not.
    """

    kernel: str
    exchange: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        reasons = (f"  {name}: {reason}" for name, reason in self.reasons.items())
        return "\n".join([f"kernel: {self.kernel}", f"exchange: {self.exchange}", *reasons])


def explain(
    query: Tensor, key: Tensor, value: Tensor, pattern: DilatedPattern, *, parallel: ContextParallel | None = None,
    cu_seqlens: Tensor | None = None, backend: str = "auto", lengths: Sequence[int] | None = None,
    **others: object,
) -> Explanation:  # fmt: skip
    """Which kernel and exchange `dilated_attention` would use on these tensors, and why. Sends nothing.

    Args:
        lengths: the number of positions of each rank. The default is the lengths that `parallel` was made with. If
            `parallel` has no lengths, all ranks are assumed to have as many positions as this rank.

    Raises:
        ValueError: where `dilated_attention` would raise one.
    """
    refuse_others("explain", others)
    query, key, value = rows = autocast(query), autocast(key), autocast(value)
    call = call_of(rows, pattern, parallel, cu_seqlens, None, backend, False, None, None)
    kernel = choose(backend, query)
    first = "the first that can serve these tensors"
    why = _why(reasons(query), kernel.NAME, first if backend == "auto" else "asked for")
    ops = kernel.ops(query) if kernel.ops else {}
    op = next((name for name, reason in ops.items() if reason is None), None)
    if ops and op is None:
        listed = "; ".join(f"{name} {reason}" for name, reason in ops.items())
        raise ValueError(
            f"backend={kernel.NAME!r} has no op for these tensors: {listed}. Enable another op."
        )
    if op is not None:
        why |= {f"{kernel.NAME} {name}": reason for name, reason in _why(ops, op, first).items()}
    if query.dtype.itemsize == 2 and kernel.TRAITS.packing:
        how = "copied in float32, since this CPU has no matrix unit (AMX) that torch would use for them"
        if kernel.takes_short_rows(query.dtype):
            how = "as they are, for the matrix unit of this CPU (AMX)"
        why["16-bit rows"] = how
    ranks = ALONE if parallel is None else parallel.ranks
    borders = borders_of(cu_seqlens)
    if lengths is None:
        lengths = ranks.cut.lengths or [query.shape[1]] * ranks.world_size
        if borders is not None and ranks.cut.needs_documents:
            lengths = ranks.lengths_of(borders[-1], borders)
    documents = documents_of(borders, sum(lengths))
    sharded_call = ShardedCall(
        pattern, ranks.shards(lengths, documents), call.num_heads, key.shape[2], documents
    )
    exchange, why["exchange"] = ranks.choose(
        sharded_call, Sizes(query.shape[0], query.shape[3], query.element_size())
    )
    return Explanation(kernel.NAME if op is None else f"{kernel.NAME} ({op})", exchange, why)


def _why(against: dict[str, str | None], chosen: str, how: str) -> dict[str, str]:
    served = "can serve these tensors, but another was chosen"
    return {
        name: f"chosen: {how}" if name == chosen else reason or served
        for name, reason in against.items()
    }
