"""What ranks of a context send, hold and wait for, measured while they run."""

from collections.abc import Iterator
from contextlib import contextmanager

from .context import ContextParallel
from .held import Use
from .link import Wait
from .processes import Processes
from .simulated import SimulatedRanks


@contextmanager
def measuring(parallel: ContextParallel) -> Iterator[list[Use]]:
    """What each simulated rank sends and holds in the calls of a block: bytes sent in all, most bytes held at once.

        with measuring(parallel) as ranks:
            dilated_attention(query, key, value, pattern, parallel=parallel)
        print(*ranks, sep="\\n")

    A rank holds its rows of the call's tensors (in backward also of out, lse and the gradient of out) and all that
    it makes: buffers, accumulators, partial results. What one of torch's ops makes and frees by itself (a kernel's
    scratch) is not seen; `rda plan` lists it.

    Raises:
        ValueError: unless all ranks are simulated. (`python -m benchmarks memory` measures real ones.)
    """
    ranks = parallel.ranks
    if not isinstance(ranks, SimulatedRanks):
        which = f"exchange={parallel.exchange!r}" + (" and rank" if parallel.exchange == "simulated" else "")
        raise ValueError(
            f"measuring needs all ranks in this process, and this context was made with {which}. Make one with "
            "exchange='simulated' and world_size alone."
        )
    number = ranks.cut.num_shards
    ranks.uses = uses = [Use(rank, number) for rank in range(number)]
    try:
        yield uses
    finally:
        ranks.uses = None


@contextmanager
def recorded_waits(parallel: ContextParallel) -> Iterator[list[Wait]]:
    """The waits of this rank for others, on every link of the context (the handshakes' too), as they end."""
    waits: list[Wait] = []
    links = parallel.ranks.opened if isinstance(parallel.ranks, Processes) else []
    for link in links:
        link.waits = waits
    try:
        yield waits
    finally:
        for link in links:
            link.waits = None
