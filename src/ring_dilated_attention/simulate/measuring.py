"""What each simulated rank sends and holds, measured while it runs."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..ranks.context import ContextParallel
from .all_ranks import SimulatedLink, SimulatedRanks


class Use(NamedTuple):
    """The bytes that a rank sent in all, and the most that it held at once."""

    rank: int
    world_size: int
    sent_bytes: int = 0
    peak_bytes: int = 0

    def __str__(self) -> str:
        held, sent = f"{self.peak_bytes:,}", f"{self.sent_bytes:,}"
        return f"rank {self.rank} of {self.world_size}: held {held} bytes at most, sent {sent}"


@contextmanager
def measuring(parallel: ContextParallel) -> Iterator[list[Use]]:
    """What each simulated rank sends and holds in the calls of a block: bytes sent in all, most bytes held at once.

        with simulate.measuring(parallel) as ranks:
            dilated_attention(query, key, value, pattern, parallel=parallel)
        print(*ranks, sep="\n")

    A rank holds its rows of the call's tensors (in backward also of out, lse and the gradient of out) and all that
    it makes: buffers, accumulators, partial results. What one of torch's ops makes and frees by itself (a kernel's
    scratch) is not seen; `rda plan` lists it.

    Raises:
        ValueError: unless all ranks are simulated. (`python -m benchmarks memory` measures real ones.)
    """
    ranks = parallel.ranks
    if not isinstance(ranks, SimulatedRanks):
        raise ValueError(
            "measuring needs all ranks in this process, and this context is no simulate.all_ranks(p). Make such a one."
        )
    number = ranks.cut.num_shards
    uses = [Use(rank, number) for rank in range(number)]

    @contextmanager
    def measured(link: SimulatedLink, rows: Sequence[Tensor | None]) -> Iterator[None]:
        with Held(rows) as held:
            yield
        use = uses[link.rank]
        sent, peak = use.sent_bytes + link.bytes_sent, max(use.peak_bytes, held.peak_bytes)
        uses[link.rank] = use._replace(sent_bytes=sent, peak_bytes=peak)

    before, ranks.around = ranks.around, measured
    try:
        yield uses
    finally:
        ranks.around = before


class Held(TorchDispatchMode):
    """Bytes of the given rows, and of every storage that an op of this thread returns, for as long as it lives.

    What an op makes and frees by itself (a kernel's scratch, the cast of what it adds to another dtype) is not seen.
    """

    def __init__(self, rows: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.num_bytes = self.peak_bytes = sum(x.nbytes for x in rows if x is not None)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(results):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known:  # else a view, or written in place
                known.add(x.untyped_storage()._cdata)
                self._hold(x.untyped_storage().nbytes())
                weakref.finalize(x.untyped_storage(), self._hold, -x.untyped_storage().nbytes()).atexit = False
        return results

    def _hold(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
