"""torch's parallel styles and transformer layers with dilated attention, against one device.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import copy
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed import run
from helpers import message_of
from steps import MAX_NORM, PER_STEP, SAMPLES, make_loss, optimizer_of, take_steps, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ring_dilated_attention import (
    ContextParallel,
    DilatedPattern,
    MultiheadDilatedAttention,
    dilated_attention,
)
from ring_dilated_attention.integrations.torch import (
    ShardHeads,
    ShardSequence,
    check_averaged,
    held_heads,
    replace_attention,
)
from ring_dilated_attention.ranks.reduce import all_reduce

PATTERN = DilatedPattern((4, 9), (1, 3))
CAUSAL = DilatedPattern((4, 9), (1, 3), is_causal=True)
EXACT = {"rtol": 1e-10, "atol": 1e-11}


def encoder(*, kind=nn.TransformerEncoderLayer, dropout=0.0, batch_first=True):
    torch.manual_seed(0)
    layer = kind(32, 4, 48, dropout=dropout, batch_first=batch_first, dtype=torch.float64)
    if kind is nn.TransformerEncoderLayer:
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
    return nn.TransformerDecoder(layer, 2)


def language_model(parallel=None, dtype=torch.float64):
    return make_loss(parallel).to(dtype)


def rows(batch=2, length=11, width=32):
    torch.manual_seed(2)
    return torch.randn(batch, length, width, dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, expected, **EXACT)


def gradients_of(module, loss, mean=lambda x: x):
    loss.backward()
    found = {name: mean(whole(p.grad)) for name, p in module.named_parameters()}
    module.zero_grad()
    return found


def over_ranks_of(parallel):
    """The mean over the ranks of a sequence, as DDP takes it of gradients."""
    return lambda x: all_reduce(parallel.ranks, x) / parallel.world_size


# --- replace_attention


def test_a_dense_pattern_is_torchs_attention():
    """The same outputs and gradients, by the same parameters: optimizer and checkpoints go on."""
    x, memory = rows(), rows()
    causal = nn.Transformer.generate_square_subsequent_mask(11, dtype=torch.float64)
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        decodes = kind is nn.TransformerDecoderLayer
        module = encoder(kind=kind)
        expected = module(x, memory, tgt_mask=causal) if decodes else module(x)
        gradients = gradients_of(module, expected.sum())
        before = dict(module.named_parameters())
        assert replace_attention(module, DilatedPattern.dense(is_causal=decodes)) is module
        after = dict(module.named_parameters())
        assert after.keys() == before.keys()
        assert all(after[name] is p for name, p in before.items())
        found = module(x, memory) if decodes else module(x)
        close(found, expected)
        close(gradients_of(module, found.sum()), gradients)
        assert isinstance(module.layers[0].self_attn, MultiheadDilatedAttention)
        if decodes:
            assert isinstance(module.layers[0].multihead_attn, nn.MultiheadAttention)


def test_replaced_twice():
    """A second pattern takes the place of the first. Rotary embeddings stay, unless it is told otherwise; so do
    sub-LayerNorm and backend. And `parallel` reaches every layer."""
    x, parallel = rows(1), ContextParallel()
    twice = replace_attention(replace_attention(encoder(), PATTERN), CAUSAL, parallel=parallel)
    assert all(layer.self_attn.parallel is parallel for layer in twice.layers)
    close(twice(x), replace_attention(encoder(), CAUSAL)(x))
    assert (twice(x) - replace_attention(encoder(), PATTERN)(x)).abs().max() > 1e-3
    for options, base in (({"rotary": 500.0}, 500.0), ({}, 500.0), ({"rotary": False}, None)):
        replace_attention(twice, PATTERN, **options)
        assert {layer.self_attn.rotary_base for layer in twice.layers} == {base}
    module, options = encoder(), {"sub_layernorm": True, "backend": "cpu", "dtype": torch.float64}
    for layer in module.layers:
        layer.self_attn = MultiheadDilatedAttention(32, 4, PATTERN, **options)
    state = module.state_dict()
    nn.init.normal_(state["layers.0.self_attn.sub_layernorm.weight"])
    expected = module(x)
    replace_attention(module, PATTERN)
    assert list(module.state_dict()) == list(state)
    assert {layer.self_attn.backend for layer in module.layers} == {"cpu"}
    close(module(x), expected)


@torch.no_grad()
def test_padded_evaluation():
    """Where torch would take its fast path of nested tensors, which computes torch's attention."""
    module, x = replace_attention(encoder(), PATTERN).eval(), rows()
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[1, 7:] = True
    found = module(x, src_key_padding_mask=padding)
    close(found[0], module(x[:1])[0])
    close(found[1, :7], module(x[1:, :7])[0])


