"""Counts the sockets that a context has in each process, after two dense steps on gloo.

    python tests/ranks/count_sockets.py --ranks 16 32 --record benchmarks/results/sockets.json

Ranks are connected when a plan first needs it. Beside that, what gloo does by itself: all ranks with all.
"""

import argparse
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for what tests share

import distributed
import torch
from helpers import randn
from kept_record import add_record, kept_record

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.ranks import processes

USES = {  # by name: exchange, sharding, causal
    "ring": ("ring", "contiguous", False),
    "ring, causal": ("ring", "contiguous", True),
    "ring, causal zigzag": ("ring", "zigzag", True),
    "all-gather": ("all_gather", "contiguous", False),
    "all-to-all": ("all_to_all", "contiguous", False),
    "only shard and unshard": (None, "contiguous", False),
}


def num_sockets() -> int:
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them has ended
            found += str(descriptor.readlink()).startswith("socket:")
    return found


def meet(name: str, world_size: int) -> None:
    """By the store, which needs no connection of gloo's."""
    distributed.store.add(name, 1)
    while distributed.store.add(name, 0) < world_size:
        time.sleep(0.02)


def count(rank: int, world_size: int, on_use: bool, exchange: str | None, sharding: str, is_causal: bool) -> int:
    if not on_use:
        processes.connected_on_use = nullcontext
    torch.set_num_threads(1)
    before, n = num_sockets(), 8 * world_size
    parallel = ContextParallel(exchange=exchange or "ring", sharding=sharding)
    x, pattern = randn(1, 8, world_size, 2).requires_grad_(), DilatedPattern((n,), (1,), is_causal=is_causal)
    for _ in range(2):
        if exchange is None:
            parallel.unshard(parallel.shard(torch.ones(1, n)))
        else:
            dilated_attention(x, x, x, pattern, parallel=parallel).sum().backward()
    meet("stepped", world_size)
    found = num_sockets() - before
    meet("counted", world_size)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    add_record(parser)
    arguments = parser.parse_args()
    keep, rows = kept_record(parser, arguments.record, "sockets", "tests/ranks/count_sockets.py"), []
    print("ranks  connected  use                     sockets: fewest, median, most")
    for on_use in (False, True):
        for world_size in arguments.ranks:
            for use, call in USES.items():
                found = sorted(distributed.run(world_size, count, on_use, *call, seconds=120))
                row = {"ranks": world_size, "on_use": on_use, "use": use, "fewest": found[0], "most": found[-1]}
                rows.append(row | {"median": found[len(found) // 2]})
                when = "on use" if on_use else "all"
                print(f"{world_size:5}  {when:9}  {use:22}  {row['fewest']}, {rows[-1]['median']}, {row['most']}")
    keep(rows)


if __name__ == "__main__":
    main()
