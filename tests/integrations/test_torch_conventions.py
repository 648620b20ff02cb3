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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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
from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss
from ring_dilated_attention.ranks.reduce import all_reduce

PATTERN = DilatedPattern((4, 9), (1, 3))
CAUSAL = DilatedPattern((4, 9), (1, 3), is_causal=True)


def encoder(*, kind=nn.TransformerEncoderLayer, dropout=0.0, batch_first=True):
    torch.manual_seed(0)
    layer = kind(32, 4, 48, dropout=dropout, batch_first=batch_first, dtype=torch.float64)
    if kind is nn.TransformerEncoderLayer:
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
    return nn.TransformerDecoder(layer, 2)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


# --- replace_attention


def test_a_dense_pattern_is_torchs_attention():
    """The same outputs and gradients, by the same parameters: optimizer and checkpoints go on."""
    x, memory = (torch.randn(2, 11, 32, dtype=torch.float64) for _ in range(2))
    causal = nn.Transformer.generate_square_subsequent_mask(11, dtype=torch.float64)
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        decodes = kind is nn.TransformerDecoderLayer
        module = encoder(kind=kind)
        expected = module(x, memory, tgt_mask=causal) if decodes else module(x)
        expected.sum().backward()
        gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
        module.zero_grad()
        before = {name: p for name, p in module.named_parameters()}
        assert replace_attention(module, DilatedPattern.dense(is_causal=decodes)) is module
        assert all(p is before[name] for name, p in module.named_parameters())
        assert len(before) == len(dict(module.named_parameters()))
        found = module(x, memory) if decodes else module(x)
        found.sum().backward()
        close(found, expected)
        close({name: p.grad for name, p in module.named_parameters()}, gradients)
        assert isinstance(module.layers[0].self_attn, MultiheadDilatedAttention)
        if decodes:
            assert isinstance(module.layers[0].multihead_attn, nn.MultiheadAttention)


def test_states_go_both_ways():
    """Catches parameters under other names: a state of torch's module loads into the replaced one, and back."""
    plain, replaced = encoder(), replace_attention(encoder(), PATTERN)
    extra = ["layers.0.self_attn._extra_state", "layers.1.self_attn._extra_state"]
    names = [name for name in replaced.state_dict() if name not in extra]
    assert list(plain.state_dict()) == names
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.1)
    replaced.load_state_dict(plain.state_dict())
    close({name: replaced.state_dict()[name] for name in names}, plain.state_dict())
    result = plain.load_state_dict(
        replaced.state_dict(), strict=False
    )  # torch's remembers no pattern
    assert result.unexpected_keys == extra
    assert result.missing_keys == []


def test_replaced_attention_may_have_rotary_embeddings():
    """A second replacement keeps them, unless it is told otherwise."""
    module = replace_attention(encoder(), PATTERN, rotary=500.0)
    assert {layer.self_attn.rotary_base for layer in module.layers} == {500.0}
    replace_attention(module, DilatedPattern.dense())
    assert {layer.self_attn.rotary_base for layer in module.layers} == {500.0}
    replace_attention(module, PATTERN, rotary=False)
    assert {layer.self_attn.rotary_base for layer in module.layers} == {None}


def test_a_second_replacement_keeps_sub_layernorm_and_backend():
    module = encoder()
    for layer in module.layers:
        layer.self_attn = MultiheadDilatedAttention(
            *(32, 4, PATTERN), sub_layernorm=True, backend="cpu", dtype=torch.float64
        )
    state = module.state_dict()
    nn.init.normal_(state["layers.0.self_attn.sub_layernorm.weight"])
    x = torch.randn(1, 11, 32, dtype=torch.float64)
    expected = module(x)
    replace_attention(module, PATTERN)
    assert list(module.state_dict()) == list(state)
    assert {layer.self_attn.backend for layer in module.layers} == {"cpu"}
    close(module(x), expected)


