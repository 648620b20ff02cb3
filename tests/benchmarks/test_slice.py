"""One rank of a job of any size: the library's rows against the definition, and proofs that the check can fail."""

from functools import partial

import pytest
import torch
from helpers import relative_error

from benchmarks.slice.command import main
from benchmarks.slice.counter import TENSORS, CounterTensors
from benchmarks.slice.direct import Direct
from benchmarks.slice.share import Others, SlicedJob, choose_rank, longnet_pattern, run_share
from benchmarks.slice.verify import tolerance, verify
from ring_dilated_attention import DilatedPattern, dilated_attention, simulate
from ring_dilated_attention.models.longnet import shift_left
from ring_dilated_attention.plan.sharding import make_shards
from ring_dilated_attention.ranks.reduce import all_reduce
from ring_dilated_attention.reference import dilated_attention_reference
from ring_dilated_attention.run.views import block_views
from ring_dilated_attention.simulate import OtherRanks
from ring_dilated_attention.simulate.one_rank import grid


def ignore(text):
    """No progress bar."""


def reference(pattern, full, dout, documents=None):
    """out, lse and the three gradients, by the definition."""
    leaves = [x.detach().double().requires_grad_() for x in full]
    out, lse = dilated_attention_reference(*leaves, pattern, cu_seqlens=documents)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.double())


def full_tensors(job):
    heads = (job.num_heads, job.num_kv_heads, job.num_kv_heads, job.num_heads)
    return [job.tensors.local(name, torch.arange(job.seq_len), g) for name, g in zip(TENSORS, heads, strict=True)]


def test_a_row_is_the_same_however_it_is_asked_for():
    tensors = CounterTensors(7, seed=3)
    local = tensors.local("key", torch.arange(10**9, 10**9 + 300), 3)
    assert local.shape == (1, 300, 3, 7)
    assert local.dtype == torch.float32
    for i, head in [(0, 0), (299, 2), (17, 1)]:
        assert torch.equal(tensors.rows("key", torch.tensor(10**9 + i), torch.tensor(head)), local[0, i, head])
    assert torch.equal(
        CounterTensors(7, seed=3).rows("key", torch.arange(10**9, 10**9 + 300)[:, None], torch.arange(3)), local[0]
    )


def test_rows_are_those_of_splitmix64():
    """Catches a sign, a shift or an overflow: the same number with Python's unbounded integers."""
    mask = 2**64 - 1

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    start = mix((mix((mix(5 * 4 + 2) + 3) & mask) + 123_456_789_012) & mask)
    bits = mix((start + 2 * 0x9E3779B97F4A7C15) & mask) & 0xFFFFFFFF  # the third element: low half of the second number
    signed = (bits - 2**32 if bits >= 2**31 else bits) >> 8
    row = CounterTensors(4, seed=5).rows("value", torch.tensor(123_456_789_012), torch.tensor(3))
    assert float(row[2]) == pytest.approx(signed * 3**0.5 / 2**23, rel=2**-23)


def test_elements_look_independent():
    """Mean, variance, and correlations between elements, heads, tensors and neighbouring rows, within five sigma."""
    tensors = CounterTensors(16)
    made = [tensors.local(name, torch.arange(20_000), 2)[0].flatten(1) for name in TENSORS]
    x = torch.cat([*made, made[0].roll(1, 0)], dim=1)
    sigma = len(x) ** -0.5
    assert x.mean(0).abs().max() < 5 * sigma
    assert (x.T @ x / len(x) - torch.eye(x.shape[1])).abs().max() < 5 * sigma
    assert x.abs().max() <= 3**0.5


PATTERNS = [
    (DilatedPattern((16, 96), (1, 5)), 4, 4),
    (DilatedPattern((16, 48, 96), (1, 3, 7), is_causal=True), 4, 2),
    (DilatedPattern((13, 40), (2, 3), is_causal=True, phase="blocked"), 6, 6),
    (DilatedPattern((24, 96), (2, 1), heads="split"), 4, 1),
]


