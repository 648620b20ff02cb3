"""One rank of a larger job, alone: what each computes adds up to the definition, and what cannot be is refused."""

from functools import partial

import pytest
import torch

from ring_dilated_attention import DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.models.longnet import shift_left
from ring_dilated_attention.ranks.reduce import all_reduce
from ring_dilated_attention.reference import dilated_attention_reference
from ring_dilated_attention.run.views import block_views
from ring_dilated_attention.simulate import OtherRanks
from ring_dilated_attention.simulate.one_rank import grid


class Others(OtherRanks):
    """Keys and values of tensors that are there. Gradients that leave are summed: by position, and for each chunk. If
    `comes_home`, each chunk's sum comes home."""

    def __init__(self, key, value):
        self.full, self.sums = (key, value), (torch.zeros_like(key), torch.zeros_like(value))
        self.of_chunk, self.comes_home = {}, False

    def keys_and_values(self, positions_GM, heads_G1):
        key, value = (x[:, positions_GM, heads_G1] for x in self.full)
        return key, value

    def take_gradient(self, chunk, gradient):
        if self.comes_home:
            return
        place = (chunk.owner, chunk.branch, chunk.origin, chunk.lane)
        self.of_chunk[place] = self.of_chunk.get(place, 0) + gradient
        batch, _, _, head_dim = self.full[0].shape
        for rows, block in chunk.rows:
            positions, heads = grid(rows)
            places = (positions, heads.expand_as(positions))
            grads_of_both = block_views(gradient, block, batch, head_dim)
            for total, grads in zip(self.sums, grads_of_both, strict=True):
                for b in range(batch):
                    total[b].index_put_(places, grads[b], accumulate=True)

    def gradient_home(self, chunk):
        if not self.comes_home:
            return super().gradient_home(chunk)
        return self.of_chunk.get((chunk.owner, chunk.branch, chunk.origin, chunk.lane))


# pattern, ranks, positions, key/value heads, batch, documents, context
SHORT = ((8, 30, 64), (1, 2, 5))
CASES = [
    *(
        (DilatedPattern(*SHORT, is_causal=is_causal), 4, *rest)
        for is_causal in (False, True)
        for rest in (
            (64, 2, 1, [0, 23, 64], {}),
            (64, 2, 1, [0, 41, 64], {"sharding": "zigzag"}),
            (60, 2, 2, None, {"lengths": (7, 0, 40, 13)}),
        )
    ),
    (DilatedPattern((32, 128, 256), (1, 3, 65), is_causal=True), 8, 256, 4, 1, None, {}),
    (DilatedPattern((32, 128, 256), (1, 3, 33)), 8, 256, 2, 1, None, {}),
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
    """Each rank alone: out, lse and dq. The ranks' contributions to the gradients of all keys add up to those of the
    definition, and so do those of each chunk, that come home to its owner."""
    torch.manual_seed(0)
    heads = (4, num_kv_heads, num_kv_heads)
    full = [torch.randn(batch, n, h, 8, dtype=torch.float64).requires_grad_() for h in heads]
    dout = torch.randn(batch, n, 4, 8, dtype=torch.float64)
    out, lse = dilated_attention_reference(*full, pattern, cu_seqlens=documents)
    expected = [out.detach(), lse.detach(), *torch.autograd.grad(out, full, dout)]
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    full = [x.detach() for x in full]
    others = Others(*full[1:])
    for comes_home in (False, True):
        others.comes_home = comes_home
        for rank in range(num_ranks):
            parallel = simulate.one_rank(rank, num_ranks, others, **context)
            own = parallel.positions(n)
            local = [x[:, own].requires_grad_() for x in full]
            options = {"parallel": parallel, "cu_seqlens": cu_seqlens, "return_lse": True}
            out, lse = dilated_attention(*local, pattern, **options)
            found = [out, lse, *torch.autograd.grad(out, local, dout[:, own])]
            if not comes_home:
                for total, grad in zip(others.sums, found[3:], strict=True):
                    total[:, own] += grad
                found = found[:3]
            for x, exact in zip(found, expected, strict=False):
                torch.testing.assert_close(x, exact[:, own], rtol=0, atol=1e-12)
        torch.testing.assert_close(others.sums, tuple(expected[3:]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 4, OtherRanks()), "from 0 to 3, got 4"),
        ((1, 4, None), "others must be an OtherRanks, .* got None"),
        ((0, 0, OtherRanks()), "an integer of at least 1, got 0"),
    ],
)
def test_bad_contexts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate.one_rank(*arguments)


def test_one_rank_has_no_full_tensors():
    parallel = simulate.one_rank(2, 4, OtherRanks())
    assert parallel.positions(40).tolist() == list(range(20, 30))
    x = torch.zeros(1, 10)
    for method in (
        parallel.shard,
        parallel.unshard,
        partial(all_reduce, parallel.ranks),
        lambda x: shift_left(parallel, x, 0),
    ):
        with pytest.raises(ValueError, match="only rank 2 of 4 is run"):
            method(x)


def test_lengths_must_fit_the_rank():
    parallel = simulate.one_rank(1, 2, OtherRanks(), lengths=(4, 6))
    q = torch.zeros(1, 5, 1, 8)
    with pytest.raises(ValueError, match="rank 1 has 5 positions, but lengths gives it 6"):
        dilated_attention(q, q, q, DilatedPattern((4,), (1,)), parallel=parallel)


def test_chunks_of_another_shape_are_refused():
    class Wrong(OtherRanks):
        def keys_and_values(self, positions_GM, heads_G1):
            return torch.zeros(1, *positions_GM.shape, 9), torch.zeros(1, *positions_GM.shape, 9)

    parallel = simulate.one_rank(1, 2, Wrong())
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"made keys \(1, 1, 4, 9\) for 1 heads of 4 rows.* 8,"):
        dilated_attention(q, q, q, DilatedPattern((8,), (1,)), parallel=parallel)