def with_second(attention):
    module = encoder()
    module.layers[1].self_attn = attention
    return module


def test_what_cannot_be_replaced():
    """Named, with the module as it was."""
    bias_kv = nn.MultiheadAttention(32, 4, add_bias_kv=True, batch_first=True)
    split = DilatedPattern([2] * 5, [1] * 5, heads="split")
    for module, pattern, said in (
        (encoder(dropout=0.1), PATTERN, "layers.0.self_attn has dropout=0.1, and dilated atten"),
        (encoder(batch_first=False), PATTERN, "layers.0.self_attn has batch_first=False"),
        (with_second(bias_kv), PATTERN, "layers.1.self_attn has extra key/value rows"),
        (with_second(nn.Identity()), PATTERN, "layers.1.self_attn is a Identity"),
        (nn.Sequential(nn.Linear(2, 2)), PATTERN, "Sequential has no nn.TransformerEncoderLayer"),
        (encoder(), split, "only 4"),
    ):
        before = [id(child) for child in module.modules()]
        assert said in message_of(lambda m=module, p=pattern: replace_attention(m, p))
        assert [id(child) for child in module.modules()] == before


# --- ShardSequence


class Around(nn.Module):
    """Something before and after what is sharded, as in a user's model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(32, 32, dtype=torch.float64)
        self.encoder = replace_attention(encoder(), PATTERN)
        self.after = nn.Linear(32, 5, dtype=torch.float64)

    def forward(self, x):
        return self.after(self.encoder(self.before(x)))


def rank_shards_an_encoder(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    for sharding in ("contiguous", "zigzag"):
        model, is_whole = Around(), sharding == "contiguous"
        x = rows(length=23).requires_grad_()
        expected = model(x)
        gradients = gradients_of(model, (expected**2).mean())
        dx, x.grad = x.grad, None
        style = ShardSequence(sharding=sharding, shard_inputs=True, unshard_outputs=is_whole)
        names = list(model.state_dict())
        assert parallelize_module(model, mesh, {"encoder": style}) is model
        [parallel] = style.contexts.values()
        assert all(layer.self_attn.parallel is parallel for layer in model.encoder.layers)
        assert list(model.state_dict()) == names
        found, mean = model(x), over_ranks_of(parallel)
        if is_whole:
            close(found, expected)
            loss = (found**2).mean()
        else:  # each rank's part of the loss, so that the mean over ranks is the whole of it
            close(found, parallel.shard(expected.detach()))
            loss = (found**2).sum() / expected.numel() * world_size
        close(gradients_of(model, loss, mean), gradients)
        close(mean(x.grad), dx)
        parallel.close()
    model, tokens = language_model(), SAMPLES[:PER_STEP]
    expected = model(tokens)
    gradients = gradients_of(model, expected)
    style = ShardSequence()
    parallelize_module(model, mesh, style)
    [parallel] = style.contexts.values()
    loss = model(parallel.shard(tokens))
    close(loss, expected)
    close(gradients_of(model, loss, over_ranks_of(parallel)), gradients)
    message = message_of(lambda: parallelize_module(nn.Linear(2, 2), mesh, ShardSequence()))
    assert "Linear has no dilated attention to shard along the sequence" in message


def test_sharded_along_the_sequence():
    """Outputs and the mean of gradients: of what is sharded, of what is before and behind it, and of the inputs; and
    of a language model whose loss is of shards."""
    run(3, rank_shards_an_encoder)


# --- ShardHeads


def check_heads(layer, shard, mean=lambda g: g):
    """shard(box) shards box["attention"]. Gradients of what is before it, and of the parameters of what a rank holds:
    those of the whole."""
    width = layer.embed_dim
    before, x = nn.Linear(width, width, dtype=torch.float64), rows(length=23, width=width)
    box = nn.ModuleDict({"before": before, "attention": copy.deepcopy(layer)})

    def attend():
        y = before(x)
        return box["attention"](y, y, y)[0]

    expected = attend()
    gradients = gradients_of(box, (expected**2).sum())
    of_whole = copy.deepcopy(layer)
    for name, p in of_whole.named_parameters():
        p.data.copy_(gradients[f"attention.{name}"])
    shard(box)
    held, found = box["attention"], attend()
    close(found, expected)
    right = {
        f"attention.{name}": p for name, p in of_whole.held(held.heads_held).named_parameters()
    }
    right |= {name: gradients[name] for name in ("before.weight", "before.bias")}
    close(gradients_of(box, (found**2).sum(), mean), right)
    return held


def rank_shards_heads(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    options = {"num_kv_heads": 5, "rotary": True, "dtype": torch.float64}
    layer = MultiheadDilatedAttention(40, 10, CAUSAL, **options)
    held = check_heads(
        layer, lambda box: parallelize_module(box, mesh, {"attention": ShardHeads()})
    )
    assert held.in_proj_weight.numel() < layer.in_proj_weight.numel()
    few = MultiheadDilatedAttention(40, 10, CAUSAL, num_kv_heads=1)
    for module, said in (
        (nn.Linear(2, 2), "for MultiheadDilatedAttention, got Linear"),
        (few, "1 key/value heads for"),
    ):
        assert said in message_of(lambda m=module: parallelize_module(m, mesh, ShardHeads()))


def test_sharded_heads():
    """Unevenly too. Catches phases of local heads, gradients of inputs that are not summed, a bias added twice."""
    run(3, rank_shards_heads)


def rank_shards_heads_on_a_mesh(rank, world_size):
    """Heads over one axis; over the other the sequence, in either order, or the parameters of what a rank holds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    attention = MultiheadDilatedAttention(16, 4, CAUSAL, rotary=True, dtype=torch.float64)
    heads, style = ShardHeads(), ShardSequence(shard_inputs=True, unshard_outputs=True)
    for plans in (
        [(mesh["dp"], heads), (mesh["cp"], style)],
        [(mesh["cp"], style), (mesh["dp"], heads)],
    ):

        def shard(box, plans=plans):
            for axis, plan in plans:
                parallelize_module(box, axis, {"attention": plan})

        check_heads(
            attention, shard, lambda g: over_ranks_of(next(iter(style.contexts.values())))(g)
        )

    def shard_parameters(box):
        parallelize_module(box, mesh["cp"], {"attention": heads})
        fully_shard(box["attention"], mesh=mesh["dp"])

    check_heads(attention, shard_parameters)