@pytest.mark.parametrize(("pattern", "num_heads", "num_kv_heads"), PATTERNS)
def test_direct_evaluation_equals_the_definition(pattern, num_heads, num_kv_heads):
    job = SlicedJob(pattern, 96, 1, num_heads, num_kv_heads, 8)
    *full, dout = full_tensors(job)
    out, lse, dq, dk, dv = (x[0] for x in reference(pattern, full, dout))
    direct = Direct(pattern, job.seq_len, num_heads, num_kv_heads, job.tensors)
    for head in range(num_heads):
        rows = direct.query_rows(head, torch.arange(96))
        for mine, theirs in zip(rows, (out, lse, dq), strict=True):
            torch.testing.assert_close(mine, theirs[:, head], rtol=0, atol=1e-12)
    some = torch.tensor([0, 1, 15, 47, 95])
    for head in range(num_kv_heads):
        for mine, theirs in zip(direct.key_gradients(head, some), (dk, dv), strict=True):
            torch.testing.assert_close(mine, theirs[some, head], rtol=0, atol=1e-12)
        sums = [direct.key_gradients(head, some, range(a, a + 32)) for a in (0, 32, 64)]
        for k, theirs in enumerate((dk, dv)):
            torch.testing.assert_close(sum(p[k] for p in sums), theirs[some, head], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("pattern", "num_kv_heads"),
    [
        (DilatedPattern((32, 128, 512), (1, 3, 65), is_causal=True), 4),
        (DilatedPattern((32, 128, 512), (1, 3, 33)), 2),
        (DilatedPattern((100, 300), (1, 9), is_causal=True, phase="blocked"), 1),
        (DilatedPattern((32, 512), (1, 95), is_causal=True), 4),  # phases 0 and 1 are on rank 2, 2 and 3 on rank 3
    ],
)
def test_one_rank_equals_the_definition(pattern, num_kv_heads):
    """All rows of a rank, the complete dk and dv among them, for the first, a middle and the last rank."""
    job = SlicedJob(pattern, 512, 8, 4, num_kv_heads, 8)
    *full, dout = full_tensors(job)
    out, lse, dq, dk, dv = reference(pattern, full, dout)
    for rank in (0, 5, 7):
        share = run_share(job, rank, ignore)
        own = slice(job.rows_of(rank).start, job.rows_of(rank).stop)
        for mine, theirs in zip((share.out, share.lse, share.dq, *share.complete), (out, lse, dq, dk, dv), strict=True):
            assert relative_error(mine, theirs[0, own]) < tolerance(job.head_dim)


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
            for total, grads in zip(self.sums, block_views(gradient, block, batch, head_dim), strict=True):
                for b in range(batch):
                    total[b].index_put_((positions, heads.expand_as(positions)), grads[b], accumulate=True)


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
            [torch.arange(*span) for span in parallel.cut.shards_of(parallel.cut.default_lengths(n))[rank]]
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


SLICES = [
    DilatedPattern((256, 1024, 4096), (1, 5, 257), is_causal=True),
    DilatedPattern((128, 512, 4096), (1, 2, 300), is_causal=True),
    DilatedPattern((128, 512, 2048), (1, 2, 65)),
]


def worst(checks, quantity=""):
    return max(check.error for check in checks if check.quantity.startswith(quantity))


@pytest.mark.parametrize("pattern", SLICES)
def test_a_slice_is_verified(pattern):
    """And the rows drawn are not vacuous: every branch has some, and chunks of other ranks are among them."""
    job = SlicedJob(pattern, 4096, 16, 4, 4, 16)
    rank = choose_rank(job)
    share = run_share(job, rank, ignore)
    checks = verify(job, rank, share, ignore)
    assert worst(checks) < tolerance(job.head_dim)
    for kind, quantities, number in [("", ("out", "lse", "dq"), 64), ("contribution", (), 64), ("complete", (), 8)]:
        found = [c for c in checks if (c.quantity in quantities if quantities else c.quantity.startswith(kind))]
        assert {c.branch for c in found} == {0, 1, 2}
        for quantity in {c.quantity for c in found}:
            assert sum(c.num_rows for c in found if c.quantity == quantity) == number
    remote = {c.branch for c in checks if c.num_remote}
    assert {1, 2} <= remote  # what crosses the border of a shard of 256
    assert share.viewers


