"""Counts the sockets that a context has in each process, after two dense steps on gloo.

    python tests/ranks/count_sockets.py --ranks 16 32 --record benchmarks/results/sockets.json

As it is, every rank connects to every other. "lazy" is TORCH_GLOO_LAZY_INIT=1, with which gloo opens a connection when
it is first used. docs/decisions.md says why that is not used.
"""

import argparse
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for what tests share

import distributed
import torch
from helpers import randn
from kept_record import add_record, kept_record

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention

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


def count(rank: int, world_size: int, is_lazy: bool, exchange: str | None, sharding: str, is_causal: bool) -> int:
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(is_lazy))
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
    print("ranks  lazy   use                     sockets: fewest, median, most")
    for is_lazy in (False, True):
        for world_size in arguments.ranks:
            for use, call in USES.items():
                found = sorted(distributed.run(world_size, count, is_lazy, *call, seconds=120))
                row = {"ranks": world_size, "lazy": is_lazy, "use": use, "fewest": found[0], "most": found[-1]}
                rows.append(row | {"median": found[len(found) // 2]})
                print(f"{world_size:5}  {is_lazy!s:5}  {use:22}  {row['fewest']}, {rows[-1]['median']}, {row['most']}")
    keep(rows)


if __name__ == "__main__":
    main()