def test_heads_and_more_on_a_mesh():
    run(4, rank_shards_heads_on_a_mesh)


class Projected(nn.Module):
    """An attention of four projections, of which torch's styles shard the columns and rows."""

    def __init__(self, num_kv_heads):
        super().__init__()
        widths = {"q": 32, "k": 4 * num_kv_heads, "v": 4 * num_kv_heads, "o": 32}
        for name, width in widths.items():
            self.add_module(name, nn.Linear(32, width, dtype=torch.float64))

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (-1, 4)) for linear in (self.q, self.k, self.v))
        heads = held_heads(self, q.shape[2], 8)
        more = {} if heads is None else {"heads_held": heads, "num_heads": 8}
        return self.o(dilated_attention(q, k, v, CAUSAL, **more).flatten(2))


def rank_shards_columns(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    plan = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}
    for num_kv_heads in (8, 2):
        alone, x = Projected(num_kv_heads), rows(length=23)
        sharded = parallelize_module(copy.deepcopy(alone), mesh, plan)
        close(sharded(x), alone(x))
        found, expected = (gradients_of(m, (m(x) ** 2).sum()) for m in (sharded, alone))
        close(found, expected)
    cut = parallelize_module(Projected(1), mesh, plan)
    with pytest.raises((ValueError, RuntimeError)):
        cut(rows(1, 5))


def test_torchs_styles_for_columns_and_rows():
    """Which heads a rank has is read from the parameters. Projections that cut a head are refused."""
    run(2, rank_shards_columns)