@torch.no_grad()
def test_padded_evaluation():
    """Where torch would take its fast path of nested tensors, which computes torch's attention."""
    module = replace_attention(encoder(), PATTERN).eval()
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[1, 7:] = True
    found = module(x, src_key_padding_mask=padding)
    close(found[0], module(x[:1])[0])
    close(found[1, :7], module(x[1:, :7])[0])


def test_replaced_twice():
    """A second pattern takes the place of the first."""
    x = torch.randn(1, 11, 32, dtype=torch.float64)
    twice = replace_attention(replace_attention(encoder(), PATTERN), CAUSAL)
    close(twice(x), replace_attention(encoder(), CAUSAL)(x))
    assert (twice(x) - replace_attention(encoder(), PATTERN)(x)).abs().max() > 1e-3


def test_what_cannot_be_replaced():
    """Named, with the module as it was."""
    bias_kv = encoder()
    bias_kv.layers[1].self_attn = nn.MultiheadAttention(32, 4, add_bias_kv=True, batch_first=True)
    own = encoder()
    own.layers[1].self_attn = nn.Identity()
    cases = [
        (
            encoder(dropout=0.1),
            "layers.0.self_attn has dropout=0.1, and dilated attention has none: set",
        ),
        (encoder(batch_first=False), "layers.0.self_attn has batch_first=False"),
        (bias_kv, "layers.1.self_attn has extra key/value rows"),
        (own, "layers.1.self_attn is a Identity"),
        (nn.Sequential(nn.Linear(2, 2)), "Sequential has no nn.TransformerEncoderLayer"),
    ]
    for module, said in cases:
        before = [id(child) for child in module.modules()]
        assert said in message_of(lambda module=module: replace_attention(module, PATTERN))
        assert [id(child) for child in module.modules()] == before
    split = DilatedPattern([2] * 5, [1] * 5, heads="split")
    assert "only 4" in message_of(lambda: replace_attention(encoder(), split))
    masked = replace_attention(encoder(), CAUSAL)
    mask = nn.Transformer.generate_square_subsequent_mask(11, dtype=torch.float64)
    x = torch.randn(1, 11, 32, dtype=torch.float64)
    assert "the pattern decides who attends whom" in message_of(lambda: masked(x, mask=mask))


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


def gradients_of(module, loss, parallel=None):
    loss.backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    if parallel is not None:
        found = {
            name: all_reduce(parallel.ranks, x) / parallel.world_size for name, x in found.items()
        }
    return found


def rank_shards_an_encoder(rank, world_size, sharding):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    model = Around()
    torch.manual_seed(2)
    x = torch.randn(2, 23, 32, dtype=torch.float64, requires_grad=True)
    expected = model(x)
    (expected**2).mean().backward(inputs=[x])
    dx, x.grad = x.grad, None
    gradients = gradients_of(model, (model(x.detach()) ** 2).mean())
    style = ShardSequence(
        sharding=sharding, shard_inputs=True, unshard_outputs=sharding == "contiguous"
    )
    names = list(model.state_dict())
    assert parallelize_module(model, mesh, {"encoder": style}) is model
    [parallel] = style.contexts.values()
    assert all(layer.self_attn.parallel is parallel for layer in model.encoder.layers)
    assert list(model.state_dict()) == names
    found = model(x)
    if style.unshard_outputs:
        close(found, expected)
        loss = (found**2).mean()
    else:  # each rank's part of the loss, so that the mean over ranks is the whole of it
        close(found, parallel.shard(expected.detach()))
        loss = (found**2).sum() / expected.numel() * world_size
    found = gradients_of(model, loss, parallel)
    close(found, gradients)
    close(all_reduce(parallel.ranks, x.grad) / world_size, dx)


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_sharded_along_the_sequence(sharding):
    """Outputs and the mean of gradients: of what is sharded, of what is before and behind it, and of the inputs."""
    run(2, rank_shards_an_encoder, sharding)


