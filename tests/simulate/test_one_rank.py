"""One rank of a larger job, alone: what each computes adds up to the definition, and what cannot be is refused."""

from functools import partial

import pytest
import torch

from ring_dilated_attention import DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.models.longnet import shift_left
from ring_dilated_attention.ranks.reduce import all_reduce
from ring_dilated_attention.reference import dilated_attention_reference
from ring_dilated_attention.simulate import OtherRanks


class Others(OtherRanks):
    """Keys and values of tensors that are there. Gradients of chunks are summed. If `comes_home`, they come home."""

    def __init__(self, key, value):
        self.full, self.of_chunk, self.comes_home = (key, value), {}, False

    def keys_and_values(self, positions_GM, heads_G1):
        key, value = (x[:, positions_GM, heads_G1] for x in self.full)
        return key, value

    def take_gradient(self, chunk, gradient):
        if not self.comes_home:
            place = (chunk.owner, chunk.branch, chunk.origin, chunk.lane)
            self.of_chunk[place] = self.of_chunk.get(place, 0) + gradient

    def gradient_home(self, chunk):
        if not self.comes_home:
            return super().gradient_home(chunk)
        return self.of_chunk.get((chunk.owner, chunk.branch, chunk.origin, chunk.lane))


# pattern, ranks, positions, key/value heads, batch, documents, context
SHORT = ((8, 30, 64), (1, 2, 5))
CASES = [
    (DilatedPattern(*SHORT, is_causal=True), 4, 64, 2, 1, [0, 23, 64], {}),
    (DilatedPattern(*SHORT, is_causal=True), 4, 64, 2, 1, [0, 41, 64], {"sharding": "zigzag"}),
    (DilatedPattern(*SHORT), 4, 60, 2, 2, None, {"lengths": (7, 0, 40, 13)}),
    (DilatedPattern((32, 128, 256), (1, 3, 65), is_causal=True), 8, 256, 4, 1, None, {}),
    (
        DilatedPattern((100, 150), (1, 9), is_causal=True, phase="blocked"),
        *(8, 256, 1, 2, None, {"sharding": "zigzag"}),
    ),
    # phases of one branch begin on different ranks
    (DilatedPattern((32, 256), (1, 95), is_causal=True), 8, 256, 4, 1, None, {}),
]


@pytest.mark.parametrize(
    ("pattern", "num_ranks", "n", "num_kv_heads", "batch", "documents", "context"), CASES
)
def test_each_rank_alone(pattern, num_ranks, n, num_kv_heads, batch, documents, context):
    """Each rank alone: out, lse and dq. When the other ranks' gradients of its chunks have come home to it, its dk and
    dv are those of the definition too."""
    heads = (4, num_kv_heads, num_kv_heads)
    full = [torch.randn(batch, n, h, 8, dtype=torch.float64).requires_grad_() for h in heads]
    dout = torch.randn(batch, n, 4, 8, dtype=torch.float64)
    out, lse = dilated_attention_reference(*full, pattern, cu_seqlens=documents)
    expected = [out.detach(), lse.detach(), *torch.autograd.grad(out, full, dout)]
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    full = [x.detach() for x in full]
    others = Others(*full[1:])
    ranks = [simulate.one_rank(rank, num_ranks, others, **context) for rank in range(num_ranks)]
    for comes_home in (False, True):  # each rank repeats the call
        others.comes_home = comes_home
        for parallel in ranks:
            own = parallel.positions(n)
            local = [x[:, own].requires_grad_() for x in full]
            options = {"parallel": parallel, "cu_seqlens": cu_seqlens, "return_lse": True}
            out, lse = dilated_attention(*local, pattern, **options)
            found = [out, lse, *torch.autograd.grad(out, local, dout[:, own])]
            known = found if comes_home else found[:3]
            for x, exact in zip(known, expected, strict=False):
                torch.testing.assert_close(x, exact[:, own], rtol=0, atol=1e-12)


class WrongChunks(OtherRanks):
    def keys_and_values(self, positions_GM, heads_G1):
        return torch.zeros(1, *positions_GM.shape, 9), torch.zeros(1, *positions_GM.shape, 9)


def call(rank, num_ranks, others, **context):
    parallel, x = simulate.one_rank(rank, num_ranks, others, **context), torch.zeros(1, 4, 1, 8)
    return dilated_attention(x, x, x, DilatedPattern((8,), (1,)), parallel=parallel)


@pytest.mark.parametrize(
    ("arguments", "context", "message"),
    [
        ((4, 4, OtherRanks()), {}, "from 0 to 3, got 4"),
        ((1, 4, None), {}, "others must be an OtherRanks, .* got None"),
        ((0, 0, OtherRanks()), {}, "an integer of at least 1, got 0"),
        (
            (1, 2, OtherRanks()),
            {"lengths": (4, 6)},
            "rank 1 has 4 positions, but lengths gives it 6",
        ),
        (
            (1, 2, WrongChunks()),
            {},
            r"made keys of shape \(1, 1, 4, 9\) for 1 heads and 4 rows.* 8,",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments, context, message):
    with pytest.raises(ValueError, match=message):
        call(*arguments, **context)


def test_one_rank_has_no_full_tensors():
    parallel, x = simulate.one_rank(2, 4, OtherRanks()), torch.zeros(1, 10)
    assert parallel.positions(40).tolist() == list(range(20, 30))
    reduce, shift = partial(all_reduce, parallel.ranks), partial(shift_left, parallel, fill=0)
    for method in (parallel.shard, parallel.unshard, reduce, shift):
        with pytest.raises(ValueError, match="only rank 2 of 4 is run"):
            method(x)
