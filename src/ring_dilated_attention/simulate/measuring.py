"""Measures what each simulated rank sends and holds while it runs."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..ranks.context import ContextParallel
from .all_ranks import Given, SimulatedLink, SimulatedRanks


class MemoryUse(NamedTuple):
    """The total bytes that a rank sent (`sent_bytes`), and the peak of the bytes that it held (`peak_bytes`)."""

    rank: int
    world_size: int
    sent_bytes: int = 0
    peak_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.world_size}: held {self.peak_bytes:,} bytes at most, "
            f"sent {self.sent_bytes:,}"
        )


@contextmanager
def measuring(parallel: ContextParallel) -> Iterator[list[MemoryUse]]:
    """A context manager that measures the calls in its block. It yields a list with a `MemoryUse` for each rank.

        with simulate.measuring(parallel) as ranks:
            dilated_attention(query, key, value, pattern, parallel=parallel)
        print(*ranks, sep="\\n")

    A rank holds its rows of query, key and value. In backward it also holds its rows of out, lse and out's gradient.
    The measurement also includes the tensors that the rank creates: buffers, accumulators, and the results of kernels.
    It leaves out the memory that a kernel allocates and frees within a call; `rda plan` lists this memory.

    Raises:
        ValueError: unless all ranks are simulated. (`python -m benchmarks ranks` measures real ranks.)
    """
    ranks = parallel.ranks
    if not isinstance(ranks, SimulatedRanks):
        raise ValueError(
            "measuring needs all ranks in this process: pass a context that simulate.all_ranks(p) made."
        )
    uses = [MemoryUse(rank, ranks.cut.num_shards) for rank in range(ranks.cut.num_shards)]

    @contextmanager
    def measured(link: SimulatedLink, rows: Given) -> Iterator[None]:
        with Held(rows) as held:
            yield
        use = uses[link.rank]
        sent = link.wires.bytes_sent[link.rank]
        peak = max(use.peak_bytes, held.peak_bytes)
        uses[link.rank] = use._replace(sent_bytes=use.sent_bytes + sent, peak_bytes=peak)

    before = ranks.around
    ranks.around = measured
    try:
        yield uses
    finally:
        ranks.around = before


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive in this thread: the rank's rows of the call's tensors, and all
    storages that ops have returned.

    Memory that an op allocates and frees internally, such as a kernel's scratch or a cast inside a sum, does not count.
    """

    def __init__(self, rows: Given) -> None:
        super().__init__()
        self.num_bytes = self.peak_bytes = sum(x.nbytes for x in rows if x is not None)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        given, made = (
            [x.untyped_storage() for x in tree_leaves(xs) if isinstance(x, Tensor)]
            for xs in ((args, kwargs), results)
        )
        known = {storage._cdata for storage in given}
        for storage in made:
            # Skip a result that shares its storage with an argument, because a view or an in-place result takes no new
            # memory.
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._hold(storage.nbytes())
                weakref.finalize(storage, self._hold, -storage.nbytes()).atexit = False
        return results

    def _hold(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
