"""Calls that repeat others: ranks that change their lengths, disagree or fail. Functions named `rank...` run on every
rank."""

import warnings
from datetime import timedelta

import pytest
import torch
from distributed import run

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.reference import dilated_attention_reference

PATTERN = DilatedPattern((5, 16), (1, 3), is_causal=True)
LOCAL = DilatedPattern((8,), (1,))  # with shards of 8 rows nothing is sent
TIMEOUT = timedelta(seconds=20)


def whole(seq_len):
    torch.manual_seed(seq_len)
    return [torch.randn(1, seq_len, heads, 4, dtype=torch.float64) for heads in (4, 2, 2)]


def parts(lengths, rank):
    """Query, key and value of a sequence, and this rank's rows of them."""
    x = whole(sum(lengths))
    return x, [t.split(lengths, dim=1)[rank].requires_grad_() for t in x]


def check_step(cp, lengths, pattern):
    """A forward and a backward against the definition."""
    x, own = parts(lengths, cp.rank)
    x = [t.clone().requires_grad_() for t in x]
    exact = dilated_attention_reference(*x, pattern)[0]
    out = dilated_attention(*own, pattern, parallel=cp)
    gradients = zip(
        torch.autograd.grad(out.sin().sum(), own),
        torch.autograd.grad(exact.sin().sum(), x),
        strict=True,
    )
    for found, expected in [(out, exact), *gradients]:
        torch.testing.assert_close(
            found, expected.split(lengths, dim=1)[cp.rank], rtol=1e-11, atol=1e-11
        )


def rank_repeats(rank, world_size):
    """Lengths that stay, change on one rank, on all, and come again."""
    warnings.simplefilter("ignore")  # of cuts that are not near-equal
    cp = ContextParallel(timeout=TIMEOUT)
    first, second = [6] * world_size, [6, 9, *[6] * (world_size - 2)]
    third = [7, 3, *[8] * (world_size - 2)]
    for lengths in (first, first, second, second, third, first, third, third):
        check_step(cp, lengths, PATTERN)
    local = [8] * world_size
    for lengths in (local, local, [12, *local[1:]], [12, *local[1:]], local):
        check_step(cp, lengths, LOCAL)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_values_and_gradients_are_those_of_the_definition(world_size):
    """Catches the lengths of an earlier call, on a rank whose own did not change."""
    run(world_size, rank_repeats)


class Nothing(simulate.OtherRanks):
    def keys_and_values(self, positions, heads):
        zeros = torch.zeros(1, *positions.shape, 4)
        return zeros, zeros


def test_one_simulated_rank_repeats_a_call():
    """It has a link, and nobody to meet."""
    alone, x = simulate.one_rank(1, 4, Nothing()), torch.randn(1, 8, 4, 4, requires_grad=True)
    first, second = (
        dilated_attention(x, x, x, DilatedPattern((32,), (1,)), parallel=alone) for _ in range(2)
    )
    assert torch.equal(first, second)
