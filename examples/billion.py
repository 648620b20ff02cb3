"""One rank's share of a sequence of a billion positions, run on this machine.

    python examples/billion.py          (in a second: --seq-len 4096 --ranks 16 --rank 9)

No machine here holds such a sequence. So every row of query, key and value is a function of its
position: `simulate.one_rank` runs the program of one rank, and what the other ranks would send is
made when it is needed. Then some rows of out and of the query's gradient are compared with the
definition, in float64. The gradients that other ranks would send home are left out.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ring_dilated_attention import DilatedPattern, dilated_attention, simulate

HEADS, HEAD_DIM = 4, 64
QUERY, KEY, VALUE, DOUT = range(4)
SEED = torch.Generator().manual_seed(0)
FREQUENCIES = torch.rand(4, HEADS, HEAD_DIM, generator=SEED, dtype=torch.float64)


def rows_of(tensor: int, positions: Tensor, heads: Tensor) -> Tensor:
    """Rows (..., D) at global positions of heads, two int64 tensors that broadcast to (...). Their variance is 1."""
    waves = positions.unsqueeze(-1) * FREQUENCIES[tensor, heads]
    return 2**0.5 * torch.sin(waves)


class MadeRanks(simulate.OtherRanks):
    """The other ranks: they send keys and values as `rows_of` makes them."""

    def keys_and_values(self, positions_GM: Tensor, heads_G1: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (rows_of(x, positions_GM, heads_G1).float().unsqueeze(0) for x in (KEY, VALUE))
        return key, value


def longnet_pattern(seq_len: int) -> DilatedPattern:
    """The branches of LongNet's paper, and wider ones up to the whole sequence, of about 256 rows.

    Rates are 257/256 of a power of two. With a power of two the wide branches would have rows on few ranks alone.
    """
    of_paper = [(2048, 1), (4096, 2), (8192, 4), (16_384, 6), (32_768, 12)]
    branches = [branch for branch in of_paper if branch[0] <= max(seq_len, 2048)]
    lengths = [seq_len // 8**i for i in range(10) if seq_len // 8**i > 32_768]
    branches += [(length, 257 * length // 2**16) for length in reversed(lengths)]
    return DilatedPattern(*zip(*branches, strict=True), is_causal=True)


def keys_seen(pattern: DilatedPattern, position: int, head: int) -> Tensor:
    """The positions that a query sees, by the definition; those of several branches once for each."""
    seen = []
    for branch, (length, rate, _) in enumerate(pattern.branches):
        phase = pattern.phase_of(branch, head, HEADS)
        if position % length % rate == phase:
            seen.append(torch.arange(position - position % length + phase, position + 1, rate))
    return torch.cat([torch.arange(0), *seen])


def by_definition(pattern: DilatedPattern, position: int, head: int) -> tuple[Tensor, Tensor]:
    """out and the query's gradient of one position and head, in float64."""
    place, of_head = torch.tensor(position), torch.tensor(head)
    seen = keys_seen(pattern, position, head)
    key, value = (rows_of(x, seen, of_head) for x in (KEY, VALUE))
    query = rows_of(QUERY, place, of_head).requires_grad_()
    out = (key @ query * HEAD_DIM**-0.5).softmax(0) @ value
    return out.detach(), torch.autograd.grad(out, query, rows_of(DOUT, place, of_head))[0]


def rows_to_compare(pattern: DilatedPattern, positions: Tensor) -> list[tuple[int, int]]:
    """For each branch and head the last position here that it covers, which sees most keys."""
    chosen = set()
    for branch, (length, rate, _) in enumerate(pattern.branches):
        for head in range(HEADS):
            covered = positions[positions % length % rate == pattern.phase_of(branch, head, HEADS)]
            if len(covered):
                chosen.add((int(covered[-1]), head))
    return sorted(chosen)


def main(argv: Sequence[str] | None = None) -> None:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--seq-len", type=int, default=2**30, help="positions of all ranks")
    parser.add_argument("--ranks", type=int, default=2**16, help="they share the sequence")
    parser.add_argument("--rank", type=int, default=64_507, help="the one that runs")
    options = parser.parse_args(argv)
    pattern = longnet_pattern(options.seq_len)
    print(f"{pattern.segment_lengths} / {pattern.dilation_rates}, causal")
    parallel = simulate.one_rank(options.rank, options.ranks, MadeRanks())
    positions = parallel.positions(options.seq_len)
    heads = torch.arange(HEADS)
    *inputs, dout = (rows_of(x, positions[:, None], heads).float()[None] for x in range(4))
    query, key, value = (x.requires_grad_() for x in inputs)

    started = time.perf_counter()
    out = dilated_attention(query, key, value, pattern, parallel=parallel)
    middle = time.perf_counter()
    gradient = torch.autograd.grad(out, inputs, dout)[0]
    first = int(positions[0])
    owned = f"{len(positions):,} positions from {first:,} on"
    print(f"rank {options.rank:,} of {options.ranks:,}: {owned}")
    print(f"forward {middle - started:.1f} s, backward {time.perf_counter() - middle:.1f} s")

    chosen = rows_to_compare(pattern, positions)
    keys = torch.cat([keys_seen(pattern, position, head) for position, head in chosen])
    num_owners = len((keys // len(positions)).unique())
    print(f"{len(chosen)} rows, the last of each branch and head, see keys of {num_owners} ranks.")
    expected = [by_definition(pattern, position, head) for position, head in chosen]
    for i, tensor in enumerate((out.detach(), gradient)):
        rows = torch.stack([tensor[0, position - first, head] for position, head in chosen])
        exact = torch.stack([both[i] for both in expected])
        name = ("out", "the query's gradient")[i]
        print(f"relative error of {name}: {(rows.double() - exact).norm() / exact.norm():.1e}")


if __name__ == "__main__":
    main()
