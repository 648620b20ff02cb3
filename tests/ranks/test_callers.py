"""Which module calls, and calls that forget `parallel`.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import copy
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import run
from helpers import message_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.integrations.torch import ShardSequence, replace_attention
from ring_dilated_attention.layers import MultiheadDilatedAttention
from ring_dilated_attention.models import (
    LongNetConfig,
    LongNetEncoder,
    LongNetLM,
    LongNetViT,
    TorchscaleConfig,
)

PATTERN = DilatedPattern((4, 16), (1, 2), is_causal=True)
PATIENCE = timedelta(seconds=20)
CONFIG = LongNetConfig((4, 16), (1, 2), embed_dim=16, num_layers=3, num_heads=2, vocab_size=40)
APART = "ranks disagree on which module calls (numbered as modules were made with this context): rank 0 has"


def make_layers(parallel, number=3):
    torch.manual_seed(0)
    return [
        MultiheadDilatedAttention(32, 4, PATTERN, rotary=True, parallel=parallel)
        for _ in range(number)
    ]


def go_through(layers, x, dropped=None):
    for number, layer in enumerate(layers):
        if number != dropped:
            x = x + layer(x, x, x)[0]
    return x


def rank_drops_other_layers(rank, world_size):
    parallel = ContextParallel(timeout=PATIENCE)
    x = parallel.shard(torch.randn(1, 41, 32))
    layers = make_layers(parallel)
    for dropped in (None, 0, 2):  # the same on all ranks
        go_through(layers, x, dropped).sum().backward()
    found = message_of(lambda: go_through(layers, x, dropped=rank))
    assert f"{APART} 2, rank 1 has 1. All ranks" in found
    assert "If layers are dropped at random, drop the same ones on all ranks." in found
    go_through(layers, x)
    config = LongNetLM(CONFIG, parallel=parallel)
    tokens = parallel.shard(torch.randint(40, (1, 41)))
    config.loss(tokens)
    del config.blocks[rank]
    assert APART in message_of(lambda: config.loss(tokens))
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 32, dropout=0.0, batch_first=True), 3
    )
    replace_attention(encoder, PATTERN, parallel=parallel)
    encoder(x)
    del encoder.layers[rank]
    assert APART in message_of(lambda: encoder(x))
    [layer] = make_layers(parallel, 1)
    copies = [copy.deepcopy(layer) for _ in range(3)]
    go_through(copies, x)
    assert APART in message_of(lambda: go_through(copies, x, dropped=rank))
    styled = nn.ModuleList(make_layers(None))
    style = ShardSequence()
    parallelize_module(styled, init_device_mesh("cpu", (world_size,)), style)
    [other] = style.contexts.values()
    y = other.shard(torch.randn(1, 41, 32))
    go_through(styled, y)
    assert APART in message_of(lambda: go_through(styled, y, dropped=rank))


def rank_refuses_a_call(rank, world_size):
    """A refused call leaves nothing behind: the next call, of no module, is not taken for the module's."""
    parallel = ContextParallel(timeout=PATIENCE)
    x, heads = parallel.shard(torch.randn(1, 41, 32)), parallel.shard(torch.randn(1, 41, 4, 8))
    layers = make_layers(parallel)
    layers[0].backend = "none" if rank == 0 else "auto"
    assert "backend" in message_of(lambda: layers[0](x, x, x))
    layers[0].backend = "auto"
    dilated_attention(heads, heads, heads, PATTERN, parallel=parallel)
    assert APART in message_of(lambda: go_through(layers, x, dropped=rank))


def test_a_bare_call_after_a_refused_one():
    """Catches the number of a refused call's module in a later call, after which ranks compare no more."""
    run(2, rank_refuses_a_call)


def rank_drops_layers_of_torchscale(rank, world_size):
    parallel = ContextParallel(timeout=PATIENCE)
    x = parallel.shard(torch.randn(1, 41, 32))
    for padding in ("exact", "torchscale"):
        torch.manual_seed(0)
        sizes = {
            "embed_dim": 32,
            "ffn_dim": 32,
            "num_heads": 4,
            "num_layers": 3,
            "padding": padding,
        }
        config = TorchscaleConfig((4, 16), (1, 2), **sizes)
        encoder = LongNetEncoder(config, parallel=parallel)
        encoder(x).sum().backward()
        other = copy.deepcopy(encoder)
        assert APART in message_of(lambda pair=(encoder, other): pair[rank](x))
        del encoder.layers[rank]
        assert APART in message_of(lambda encoder=encoder: encoder(x))


def test_layers_of_torchscale_that_are_dropped_apart():
    """Catches an attention of torchscale's networks that does not say which module calls."""
    run(2, rank_drops_layers_of_torchscale)


def test_layers_that_are_dropped_apart():
    """Catches queries of one layer that meet keys of another, with as many calls of one shape on all ranks."""
    run(2, rank_drops_other_layers)


