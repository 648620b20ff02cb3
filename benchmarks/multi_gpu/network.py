"""How fast messages travel between the cards, and whether all of them arrive.

Two neighbours alone have the whole rate of their link. If all neighbours send at once, as in a hop of the ring, they
may share a switch. Messages of all pairs at once are those of an all-to-all.
"""

from collections.abc import Iterable

import torch

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands.local_ranks import Worker
from ring_dilated_attention.ranks.processes import Processes

from ..device import meet, timed
from ..parts import Row
from .settings import Settings

SMALL_BYTES = 256

# Names of exchanges. The others are named by the ranks that take part.
SMALL = "small"
HANDSHAKE = "handshake"
PAIRS = "all pairs at once"


def network(settings: Settings, seconds: float) -> list[Row]:
    """Measure latencies, and large messages: of two neighbours alone, of all neighbours at once, and of all pairs."""
    ranks = settings.run_ranks(seconds, _network)
    has_arrived = all(arrived for _, arrived in ranks)
    slowest = {}
    for name in ranks[0][0]:
        slowest[name] = max(times[name] for times, _ in ranks)
    small = slowest.pop(SMALL)
    handshake = slowest.pop(HANDSHAKE)
    latency: Row = {
        "what": "latency",
        "passed": None,
        "found": f"{SMALL_BYTES} bytes take {1e6 * small:.0f} us to a neighbour, "
        f"a handshake takes {1e6 * handshake:.0f} us",
        "small": small,
        "handshake": handshake,
    }
    rows = [latency]
    for name, of_swap in slowest.items():
        num_peers = settings.num_ranks - 1 if name == PAIRS else 1
        rate = num_peers * settings.message_bytes / of_swap
        row = {
            "what": f"large, {name}",
            "passed": has_arrived,
            "found": f"{rate / 1e9:.3g} GB/s leave a rank, and as many arrive",
            "seconds": of_swap,
        }
        rows.append(row)
    return rows


def _network(worker: Worker, settings: Settings) -> tuple[dict[str, float], bool]:
    """On one rank: the seconds of each exchange by name, and whether all bytes arrived."""
    parallel = ContextParallel(exchange="ring")
    assert isinstance(parallel.ranks, Processes)
    link = parallel.ranks.all
    device = settings.device(worker.rank)
    num_ranks = worker.world_size
    leaves = torch.full((settings.message_bytes,), link.rank, dtype=torch.uint8, device=device)
    comes = [torch.full_like(leaves, 255) for _ in range(num_ranks)]

    def swap(to: Iterable[int], sources: Iterable[int], num_bytes: int | None = None) -> float:
        """The seconds of one exchange. num_bytes: of each message (default: all)."""

        def action() -> None:
            sends = [(leaves[:num_bytes], rank) for rank in to]
            receives = [(comes[rank][:num_bytes], rank) for rank in sources]
            link.exchange(sends, receives, "messages alone").wait()

        return timed(device, parallel, action)

    following = [(link.rank + 1) % num_ranks]
    before = [(link.rank - 1) % num_ranks]
    others = [rank for rank in range(num_ranks) if rank != link.rank]
    times = {
        HANDSHAKE: timed("cpu", parallel, lambda: meet(parallel)),
        SMALL: swap(following, before, SMALL_BYTES),
    }
    num_pairs = num_ranks if num_ranks > 2 else 1
    for rank in range(num_pairs):
        neighbour = (rank + 1) % num_ranks
        peers: list[int] = []
        if link.rank == rank:
            peers = [neighbour]
        elif link.rank == neighbour:
            peers = [rank]
        times[f"ranks {rank} and {neighbour} alone"] = swap(peers, peers)
    times["all neighbours at once"] = swap(following, before)
    times[PAIRS] = swap(others, others)
    has_arrived = True
    for rank in others:
        has_arrived &= bool((comes[rank] == rank).all())
    return times, has_arrived
