"""A ContextParallel between calls: its name, copies and end; and what one rank alone gets wrong.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import copy
import gc
import os
import pickle
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.layers import MultiheadDilatedAttention
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.models.sharded import shift_left
from ring_dilated_attention.ranks.link import ExchangeError

PATTERN = DilatedPattern((4, 16), (1, 2), is_causal=True)
PATIENCE = timedelta(seconds=20)  # more than a test may take: no rank gets its error from a clock


def tensors(rank: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(1, 8, 4, 8, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]


def message_of(call: Callable, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def rank_does_not_use_its_lse(rank, world_size, kind):
    found = []
    for exchange in (kind, "ring"):
        group = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")) if exchange == "mesh" else None
        context = ContextParallel(group, exchange="auto" if exchange == "mesh" else exchange, timeout=PATIENCE)
        leaves = tensors(rank)
        out, lse = dilated_attention(*leaves, PATTERN, parallel=context, return_lse=True)
        (out.sum() if rank == 0 else out.sum() + lse.sum()).backward()
        found.append([x.grad for x in leaves])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["all_to_all", "mesh", "all_gather"])
def test_a_loss_that_does_not_use_lse_on_one_rank(kind):
    """Catches a gradient that one rank deals and another does not: gloo ends the process when messages do not fit."""
    run(2, rank_does_not_use_its_lse, kind)


def rank_compiles(rank, world_size):
    context = ContextParallel(timeout=PATIENCE)
    layer = MultiheadDilatedAttention(32, 4, PATTERN, rotary=True, parallel=context)
    torch.manual_seed(0)
    x = torch.randn(1, 8, 32)
    compiled = torch.compile(lambda x: layer(x, x, x)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x, x, x)[0])
    query, key, value = tensors()
    attend = torch.compile(
        lambda *x: dilated_attention(*x, PATTERN, parallel=context), fullgraph=True, backend="aot_eager"
    )
    bad = value[..., :3] if rank == 1 else value
    message = message_of(lambda: attend(query, key, bad), Exception)
    assert "value (1, 8, 4, 3) must have the same shape" in message
    assert torch.isfinite(attend(query, key, value)).all()
    scaled = torch.compile(
        lambda x, scale: dilated_attention(x, x, x, PATTERN, scale=scale), fullgraph=True, backend="aot_eager"
    )
    for scale in (0.5, 0.25, -1.0, 0.0):
        torch.testing.assert_close(scaled(query, scale), dilated_attention(query, query, query, PATTERN, scale=scale))


def test_compiled_whole():
    """Catches a module that no whole graph takes, and a refusal in compiled code that the other ranks wait for."""
    run(2, rank_compiles)


def rank_has_bad_input(rank, world_size):
    warnings.simplefilter("error")
    context = ContextParallel(timeout=PATIENCE)
    odd = rank == 1
    layer = MultiheadDilatedAttention(32, 4, PATTERN, rotary=True, parallel=context)
    x = torch.randn(1, 8, 32)

    def attend(**arguments: torch.Tensor) -> Callable:
        return lambda: layer(x, x, x, **(arguments if odd else {}))

    borders = torch.tensor([0, 9], dtype=torch.int32)
    assert "ranks disagree on cu_seqlens: rank 0 has None, rank 1 has [0, 9]" in message_of(attend(cu_seqlens=borders))
    assert "1-D int32 tensor, got [0, 9]" in message_of(attend(cu_seqlens=[0, 9]))
    message = message_of(attend(positions=torch.arange(5)))
    assert "positions have shape (5,), the inputs need (8,)" in message
    assert "ContextParallel.positions" in message
    config = LongNetConfig(embed_dim=16, num_layers=1, num_heads=2, segment_lengths=(8,), dilation_rates=(1,))
    model = LongNetLM(config, parallel=context)
    tokens = torch.full((1, 8), 256 if odd else 0)
    assert "tokens from 256 to 256, but vocab_size=256" in message_of(lambda: model(tokens))
    assert "unshard along dim=2" in message_of(lambda: context.unshard(torch.zeros(1, 8), dim=2 if odd else 1))
    assert "shard along dim=2" in message_of(lambda: context.shard(torch.zeros(1, 8), dim=2))
    for labels in (torch.zeros(8, dtype=torch.int64), torch.zeros(1, 8)):
        good = torch.zeros(1, 8, dtype=torch.int64)
        message = message_of(lambda x=labels if odd else good: shift_left(context, x, 0))
        assert "shift_left takes integers (batch, N)" in message
    message = message_of(lambda: dilated_attention(*tensors(), PATTERN, parallel=context, scale=-0.5 if odd else 0.5))
    assert "ranks disagree on scale: rank 0 has 0.5, rank 1 has -0.5" in message
    message = message_of(lambda: dilated_attention(*tensors(), PATTERN, parallel=context, scale=int(odd)))
    assert "ranks disagree on scale" in message
    assert torch.isfinite(layer(x, x, x)[0]).all()
    given = ContextParallel(lengths=(3, 5), timeout=PATIENCE)
    message = message_of(lambda: dilated_attention(*tensors(), PATTERN, parallel=given))
    assert "ranks have (8, 8) positions, but lengths=(3, 5) was given" in message


def test_bad_input_of_one_rank():
    """Catches an error that one rank raises alone: the others would wait for it until their time is up."""
    run(2, rank_has_bad_input)


def rank_runs_out_of_memory(rank, world_size):
    context = ContextParallel(timeout=PATIENCE)
    if rank == 1:
        torch.cat = lambda *_, **__: (_ for _ in ()).throw(MemoryError("no memory left"))
        assert "no memory" in message_of(lambda: context.unshard(torch.zeros(1, 4)), MemoryError)
        assert context.ranks.all.failure
    else:

        def twice() -> None:
            for _ in range(2):  # where the first one's messages are through, the second says it
                context.unshard(torch.zeros(1, 4))

        message_of(twice, ExchangeError)


def test_a_rank_that_fails_alone_between_calls_of_attention():
    """Catches ranks that wait for one that ran out of memory while it gathered."""
    run(2, rank_runs_out_of_memory, seconds=15)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def rank_closes_contexts(rank, world_size):
    held = []
    for broken in (False, False, True, True):
        context = ContextParallel(timeout=PATIENCE)
        dilated_attention(*tensors(), PATTERN, parallel=context)
        if broken:
            dist.barrier()
            context.abandon("on purpose")
        context.close()
        assert (
            "was closed"
            in message_of(lambda c=context: dilated_attention(*tensors(), PATTERN, parallel=c), ExchangeError)
            or broken
        )
        context.close()
        del context
        gc.collect()  # what was raised holds the frames that hold a context
        dist.barrier()
        held.append((open_descriptors(), len(dist.distributed_c10d._world.pg_map)))
    assert held[1:] == held[:-1], held
    assert threading.active_count() < 8


def test_a_context_that_is_closed():
    """Catches sockets and threads that every context, also a broken one, leaves behind."""
    run(2, rank_closes_contexts)


def rank_starts_anew(rank, world_size):
    old = ContextParallel(sharding="zigzag", timeout=PATIENCE)
    import distributed

    dist.destroy_process_group()
    store = dist.PrefixStore("again", distributed.store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
    new = ContextParallel(timeout=PATIENCE)
    assert old.key != new.key
    message = message_of(lambda: dilated_attention(*tensors(), PATTERN, parallel=old), ExchangeError)
    assert "torch.distributed was shut down since it was made. Make a new ContextParallel." in message
    assert dilated_attention(*tensors(), PATTERN, parallel=new).shape == (1, 8, 4, 8)


def test_contexts_of_two_lives_of_torch_distributed():
    """Catches a stale context that is taken for a new one, since torch numbers its groups from 1 again."""
    run(2, rank_starts_anew)


def test_a_copied_module_shares_the_context():
    """Catches modules that EMA and torch's containers cannot copy, and copies whose context nobody serves."""
    context = ContextParallel(exchange="simulated", world_size=2)
    layer = MultiheadDilatedAttention(32, 4, PATTERN, parallel=context)
    assert copy.deepcopy(layer).parallel is context
    around = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    around.self_attn = layer
    stacked = nn.TransformerEncoder(around, 2, enable_nested_tensor=False)
    assert all(one.self_attn.parallel is context for one in stacked.layers)
    assert "state_dict" in message_of(lambda: pickle.dumps(layer), TypeError)


def test_processes_that_were_started_together_but_not_initialised(monkeypatch):
    """Catches ranks that each compute the whole sequence, in silence."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"2 processes were started.*init_process_group") as caught:
        ContextParallel()
    assert caught[0].filename == __file__