def rank_alone_errs(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    layer = MultiheadDilatedAttention(16, 2, CAUSAL)
    box, style = nn.ModuleDict({"inner": layer}), ShardSequence(shard_inputs=True)
    parallelize_module(box, mesh, {"inner": style})
    model = sharded(language_model(ContextParallel(), torch.float32))
    x, tokens = torch.randn(1, 8, 16), torch.zeros(1, 4, dtype=torch.int64)
    wrong = [None, x[0], x[..., 1:], x.double(), [x], x[:, 1:], x[:, :0], x.to_sparse()]
    wrong += [x.to("meta"), "x"]
    bad_tokens = [None, tokens[0], tokens.double(), tokens + 999, tokens - 1, "x", tokens.bool()]
    attend = lambda y: box["inner"](y, y, y)[0]  # noqa: E731
    for call, right, others in ((attend, x, wrong), (model, tokens, bad_tokens)):
        for number, other in enumerate(others):
            odd = number % world_size
            start = time.monotonic()
            message_of(lambda c=call, y=other if rank == odd else right: c(y))
            assert time.monotonic() - start < 20, number
        assert call(right).isfinite().all()


def test_what_one_rank_alone_gets_wrong_reaches_the_others():
    """Catches ranks that wait for one that was given what it cannot take, also between the collectives of FSDP2."""
    run(2, rank_alone_errs)


def test_what_is_held_is_what_the_whole_was():
    """Catches random numbers that are drawn for a part, after which the dropout of two ranks differs; frozen parameters
    that are trained; a norm that begins anew; a part of a part, whose heads are counted from another one."""
    layer = MultiheadDilatedAttention(16, 4, CAUSAL, sub_layernorm=True)
    nn.init.normal_(layer.sub_layernorm.weight)
    layer.in_proj_weight.requires_grad_(False)
    state = torch.get_rng_state()
    held = layer.eval().held(range(4))
    assert torch.get_rng_state().equal(state)
    assert not held.training
    close(held.state_dict(), layer.state_dict())
    trained, expected = ([x.requires_grad for x in m.parameters()] for m in (held, layer))
    assert trained == expected
    held = MultiheadDilatedAttention(16, 4, CAUSAL).held(range(2, 4))
    assert "this module has range(2, 4) of 4 heads" in message_of(lambda: held.held(range(2)))


def test_heads_that_parameters_do_not_tell():
    assert held_heads(nn.Linear(2, 2), 4, 4) is None
    message = message_of(lambda: held_heads(nn.Linear(2, 2), 2, 4))
    assert "Linear computes 2 of 4 heads. Phases" in message
    assert "do not say (their shards: none)" in message


# --- FSDP2


def steps(model, tokens_of=lambda batch: batch):
    """Three steps, clipped, of DTensors or not."""
    batches = map(tokens_of, SAMPLES.split(PER_STEP))
    return take_steps(model, optimizer_of(model), model, torch.Tensor.backward, batches)


def sharded(model, **options):
    for module in (*model.model.blocks, model):
        fully_shard(module, **options)
    return model


def rank_shards_parameters(rank, world_size):
    """Two replicas of sequences that two ranks share: parameters sharded over all four, or over each replica's two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    parallel = ContextParallel(mesh["cp"], sharding="zigzag")
    own = slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
    expected = steps(language_model())
    assert min(expected.norms) > MAX_NORM  # or clipping would not be seen
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options, tolerance in (
        ({}, EXACT),
        ({"mesh": mesh}, EXACT),
        ({"mp_policy": policy}, {"rtol": 0.05, "atol": 0.02}),
    ):
        dtype = torch.float32 if "mp_policy" in options else torch.float64
        model = sharded(language_model(parallel, dtype), **options)
        check_averaged(model, parallel)
        found = steps(model, lambda batch: parallel.shard(batch[own]))
        losses = torch.tensor(found.losses, dtype=torch.float64)  # of this replica's sample
        dist.all_reduce(losses)
        pair = (losses / world_size).tolist(), found.norms
        torch.testing.assert_close(pair, (expected.losses, expected.norms), **tolerance)
        if dtype == torch.float64:
            close(found.parameters, expected.parameters)
    # Over dp alone: each rank of a sequence goes on with its own part of the gradient.
    model = fully_shard(language_model(parallel), mesh=mesh["dp"])
    found = steps(model, lambda batch: parallel.shard(batch[own]))
    assert found.norms[0] != pytest.approx(expected.norms[0], rel=1e-3)
    column, row = [[0, 2], [1, 3]][rank % 2], [[0, 1], [2, 3]][rank // 2]
    said = f"is sharded over the ranks {column}, but the ranks {row} share each sequence, and nobody would average"
    assert said in message_of(lambda: check_averaged(model, parallel))
    # Its blocks alone: what is around them is sharded over nobody.
    model = language_model(parallel)
    for block in model.model.blocks:
        fully_shard(block, mesh=mesh)
    assert f"model.embedding.weight {NO_PART}" in message_of(
        lambda: check_averaged(model, parallel)
    )
    for parameter in model.model.parameters():
        parameter.requires_grad_(hasattr(parameter, "full_tensor"))
    check_averaged(model, parallel)  # frozen: nothing to average
    asks_who_averages(rank, mesh, parallel)
    ignores_parameters(parallel)


NO_PART = "lies outside of the modules that DDP or fully_shard was called with, or they were told to ignore"


def asks_who_averages(rank, mesh, parallel):
    over_samples = mesh["dp"].get_group()
    column, row = [[0, 2], [1, 3]][rank % 2], [[0, 1], [2, 3]][rank // 2]
    wrong = f"averages over the ranks {column}, but the ranks {row} share each sequence"
    linear = partial(nn.Linear, 2, 2)
    older = partial(FullyShardedDataParallel, linear(), device_id=torch.device("cpu"))
    ddp = DistributedDataParallel(linear(), process_group=over_samples)
    partly = nn.ModuleDict({"body": DistributedDataParallel(linear()), "head": linear()})
    for module, said, is_for_the_user in (
        (nn.Sequential(ddp), f"DistributedDataParallel of 0 {wrong}", False),
        (
            older(process_group=over_samples),
            f"FullyShardedDataParallel of the module {wrong}",
            False,
        ),
        (linear(), f"weight {NO_PART}", True),
        (partly, f"head.weight {NO_PART}", True),
    ):
        found = message_of(lambda m=module: check_averaged(m, parallel))
        assert said in found
        if is_for_the_user:
            assert "wrap the whole module" in found
            check_averaged(module, parallel, by_hand=True)
        else:
            assert said in message_of(lambda m=module: check_averaged(m, parallel, by_hand=True))
    for module in (DistributedDataParallel(linear()), older()):
        check_averaged(module, parallel)
    both = ContextParallel(mesh)  # a mesh of two axes, of which each has two of the four ranks
    found = message_of(lambda: check_averaged(fully_shard(linear(), mesh=mesh["dp"]), both))
    assert "the ranks [0, 1, 2, 3] share each sequence" in found
    groups = [dist.new_group([member]) for member in range(4)]
    check_averaged(linear(), ContextParallel(groups[rank]))  # of this rank alone


def two_linears():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def ignores_parameters(parallel):
    blocks = two_linears()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(blocks, ["0.weight"])
    last, first = two_linears(), two_linears()
    fully_shard(last, ignored_params={last[0].weight})
    fully_shard(first[1])
    first[0].bias = None  # the root then has an ignored parameter alone
    fully_shard(first, ignored_params={first[0].weight})
    for module, name in (
        (DistributedDataParallel(blocks), "module.0.weight"),
        (last, "0.weight"),
        (first, "0.weight"),
    ):
        assert f"{name} {NO_PART}" in message_of(lambda m=module: check_averaged(m, parallel))
        check_averaged(module, parallel, by_hand=True)
        module.get_parameter(name).requires_grad_(False)
        check_averaged(module, parallel)
    kept = fully_shard(nn.Linear(2, 2), reshard_after_forward=False)
    with torch.no_grad():
        kept(torch.ones(1, 2))
    assert not hasattr(kept.weight, "full_tensor")
    check_averaged(kept, parallel)
    kept(torch.ones(1, 2)).sum().backward()
    assert kept.weight.grad is not None


def test_fsdp2_on_a_mesh_of_data_and_sequences():
    """Losses, norms and parameters of three clipped steps, of DTensors, also in bfloat16; and proof that the refusal is
    of something wrong.

    Catches DDP over replicas alone, a module that nobody wraps, a mesh of which one axis is looked at, parameters that
    DDP or fully_shard were told to ignore, and a false alarm after a forward.
    """
    run(4, rank_shards_parameters)