def rank_shards_a_model(rank, world_size):
    config = LongNetConfig((4, 16), (1, 2), embed_dim=16, num_layers=2, num_heads=2, vocab_size=40)
    torch.manual_seed(0)
    model = LongNetLM(config).double()
    tokens = torch.randint(0, 40, (1, 21))
    expected = model.loss(tokens)
    gradients = gradients_of(model, expected)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    style = ShardSequence()
    parallelize_module(model, mesh, style)
    [parallel] = style.contexts.values()
    loss = model.loss(parallel.shard(tokens))
    close(loss, expected)
    close(gradients_of(model, loss, parallel), gradients)
    message = message_of(lambda: parallelize_module(nn.Linear(2, 2), mesh, ShardSequence()))
    assert "Linear has no dilated attention to shard along the sequence" in message


def test_a_language_model_sharded_by_torchs_convention():
    run(3, rank_shards_a_model)


# --- ShardHeads


def rank_shards_heads(rank, world_size, num_kv_heads):
    torch.manual_seed(0)
    layer = MultiheadDilatedAttention(
        40, 10, CAUSAL, num_kv_heads=num_kv_heads, rotary=True, dtype=torch.float64
    )
    block = nn.ModuleDict({"attention": copy.deepcopy(layer)})
    x = torch.randn(2, 23, 40, dtype=torch.float64, requires_grad=True)
    expected = layer(x, x, x)[0]
    (expected**2).sum().backward()
    dx, x.grad = x.grad, None
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    parallelize_module(block, mesh, {"attention": ShardHeads()})
    held = block["attention"]
    assert held.in_proj_weight.numel() < layer.in_proj_weight.numel()
    found = held(x, x, x)[0]
    close(found, expected)
    (found**2).sum().backward()
    close(x.grad, dx)
    grads = copy.deepcopy(layer)
    with torch.no_grad():
        for name, p in grads.named_parameters():
            p.copy_(layer.get_parameter(name).grad)
    expected = grads.held(held.heads_held)
    close({name: p.grad for name, p in held.named_parameters()}, dict(expected.named_parameters()))
    assert "for MultiheadDilatedAttention, got Linear" in message_of(
        lambda: parallelize_module(nn.Linear(2, 2), mesh, ShardHeads())
    )
    few = MultiheadDilatedAttention(40, 10, CAUSAL, num_kv_heads=1)
    assert "1 key/value heads for" in message_of(
        lambda: parallelize_module(few, mesh, ShardHeads())
    )


@pytest.mark.parametrize(("world_size", "num_kv_heads"), [(2, 5), (3, 10)])
def test_sharded_heads(world_size, num_kv_heads):
    """Unevenly too. Catches phases of local heads, gradients of inputs that are not summed, a bias added twice."""
    run(world_size, rank_shards_heads, num_kv_heads)


