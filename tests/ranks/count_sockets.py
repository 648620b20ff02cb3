"""Counts the sockets that a context has in each process, after two steps of a dense ring on gloo.

    python tests/ranks/count_sockets.py --ranks 16 32          as it is: every rank connects to every other
    python tests/ranks/count_sockets.py --ranks 16 32 --lazy   gloo opens a connection when it is first used

docs/decisions.md says why the second is not used.
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

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention


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


def count(rank: int, world_size: int, is_causal: bool, sharding: str) -> int:
    torch.set_num_threads(1)
    before, n = num_sockets(), 8 * world_size
    parallel = ContextParallel(exchange="ring", sharding=sharding)
    x = [randn(1, 8, 2, 4).requires_grad_() for _ in range(3)]
    for _ in range(2):
        dilated_attention(*x, DilatedPattern((n,), (1,), is_causal=is_causal), parallel=parallel).sum().backward()
    meet("stepped", world_size)
    found = num_sockets() - before
    meet("counted", world_size)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--lazy", action="store_true", help="with TORCH_GLOO_LAZY_INIT=1")
    arguments = parser.parse_args()
    if arguments.lazy:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # ranks inherit it
    print("ranks  causal  sharding    sockets: fewest, median, most")
    for world_size in arguments.ranks:
        for is_causal in (False, True):
            for sharding in ("contiguous", "zigzag"):
                found = sorted(distributed.run(world_size, count, is_causal, sharding, seconds=120))
                print(
                    f"{world_size:5}  {is_causal!s:6}  {sharding:10}  {found[0]}, {found[len(found) // 2]}, {found[-1]}"
                )


if __name__ == "__main__":
    main()
