"""With the rest of torch: checkpointing, autocast, FSDP2 and DDP over the same and over another axis, accumulation."""

from functools import partial

import helpers
import torch
import torch.distributed as dist
from distributed import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.attention import save_attention
from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss

PATTERN = DilatedPattern((8, 32), (1, 3), is_causal=True)
CONFIG = LongNetConfig(
    (8, 64), (1, 3), vocab_size=20, num_layers=1, embed_dim=16, num_heads=4, num_kv_heads=2
)
make_tokens = partial(helpers.make_tokens, CONFIG.vocab_size, 1)


def make_model(**options):
    torch.manual_seed(0)
    return LongNetLM(CONFIG, **options).double()


def plain_gradients(*batches):
    """One device, the mean over the batches."""
    model = make_model()
    for tokens in batches:
        (model.loss(tokens) / len(batches)).backward()
    return {name: x.grad for name, x in model.named_parameters()}


def assert_gradients(model, expected):
    for name, parameter in model.named_parameters():
        grad = (
            parameter.grad.full_tensor()
            if hasattr(parameter.grad, "full_tensor")
            else parameter.grad
        )
        torch.testing.assert_close(
            grad, expected[name.removeprefix("model.")], rtol=1e-9, atol=1e-11
        )


def recomputation(rank, world_size):
    cp = ContextParallel()
    torch.manual_seed(0)
    full = torch.randn(1, 37, 4, 8, dtype=torch.float64)
    results = []
    for context in ({}, {"context_fn": save_attention}, None):
        x = cp.shard(full).requires_grad_()

        def block(x):
            return dilated_attention(x.sin(), x.cos(), x, PATTERN, parallel=cp).square()

        before = cp.ranks.calls
        out = block(x) if context is None else checkpoint(block, x, use_reentrant=False, **context)
        out.sum().backward()
        results.append((cp.ranks.calls - before, x.grad))
    (twice, a), (once, b), (plain, c) = results
    assert (twice, once, plain) == (2, 1, 1)
    assert torch.equal(a, c)
    assert torch.equal(b, c)


def test_the_checkpoint_policy_sends_nothing_twice():
    """Catches a recomputed attention: plain checkpointing calls forward twice, the policy once; gradients are equal."""
    run(2, recomputation)


def test_autocast_is_a_cast():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 37, 2, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = dilated_attention(q, k, v, PATTERN)
    expected = dilated_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), PATTERN)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    assert torch.autograd.grad(out.float().sum(), q)[0].dtype == torch.float32


def fsdp_over_the_same_ranks(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh)
    model = NextTokenLoss(make_model(parallel=cp))
    for block in model.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens = make_tokens(41)
    model(cp.shard(tokens)).backward()
    assert_gradients(model, plain_gradients(tokens))


def test_fsdp_over_the_same_ranks():
    run(2, fsdp_over_the_same_ranks)


def two_axes(rank, world_size, wrapper):
    """Two sequences in parallel, each over two ranks; parameters are shared (or sharded) by all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"])
    model = NextTokenLoss(make_model(parallel=cp))
    if wrapper == "fsdp":
        fully_shard(model, mesh=mesh["dp", "cp"]._flatten("all"))
    else:
        model = DistributedDataParallel(model)
    batches = [make_tokens(41), make_tokens(41, seed=2)]
    loss = model(cp.shard(batches[mesh.get_local_rank("dp")]))
    loss.backward()
    assert_gradients(model.module if wrapper == "ddp" else model, plain_gradients(*batches))


def test_fsdp_over_another_axis():
    run(4, two_axes, "fsdp")


def test_ddp_over_another_axis():
    run(4, two_axes, "ddp")


def zigzag_loss(rank, world_size):
    cp = ContextParallel(sharding="zigzag")
    tokens = make_tokens(41)
    model = DistributedDataParallel(NextTokenLoss(make_model(parallel=cp)))
    loss = model(cp.shard(tokens))
    loss.backward()
    torch.testing.assert_close(loss, make_model().loss(tokens), rtol=1e-12, atol=1e-12)
    assert_gradients(model.module, plain_gradients(tokens))


def test_labels_and_positions_under_zigzag():
    """Every shard has two spans: rotary positions jump, and labels cross two borders."""
    run(3, zigzag_loss)


def accumulation(rank, world_size):
    cp = ContextParallel()
    model = DistributedDataParallel(NextTokenLoss(make_model(parallel=cp)))
    batches = [make_tokens(41), make_tokens(30, seed=2), make_tokens(5, seed=3)]
    for tokens in batches[:-1]:
        with model.no_sync():
            (model(cp.shard(tokens)) / len(batches)).backward()
    (model(cp.shard(batches[-1])) / len(batches)).backward()
    assert_gradients(model.module, plain_gradients(*batches))
    assert dist.get_world_size() == world_size


def test_gradient_accumulation():
    run(2, accumulation)