def rank_shards_heads_on_a_mesh(rank, world_size):
    """Heads over one axis; over the other the sequence, in either order, or the parameters of what a rank holds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    before = nn.Linear(16, 16, dtype=torch.float64)
    attention = MultiheadDilatedAttention(16, 4, CAUSAL, rotary=True, dtype=torch.float64)
    x = torch.randn(2, 23, 16, dtype=torch.float64)
    y = before(x)
    expected = attention(y, y, y)[0]
    gradients = torch.autograd.grad((expected**2).sum(), [before.weight, *attention.parameters()])
    whole_gradients = copy.deepcopy(attention)
    for p, gradient in zip(whole_gradients.parameters(), gradients[1:], strict=True):
        p.data.copy_(gradient)

    def check(held, found, loss, mean):
        close(found, expected)
        before.zero_grad()
        loss.backward()
        close(mean(before.weight.grad), gradients[0])
        right = dict(whole_gradients.held(held.heads_held).named_parameters())
        close({name: mean(whole(p.grad)) for name, p in held.named_parameters()}, right)

    for is_heads_first in (True, False):
        box = nn.ModuleDict({"attention": copy.deepcopy(attention)})
        style = ShardSequence(shard_inputs=True, unshard_outputs=True)
        plans = [(mesh["dp"], ShardHeads()), (mesh["cp"], style)]
        for axis, plan in plans if is_heads_first else plans[::-1]:
            parallelize_module(box, axis, {"attention": plan})
        [parallel] = style.contexts.values()
        y = before(x)
        found = box["attention"](y, y, y)[0]
        check(
            box["attention"],
            found,
            (found**2).sum(),
            lambda g, over=parallel: all_reduce(over.ranks, g) / 2,
        )
    box = nn.ModuleDict({"attention": copy.deepcopy(attention)})
    parallelize_module(box, mesh["cp"], {"attention": ShardHeads()})
    held = fully_shard(box["attention"], mesh=mesh["dp"])
    y = before(x)
    found = held(y, y, y)[0]
    check(held, found, (found**2).sum(), lambda g: g)


def test_heads_and_more_on_a_mesh():
    run(4, rank_shards_heads_on_a_mesh)


class Projected(nn.Module):
    """An attention of four projections, of which torch's styles shard the columns and rows."""

    def __init__(self, num_kv_heads):
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(32, width, dtype=torch.float64)
            for width in (32, 4 * num_kv_heads, 4 * num_kv_heads, 32)
        )

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (-1, 4)) for linear in (self.q, self.k, self.v))
        heads = held_heads(self, q.shape[2], 8)
        more = {} if heads is None else {"heads_held": heads, "num_heads": 8}
        return self.o(dilated_attention(q, k, v, CAUSAL, **more).flatten(2))


def rank_shards_columns(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    plan = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}
    for num_kv_heads in (8, 2):
        torch.manual_seed(0)
        alone = Projected(num_kv_heads)
        sharded = parallelize_module(copy.deepcopy(alone), mesh, plan)
        x = torch.randn(2, 23, 32, dtype=torch.float64)
        close(sharded(x), alone(x))
        (alone(x) ** 2).sum().backward()
        (sharded(x) ** 2).sum().backward()
        for p, q in zip(alone.parameters(), sharded.parameters(), strict=True):
            close(whole(q.grad), p.grad)
    cut = parallelize_module(Projected(1), mesh, plan)
    with pytest.raises((ValueError, RuntimeError)):
        cut(torch.randn(1, 5, 32, dtype=torch.float64))


def test_torchs_styles_for_columns_and_rows():
    """Which heads a rank has is read from the parameters. Projections that cut a head are refused."""
    run(2, rank_shards_columns)