def rank_makes_other_modules(rank, world_size):
    """No false alarm, whatever one rank makes for itself."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "The .grad attribute")  # which torch.compile looks at
    whole = torch.randn(1, 41, 32)

    def attempt(change):
        parallel = ContextParallel(timeout=PATIENCE)
        x = parallel.shard(whole)
        first, expected = make_layers(parallel), go_through(make_layers(None), whole)
        first = change(first, parallel, "before") if rank == 0 else first
        for _ in range(2):
            torch.testing.assert_close(go_through(first, x), parallel.shard(expected))
        second = make_layers(parallel)
        second = change(second, parallel, "after") if rank == 0 else second
        for layers in (second, first):
            found = go_through(layers, x)
            torch.testing.assert_close(found, parallel.shard(expected))
            found.sum().backward()
        parallel.close()

    def one_more(layers, parallel, when):
        make_layers(parallel, 1)
        return make_layers(parallel)

    def only_before(layers, parallel, when):
        return make_layers(parallel) if when == "before" else layers

    def a_copy(layers, parallel, when):
        return copy.deepcopy(layers)

    def compiled(layers, parallel, when):
        return [torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in layers]

    def one_that_fails(layers, parallel, when):
        message_of(lambda: MultiheadDilatedAttention(32, 5, PATTERN, parallel=parallel))
        return layers

    def functions(layers, parallel, when):
        def function(layer):
            def call(x, *_):
                q, k, v = layer._heads(x, x, x, layer._table(x, None, None, None))
                out = dilated_attention(q, k, v, PATTERN, parallel=parallel)
                return (layer.out_proj(out.flatten(2)),)

            return call

        return [function(layer) for layer in layers]

    for change in (one_more, only_before, a_copy, compiled, one_that_fails, functions):
        attempt(change)


def test_modules_that_one_rank_makes_alone():
    """Catches an error about modules that are the same, or a call that waits for another."""
    run(2, rank_makes_other_modules, seconds=120)


def rank_forgets_parallel(rank, world_size):
    groups = [dist.new_group([member]) for member in range(world_size)]
    alone = ContextParallel(groups[rank])

    def attend(length, **options):
        x = torch.zeros(1, length, 4, 8)
        dilated_attention(x, x, x, PATTERN, **options)

    def times_said(call):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                call()
        for warning in caught:
            said = f"has 6 positions, as many as rank {rank}'s shard of the 12 positions that were cut last"
            assert said in str(warning.message)
            assert (
                "If they are a shard, pass parallel= to the call, or to the module that makes it"
                in str(warning.message)
            )
        return len(caught)

    cache = MultiheadDilatedAttention(32, 4, PATTERN).make_cache(1)
    module = MultiheadDilatedAttention(32, 4, PATTERN)
    x = torch.zeros(1, 6, 32)
    padding = torch.tensor([[False] * 5 + [True]])
    slide = LongNetViT(4, 16, 1, 4, slide_ngrids=8, segment_lengths=(8,), dilation_rates=(1,))
    calls = {
        "a function": (lambda: attend(6), 1),
        "a module": (lambda: module(x, x, x), 1),
        "a module with padding": (lambda: module(x, x, x, key_padding_mask=padding), 1),
        "a slide encoder": (lambda: slide(torch.zeros(1, 6, 4), torch.zeros(1, 6, 2)), 1),
        "the whole": (lambda: attend(12), 0),
        "another length": (lambda: attend(5), 0),
        "one process": (lambda: attend(6, parallel=alone), 0),
        "a cache": (lambda: attend(6, cache=cache), 0),
        "packed documents": (lambda: attend(6, cu_seqlens=torch.tensor([0, 2, 6]).int()), 0),
    }
    for name, (call, times) in calls.items():
        parallel = ContextParallel(timeout=PATIENCE)
        parallel.shard(torch.zeros(1, 12))
        other = ContextParallel(timeout=PATIENCE)
        other.shard(torch.zeros(1, 20))
        other.close()
        assert times_said(call) == times, name
        parallel.close()
        assert times_said(call) == 0, name
    parallel = ContextParallel(lengths=(6, 0), timeout=PATIENCE)
    parallel.shard(torch.zeros(1, 6))
    assert times_said(lambda: attend(6)) == 0  # the whole, on the rank that owns all of it
    parallel.close()
    parallel = ContextParallel(timeout=PATIENCE)
    parallel.shard(torch.zeros(1, 12))
    with pytest.warns(UserWarning, match="a call without parallel=") as warned:
        dilated_attention(*[torch.zeros(1, 6, 4, 8)] * 3, PATTERN)
    assert warned[0].filename == __file__  # it names the line of the call
    parallel.close()


def test_a_call_that_forgets_parallel():
    """Catches a shard that is taken for a whole sequence in silence; and warnings where nothing is amiss."""
    run(2, rank_forgets_parallel)
