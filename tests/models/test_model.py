"""LongNetLM: nothing leaks from the future, and 1 and p ranks have the same loss and gradients."""

import math
from functools import partial
from itertools import pairwise

import helpers
import pytest
import torch
import torch.nn.functional as F
from distributed import run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import allocated
from ring_dilated_attention import ContextParallel
from ring_dilated_attention.layers import multihead, rotary_table
from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss, recompute

CONFIG = LongNetConfig(
    (8, 32), (1, 3), vocab_size=50, num_layers=2, embed_dim=24, num_heads=4, num_kv_heads=2
)
make_tokens = partial(helpers.make_tokens, CONFIG.vocab_size)


def make(**options):
    torch.manual_seed(0)
    model = LongNetLM(CONFIG, **options).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


def test_no_logit_sees_a_later_token():
    model, tokens = make(), make_tokens(2, 37)
    before = model(tokens)
    assert before.shape == (2, 37, 50)
    for t in (0, 8, 36):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % CONFIG.vocab_size
        after = model(changed)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.allclose(before[:, t], after[:, t], atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_tokens_of_unsigned_integers(dtype):
    """Files of tokens hold uint16, which torch converts, but does not compare."""
    model, tokens = make(), make_tokens(2, 37)
    assert torch.equal(model(tokens.to(dtype)), model(tokens))
    assert torch.equal(model.loss(tokens.to(dtype)), model.loss(tokens))
    with pytest.raises(ValueError, match="tokens from 50 to 99, but vocab_size=50"):
        model(torch.tensor([[50, 99]]).to(dtype))


def test_loss_is_the_mean_over_next_tokens(monkeypatch):
    """In slices of positions (the last one ragged) as in one call, gradients included."""
    model, tokens = make(), make_tokens(2, 37)
    logits = model(tokens)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    gradients = [x.grad for x in model.parameters()]
    monkeypatch.setattr(recompute, "LOSS_SLICE_ROWS", 1)
    for rows in (5, 1000):
        monkeypatch.setattr(recompute, "LOSS_SLICE_LOGITS", rows * CONFIG.vocab_size)
        model.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


def test_loss_never_holds_all_logits():
    """Forward and backward of the loss stay below one (N, V) tensor."""
    config = LongNetConfig(
        (64,), (1,), vocab_size=2048, num_layers=1, embed_dim=8, num_heads=2, ffn_dim=8
    )
    model, tokens = LongNetLM(config), make_tokens(1, 8192)

    all_logits = tokens.numel() * config.vocab_size * 4
    assert allocated(lambda: model.loss(tokens).backward()).peak_bytes < all_logits / 2
    assert allocated(lambda: model(tokens)).peak_bytes > all_logits


@pytest.mark.parametrize(("vocab_size", "rows"), [(256, 4096), (128_256, 1024)])
def test_slices_of_the_loss_have_many_rows(vocab_size, rows):
    """8 rows of a vocabulary of 128,256 took nine times as long as 1,024: each slice has a gradient of the head."""
    config = LongNetConfig(
        (64,), (1,), vocab_size=vocab_size, num_layers=1, embed_dim=2, num_heads=1, ffn_dim=2
    )
    seen = []
    with torch.device("meta"), torch.no_grad():  # without data: there are half a gigabyte of logits
        model = LongNetLM(config)
        model.head.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
        model.loss(torch.zeros(2, (rows + 6) // 2, dtype=torch.int64))
    assert seen == [rows, 6]


def test_activation_checkpointing_holds_less():
    tokens = make_tokens(1, 2048)
    models = [make(activation_checkpointing=checkpointing) for checkpointing in (True, False)]
    less, most = (allocated(lambda m=m: m.loss(tokens).backward()).peak_bytes for m in models)
    assert less < 0.8 * most


def test_magneto_gain():
    """Value, output and feed-forward weights grow with depth, sqrt(log(2 * layers)); query and key do not."""
    gain = math.sqrt(math.log(16) / math.log(2))
    stds = []
    for layers in (1, 8):
        block = LongNetLM(LongNetConfig((8,), (1,), num_layers=layers)).blocks[0]
        query_and_key, value = block.attention.in_proj_weight.detach().split((256, 128))
        grown = (value, block.attention.out_proj.weight, block.ffn.fc1.weight, block.ffn.fc2.weight)
        stds.append([weight.std().item() for weight in (query_and_key, *grown)])
    ratios = [deep / shallow for shallow, deep in zip(*stds, strict=True)]
    assert ratios == pytest.approx([1] + [gain] * 4, rel=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: config_of(embed_dim=25), "embed_dim=25 over num_heads=4 is a head dim of 6.25"),
        (lambda: config_of(embed_dim=12), "is a head dim of 3: it must be an even integer"),
        (lambda: config_of(num_layers=2.0), "num_layers=2.0 must be an integer"),
        (lambda: config_of(vocab_size=True), "vocab_size=True must be an integer"),
        (lambda: config_of(num_kv_heads=0), "num_kv_heads=0 must be an integer of at least 1"),
        (lambda: config_of(rotary_base=10**400), "rotary_base=1000"),  # no float holds it
        (lambda: config_of(num_kv_heads=3), "4 query heads cannot share 3"),
        (lambda: LongNetLM(None), "config must be a LongNetConfig, got None"),
        (lambda: make(parallel="x"), "parallel must be a ContextParallel or None, got 'x'"),
        (lambda: make(activation_checkpointing="no"), "must be True or False, got 'no'"),
        (lambda: make().loss(torch.zeros(0, 5, dtype=torch.int64)), "has an empty batch"),
        (lambda: make().loss(torch.arange(5)), r"shape \(5,\) and dtype torch.int64"),
        (lambda: make().loss(torch.zeros(1, 5)), "dtype torch.float32: pass integers"),
        (lambda: make().loss([[0, 1, 2]]), "tokens must be a tensor of integers .*, got list"),
        (lambda: make(backend="sdpa")(make_tokens(1, 9)), "backend='sdpa'"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def config_of(**options):
    return LongNetConfig((8,), (1,), **options)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_rotary_table_for_a_step(checkpointing, monkeypatch):
    """Not one for each block, nor again where a block is recomputed."""
    made = []
    monkeypatch.setattr(
        multihead, "rotary_table", lambda *args: made.append(args) or rotary_table(*args)
    )
    make(activation_checkpointing=checkpointing).loss(make_tokens(1, 37)).backward()
    assert len(made) == 1


def rank_shards_blocks(rank, world_size):
    model, seen, policy = make().float(), [], MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
        block.attention.register_forward_pre_hook(
            lambda _, x, y: seen.append((x[0], y["positions"])), with_kwargs=True
        )
    fully_shard(NextTokenLoss(model), mp_policy=policy)(make_tokens(1, 37)).backward()
    for x, table in seen:
        assert x.dtype == torch.bfloat16
        assert table.cos_ND.dtype == table.sin_ND.dtype == torch.float32
    assert len(seen) == 2


def test_fsdp_leaves_rotary_tables_as_they_are():
    """It casts the tensors that a block is passed to bfloat16, in which angles would be off by 0.004."""
    run(1, rank_shards_blocks)


@pytest.mark.parametrize("step_count", [None, 5])
def test_texts_without_a_label(step_count):
    """A loss of 0, with gradients of 0: a text of one token, and three such documents."""
    for length, borders in ((1, None), (3, torch.arange(4, dtype=torch.int32))):
        model = make()
        loss = model.loss(make_tokens(1, length), borders, step_count=step_count)
        loss.backward()
        assert loss == 0
        assert not any(parameter.grad.any() for parameter in model.parameters())


BORDERS = (0, 17, 18, 41)  # a document of one token predicts nothing


def documents_one_by_one(tokens, borders):
    """Loss, gradients and logits of one device that runs each document by itself: the mean over their labels."""
    model = make()
    documents = [tokens[:, start:stop] for start, stop in pairwise(borders)]
    sums = [model.loss(x) * (x.shape[1] - 1) for x in documents]  # a document of one token has 0
    loss = sum(sums) / (borders[-1] - len(documents))
    loss.backward()
    logits = torch.cat([model(x) for x in documents], dim=1)
    return loss.detach(), {name: x.grad for name, x in model.named_parameters()}, logits.detach()


def compare_with_documents_one_by_one(tokens, borders, parallel, checkpointing):
    model = make(parallel=parallel, activation_checkpointing=checkpointing)
    cu_seqlens = None if len(borders) == 2 else torch.tensor(borders, dtype=torch.int32)
    expected_loss, gradients, logits = documents_one_by_one(tokens, borders)
    local = parallel.shard(tokens)
    loss_of = DistributedDataParallel(NextTokenLoss(model))
    loss = loss_of(local, cu_seqlens)
    loss.backward()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            model.get_parameter(name).grad,
            gradient,
            rtol=1e-9,
            atol=1e-11,
            msg=lambda text, n=name: n + text,
        )
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    with torch.no_grad():
        torch.testing.assert_close(
            model(local, cu_seqlens), parallel.shard(logits), rtol=1e-9, atol=1e-9
        )
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(borders)])
    [table] = seen  # attention cannot tell: rotary sees differences only
    expected = rotary_table(
        parallel.shard(positions[None])[0], 6, CONFIG.rotary_base, torch.float64
    )
    assert torch.equal(table.cos_ND, expected.cos_ND)
    assert torch.equal(table.sin_ND, expected.sin_ND)
    return loss.detach()


def test_packed_documents_on_one_device():
    """Without a context: catches a mean over other labels, and a document that sees another."""
    tokens, borders = make_tokens(1, 41), torch.tensor(BORDERS, dtype=torch.int32)
    loss, _, logits = documents_one_by_one(tokens, BORDERS)
    torch.testing.assert_close(make().loss(tokens, borders).detach(), loss)
    torch.testing.assert_close(make()(tokens, borders).detach(), logits)


def rank_compares(rank, world_size, cuts):
    for number, options in enumerate(cuts):
        parallel, is_even = ContextParallel(**options), number % 2 == 0
        compare_with_documents_one_by_one(make_tokens(1, 41), BORDERS, parallel, is_even)
        loss = compare_with_documents_one_by_one(make_tokens(2, 41), (0, 41), parallel, not is_even)
        losses = [torch.empty_like(loss) for _ in range(world_size)]
        torch.distributed.all_gather(losses, loss)
        assert all(torch.equal(loss, other) for other in losses)
        parallel.close()


@pytest.mark.parametrize(
    ("world_size", "cuts"),
    [
        (2, [{}, {"sharding": "zigzag"}, {"lengths": (17, 24)}, {"lengths": (20, 21)}]),
        (3, [{"lengths": (18, 0, 23)}, {"sharding": "zigzag"}, {"lengths": (0, 30, 11)}]),
    ],
)
def test_loss_and_gradients_on_p_ranks_are_those_on_one(world_size, cuts):
    """Documents that end inside a shard, at its border, and at one that an empty rank shares; and texts in a batch,
    whose labels cross the borders of shards, also over a rank that owns nothing. DDP takes the mean. Catches attention,
    rotary positions or a label that crosses the border of a document."""
    run(world_size, rank_compares, cuts)


def refuse_on_every_rank(rank, world_size):
    model = make(parallel=ContextParallel())
    tokens, is_odd = make_tokens(1, 8), rank == 1
    x = torch.zeros(1, 8, 24, dtype=torch.float64)
    attend, mask = model.blocks[0].attention, torch.zeros(8, 8) if is_odd else None
    borders = torch.tensor([0, 5, 16], dtype=torch.int32)
    ends = borders[[0, 2]]
    for call, said in (
        (
            lambda: model.loss(tokens.double() if is_odd else tokens),
            "tokens have" if is_odd else "rank 1 refused the call: tokens have shape",
        ),
        (
            lambda: model.loss(make_tokens(1 + rank, 8)),
            "ranks disagree on batch: rank 0 has 1, rank 1 has 2",
        ),
        (lambda: attend(x, x, x, attn_mask=mask), "attn_mask: the pattern decides"),
        (
            lambda: model.loss(tokens, borders if is_odd else borders.long()),
            "cu_seqlens must be a 1-D int32 tensor",
        ),
        (lambda: model.loss(tokens, borders[:-1]), "the length of the sequence, 16"),
        (
            lambda: model.loss(tokens, borders if is_odd else ends),
            r"disagree on cu_seqlens: rank 0 has \[0, 16\], rank 1 has \[0, 5, 16\]",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    model.loss(tokens)  # nothing was left over on the wire


def test_bad_input_of_one_rank_is_an_error_on_all():
    run(2, refuse_on_every_rank)