def rank_alone_errs(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    layer = MultiheadDilatedAttention(16, 2, CAUSAL)
    box, style = nn.ModuleDict({"inner": layer}), ShardSequence(shard_inputs=True)
    parallelize_module(box, mesh, {"inner": style})
    model = NextTokenLoss(LongNetLM(CONFIG, parallel=ContextParallel()))
    for module in (*model.model.blocks, model):
        fully_shard(module)
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
    assert [x.requires_grad for x in held.parameters()] == [
        x.requires_grad for x in layer.parameters()
    ]
    held = MultiheadDilatedAttention(16, 4, CAUSAL).held(range(2, 4))
    assert "this module has range(2, 4) of 4 heads" in message_of(lambda: held.held(range(2)))


def test_heads_that_parameters_do_not_tell():
    assert held_heads(nn.Linear(2, 2), 4, 4) is None
    message = message_of(lambda: held_heads(nn.Linear(2, 2), 2, 4))
    assert "Linear computes 2 of 4 heads. Phases" in message
    assert "do not say (their shards: none)" in message


def test_replaced_for_ranks():
    """`parallel` reaches every layer."""
    parallel = ContextParallel()
    module = replace_attention(encoder(), PATTERN, parallel=parallel)
    assert all(layer.self_attn.parallel is parallel for layer in module.layers)


# --- FSDP2


CONFIG = LongNetConfig((4, 16), (1, 2), embed_dim=16, num_layers=2, num_heads=2, vocab_size=40)
SAMPLES = torch.randint(0, 40, (3, 2, 37), generator=torch.Generator().manual_seed(1))


def steps(model, tokens_of, clip=0.2):
    """Losses, norms of gradients and parameters of three steps, as DTensor or not."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    found = []
    for batch in SAMPLES:
        loss = model(tokens_of(batch))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), whole(norm)]
    return found, {name: whole(p.detach()) for name, p in model.named_parameters()}


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def rank_shards_parameters(rank, world_size):
    """Two replicas of sequences that two ranks share: parameters sharded over all four, or over each replica's two."""
    torch.manual_seed(0)
    losses, parameters = steps(NextTokenLoss(LongNetLM(CONFIG).double()), lambda batch: batch)
    assert min(losses[1::2]) > 0.2  # or clipping would not be seen
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    parallel = ContextParallel(mesh["cp"])
    own = slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
    for over in (mesh["dp", "cp"]._flatten("all"), mesh):
        torch.manual_seed(0)
        model = NextTokenLoss(LongNetLM(CONFIG, parallel=parallel).double())
        for block in model.model.blocks:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
        check_averaged(model, parallel)
        found, found_parameters = steps(model, lambda batch: parallel.shard(batch[own]))
        close(found[1::2], losses[1::2])
        close(found_parameters, parameters)
    # Over dp alone: each rank of a sequence goes on with its own part of the gradient.
    torch.manual_seed(0)
    model = NextTokenLoss(LongNetLM(CONFIG, parallel=parallel).double())
    fully_shard(model, mesh=mesh["dp"])
    assert not torch.allclose(
        steps(model, lambda batch: parallel.shard(batch[own]))[0][1], losses[1], rtol=1e-3
    )
    column, row = [[0, 2], [1, 3]][rank % 2], [[0, 1], [2, 3]][rank // 2]
    expected = f"is sharded over the ranks {column}, but the ranks {row} share each sequence, and nobody would average"
    assert expected in message_of(lambda: check_averaged(model, parallel))
    # Its blocks alone: what is around them is sharded over nobody.
    model = NextTokenLoss(LongNetLM(CONFIG, parallel=parallel).double())
    for block in model.model.blocks:
        fully_shard(block, mesh=mesh)
    expected = "model.embedding.weight is in no part that DDP or fully_shard was called with, or they were told"
    assert expected in message_of(lambda: check_averaged(model, parallel))
    for parameter in model.model.parameters():
        parameter.requires_grad_(hasattr(parameter, "full_tensor"))
    check_averaged(model, parallel)  # frozen: nothing to average


def test_fsdp2_on_a_mesh_of_data_and_sequences():
    """DTensor parameters, clipped. And proof that the refusal is of something wrong."""
    run(4, rank_shards_parameters)


def rank_asks_who_averages(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    parallel = ContextParallel(mesh["cp"])
    column, row = [[0, 2], [1, 3]][rank % 2], [[0, 1], [2, 3]][rank // 2]
    check_averaged(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), parallel)
    box = nn.Sequential(
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=mesh["dp"].get_group())
    )
    for by_hand in (False, True):
        found = message_of(lambda by_hand=by_hand: check_averaged(box, parallel, by_hand=by_hand))
        assert (
            f"DistributedDataParallel of 0 averages over the ranks {column}, but the ranks {row} share each sequence"
            in found
        )
    older = partial(FullyShardedDataParallel, nn.Linear(2, 2), device_id=torch.device("cpu"))
    over_samples = older(process_group=mesh["dp"].get_group())
    said = message_of(lambda: check_averaged(over_samples, parallel))
    assert f"FullyShardedDataParallel of the module averages over the ranks {column}" in said
    check_averaged(older(), parallel)
    bare = nn.Linear(2, 2)
    partly = nn.ModuleDict(
        {"body": nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), "head": bare}
    )
    for module, name in ((bare, "weight"), (partly, "head.weight")):
        found = message_of(lambda module=module: check_averaged(module, parallel))
        assert (
            f"{name} is in no part that DDP or fully_shard was called with, or they were told to ignore it"
            in found
        )
        assert "wrap the whole module" in found
        assert "by_hand=True" in found
        check_averaged(module, parallel, by_hand=True)
    both = ContextParallel(mesh)  # a mesh of two axes, of which each has two of the four ranks
    found = message_of(lambda: check_averaged(fully_shard(nn.Linear(2, 2), mesh=mesh["dp"]), both))
    assert "the ranks [0, 1, 2, 3] share each sequence" in found
    check_averaged(nn.Linear(2, 2), ContextParallel(alone(rank)))


def alone(rank):
    """A group of this rank alone."""
    return [dist.new_group([member]) for member in range(dist.get_world_size())][rank]


def rank_ignores_parameters(rank, world_size):
    parallel = ContextParallel()
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    whole = nn.parallel.DistributedDataParallel
    whole._set_params_and_buffers_to_ignore_for_model(blocks, ["0.weight"])
    ignored = {"module.0.weight": whole(blocks)}
    for is_last in (True, False):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if not is_last:  # the root then has an ignored parameter alone
            fully_shard(model[1])
            model[0].bias = None
        fully_shard(model, ignored_params={model[0].weight})
        ignored[f"0.weight of FSDP2 {is_last}"] = model
    for name, module in ignored.items():
        found = message_of(lambda module=module: check_averaged(module, parallel))
        assert (
            f"{name.split(' ')[0]} is in no part that DDP or fully_shard was called with, or they were told to ignore"
            in found
        )
        check_averaged(module, parallel, by_hand=True)
        parameters = dict(module.named_parameters())
        parameters[name.split(" ")[0]].requires_grad_(False)
        check_averaged(module, parallel)
    kept = fully_shard(nn.Linear(2, 2), reshard_after_forward=False)
    with torch.no_grad():
        kept(torch.ones(1, 2))
    assert not hasattr(kept.weight, "full_tensor")
    check_averaged(kept, parallel)
    kept(torch.ones(1, 2)).sum().backward()
    assert kept.weight.grad is not None


def test_parameters_that_are_ignored():
    """Catches parameters below DDP or fully_shard that these were told to ignore; and a false alarm after a forward."""
    run(2, rank_ignores_parameters)


def test_who_averages():
    """Catches DDP over replicas alone, a module that nobody wraps, and a mesh of which one axis is looked at."""
    run(4, rank_asks_who_averages)


def rank_shards_over_the_ranks_of_a_sequence(rank, world_size):
    torch.manual_seed(0)
    expected, parameters = steps(NextTokenLoss(LongNetLM(CONFIG).double()), lambda batch: batch)
    parallel = ContextParallel(sharding="zigzag")
    torch.manual_seed(0)
    model = NextTokenLoss(LongNetLM(CONFIG, parallel=parallel).double())
    for module in (*model.model.blocks, model):
        fully_shard(module)
    check_averaged(model, parallel)
    found, found_parameters = steps(model, parallel.shard)
    close(found, expected)
    close(found_parameters, parameters)


def test_fsdp2_over_the_ranks_of_a_sequence():
    """Losses, norms and parameters of three clipped steps, with the mesh that FSDP2 takes where it is given none."""
    run(2, rank_shards_over_the_ranks_of_a_sequence)


def rank_computes_in_bfloat16(rank, world_size):
    parallel = ContextParallel()
    torch.manual_seed(0)
    model = NextTokenLoss(LongNetLM(CONFIG, parallel=parallel))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    torch.manual_seed(0)
    exact, _ = steps(NextTokenLoss(LongNetLM(CONFIG)), lambda batch: batch)
    found, _ = steps(model, parallel.shard)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.02, check_dtype=False)


def test_fsdp2_in_bfloat16():
    run(2, rank_computes_in_bfloat16)
