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


def reference(pattern, full, dout, documents=None):
    """out, lse and the three gradients, by the definition."""
    leaves = [x.detach().double().requires_grad_() for x in full]
    out, lse = dilated_attention_reference(*leaves, pattern, cu_seqlens=documents)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.double())


class Known(OtherRanks):
    """Keys and values of tensors that are there, and the sums of what is sent to them."""

    def __init__(self, key, value):
        self.full, self.sums = (key, value), (torch.zeros_like(key), torch.zeros_like(value))

    def keys_and_values(self, positions_GM, heads_G1):
        key, value = (x[:, positions_GM, heads_G1] for x in self.full)
        return key, value

    def take_gradient(self, chunk, gradient):
        for rows, block in chunk.rows:
            positions, heads = grid(rows)
            batch, _, _, head_dim = self.full[0].shape
            for total, grads in zip(
                self.sums, block_views(gradient, block, batch, head_dim), strict=True
            ):
                for b in range(batch):
                    total[b].index_put_(
                        (positions, heads.expand_as(positions)), grads[b], accumulate=True
                    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("context", [{}, {"sharding": "zigzag"}, {"lengths": (7, 0, 40, 13)}])
def test_contributions_of_all_ranks_add_up(is_causal, context):
    """Each rank alone, in float64: zigzag shards, uneven ones, packed documents, a batch. Their contributions to the
    gradients of all keys add up to the gradients of the definition."""
    n, p, batch = (60 if "lengths" in context else 64), 4, (2 if context else 1)
    documents = None if batch > 1 else [0, 23, n]
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    torch.manual_seed(0)
    pattern = DilatedPattern((8, 30, 64), (1, 2, 5), is_causal=is_causal)
    full = [torch.randn(batch, n, h, 8, dtype=torch.float64) for h in (4, 2, 2)]
    dout = torch.randn(batch, n, 4, 8, dtype=torch.float64)
    out, _, dq, dk, dv = reference(pattern, full, dout, documents)
    others = Known(*full[1:])
    for rank in range(p):
        parallel = simulate.one_rank(rank, p, others, **context)
        own = torch.cat(
            [
                torch.arange(*span)
                for span in parallel.cut.shards_of(parallel.cut.default_lengths(n))[rank]
            ]
            or [torch.arange(0)]
        )
        local = [x[:, own].requires_grad_() for x in full]
        mine = dilated_attention(*local, pattern, parallel=parallel, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(mine, out[:, own], rtol=0, atol=1e-12)
        grads = torch.autograd.grad(mine, local, dout[:, own])
        torch.testing.assert_close(grads[0], dq[:, own], rtol=0, atol=1e-12)
        for total, grad in zip(others.sums, grads[1:], strict=True):
            total[:, own] += grad
    torch.testing.assert_close(others.sums, (dk, dv), rtol=0, atol=1e-12)


class ComesHome(Known):
    """Adds up what is sent to each chunk, and gives it to the rank that owns the chunk."""

    def __init__(self, key, value):
        super().__init__(key, value)
        self.of_chunk = {}

    def take_gradient(self, chunk, gradient):
        place = (chunk.owner, chunk.branch, chunk.origin, chunk.lane)
        self.of_chunk[place] = self.of_chunk.get(place, 0) + gradient

    def gradient_home(self, chunk):
        return self.of_chunk.get((chunk.owner, chunk.branch, chunk.origin, chunk.lane))


PATTERNS = [
    (DilatedPattern((32, 128, 256), (1, 3, 65), is_causal=True), 4),
    (DilatedPattern((32, 128, 256), (1, 3, 33)), 2),
    (DilatedPattern((100, 150), (1, 9), is_causal=True, phase="blocked"), 1),
    # phases of one branch begin on different ranks
    (DilatedPattern((32, 256), (1, 95), is_causal=True), 4),
]


@pytest.mark.parametrize(("pattern", "num_kv_heads"), PATTERNS)
def test_gradients_that_come_home_make_those_of_the_definition(pattern, num_kv_heads):
    """Each rank alone: out, lse and dq, and then dk and dv with what all other ranks contribute."""
    n, p = 256, 8
    torch.manual_seed(0)
    full = [torch.randn(1, n, h, 8, dtype=torch.float64) for h in (4, num_kv_heads, num_kv_heads)]
    dout = torch.randn(1, n, 4, 8, dtype=torch.float64)
    expected = reference(pattern, full, dout)
    away, home = Known(*full[1:]), ComesHome(*full[1:])
    # what leaves in the first pass comes home in the second
    away.take_gradient = home.take_gradient
    for others in (away, home):
        for rank in range(p):
            parallel = simulate.one_rank(rank, p, others)
            own = parallel.positions(n)
            local = [x[:, own].requires_grad_() for x in full]
            out, lse = dilated_attention(*local, pattern, parallel=parallel, return_lse=True)
            if others is home:
                home.take_gradient = lambda chunk, gradient: None
            found = (out, lse, *torch.autograd.grad(out, local, dout[:, own]))
            for x, exact in zip(found if others is home else found[:3], expected, strict=False):
                torch.testing.assert_close(x, exact[:, own], rtol=0, atol=1e-12)


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
    with pytest.raises(ValueError, match=r"made \(1, 1, 4, 9\) for 1 heads of 4 rows.*is 8"):
        dilated_attention(q, q, q, DilatedPattern((8,), (1,)), parallel=parallel)