class OneWrongChunk(Others):
    """Makes one chunk of another rank from the wrong row."""

    wrong = -1

    def keys_and_values(self, positions_GM, heads_G1):
        return super().keys_and_values(positions_GM + (positions_GM // 256 == self.wrong), heads_G1)


class Forgetful(Others):
    def take_gradient(self, chunk, gradient):
        super().take_gradient(chunk, gradient * (chunk.branch != 2))


class HomeLess(Others):
    def gradient_home(self, chunk):
        return super().gradient_home(chunk) if chunk.branch != 2 else None


@pytest.mark.parametrize(
    ("kind", "quantity"),
    [(OneWrongChunk, "out"), (OneWrongChunk, "dq"), (Forgetful, "contribution"), (HomeLess, "complete")],
)
def test_the_check_can_fail(kind, quantity):
    """Proof that a slice does not pass if one chunk is made wrong, or a branch's gradients are lost on either way."""
    job = SlicedJob(SLICES[0], 4096, 16, 4, 4, 16)
    rank = choose_rank(job)
    others = kind(job.tensors)
    if kind is OneWrongChunk:  # any that it meets, of the widest branch
        plan, find = job.plan(rank), job.chunk_finder(rank)
        others.wrong = next(m.owner for hop in plan.hops for m in hop.receives if find(m).branch == 2)
    checks = verify(job, rank, run_share(job, rank, ignore, others), ignore)
    assert worst(checks, quantity) > 100 * tolerance(job.head_dim)


def test_the_billion_token_job():
    """The rank that runs by default: behind others in all its rings, rows of all branches, and few ranks to run."""
    job = SlicedJob(longnet_pattern(2**30), 2**30, 2**16)
    assert job.pattern.segment_lengths[-1] == 2**30
    assert all(w / r <= 256 for w, r in job.pattern.branches[5:])
    rank = choose_rank(job)
    assert rank == 64_507
    plan, find = job.plan(rank), job.chunk_finder(rank)
    met = [find(m).branch for hop in plan.hops for m in hop.receives]
    assert set(met) == {4, 5, 6, 7, 8, 9}
    assert met.count(9) == 251
    assert len({m.peer for hop in plan.hops for m in hop.targets}) == 36


def test_a_record_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    """Catches minutes of work whose result is a traceback."""
    (tmp_path / "file").touch()
    for path, why in ((tmp_path / "file" / "record.json", "a file is in the way"), (tmp_path, "Is a directory")):
        arguments = ["--seq-len", "1048576", "--ranks", "64", "--record", str(path)]
        monkeypatch.setattr("benchmarks.slice.report.measure", None)
        assert main(arguments) == 2
        assert f"--record {path} cannot be written: {why}" in capsys.readouterr().err


SHORT = ["--seq-len", "1024", "--ranks", "4", "--heads", "2", "--head-dim", "8"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--rank", "1"],
        ["--segment-lengths", "64", "1024", "--dilation-rates", "1", "5"],
        ["--seq-len", "1", "--ranks", "1", "--rank", "0"],  # one key: dq is 0, and no error is relative to it
        # The two queries that are drawn for the second branch see one key, and two of which one weighs nearly all.
        ["--seq-len", "64", "--segment-lengths", "16", "64", "--dilation-rates", "1", "65", "--seed", "5"],
        # Those of the first branch see one key each: their dk is 0.
        ["--seq-len", "64", "--segment-lengths", "16", "64", "--dilation-rates", "65", "3", "--not-causal"],
    ],
)
def test_a_short_job_is_verified(more, capsys):
    """Below 2,048 positions LongNet has no branch that is as short; also where the pattern is given."""
    assert main([*SHORT, *more]) == 0
    out = capsys.readouterr().out
    assert "within" in out
    assert "nan" not in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rank", "4"], "--rank must be from 0 to 3, got 4"),
        (["--ranks", "2048"], "--ranks 2,048 share the 1,024 positions of --seq-len, so that 1,024 of them"),
        (["--seq-len", str(2**70), "--ranks", "2"], "--seq-len must be at most 1,099,511,627,776, got"),
        (["--seq-len", str(2**40), "--ranks", str(2**30)], "--ranks must be at most 1,048,576, got 1073741824"),
        (["--heads", "100000"], "--heads must be at most 65,536, got 100000"),
        (["--seed", str(2**62)], "--seed must be from -2,305,843,009,213,693,951 to"),
        (["--segment-lengths", str(2**64), "--dilation-rates", "1"], "--segment-lengths must be at most"),
        (["--seq-len", str(2**40), "--ranks", "1", "--rank", "0"], "GB of memory: use more --ranks"),
        (
            ["--seq-len", "64", "--segment-lengths", "64", "--dilation-rates", "100", "--rank", "3"],
            "rank 3 of 4 holds no row of any branch: there is nothing to verify. Leave out --rank",
        ),
        (["--segment-lengths", "64"], "dilation_rates is empty"),
    ],
)
def test_numbers_that_cannot_be_are_refused(more, message, capsys):
    assert main([*SHORT, *more]) == 2
    out, error = capsys.readouterr()
    assert message in error
    assert (out, error.count("\n")) == ("", 1)


def test_a_job_in_which_nothing_travels_is_refused():
    with pytest.raises(ValueError, match="nothing would travel"):
        choose_rank(SlicedJob(DilatedPattern((64,), (1,)), 256, 4))


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


def test_make_shards_takes_lists():
    assert make_shards("contiguous", [2, 3]) == make_shards("contiguous", (2, 3))
