"""Which module calls, and calls that forget `parallel`.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from definition import PATIENCE, PATTERN
from distributed import run
from helpers import message_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from ring_dilated_attention import ContextParallel, dilated_attention
from ring_dilated_attention.integrations.torch import ShardSequence, replace_attention
from ring_dilated_attention.layers import MultiheadDilatedAttention
from ring_dilated_attention.models import (
    LongNetConfig,
    LongNetEncoder,
    LongNetLM,
    LongNetViT,
    TorchscaleConfig,
)

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
    tokens = parallel.shard(torch.randint(40, (1, 41)))
    layers = make_layers(parallel)
    for dropped in (None, 0, 2):  # the same on all ranks
        go_through(layers, x, dropped).sum().backward()
    found = message_of(lambda: go_through(layers, x, dropped=rank))
    assert f"{APART} 2, rank 1 has 1. All ranks" in found
    assert "If layers are dropped at random, drop the same ones on all ranks." in found
    go_through(layers, x)
    [layer] = make_layers(parallel, 1)
    styled, style = nn.ModuleList(make_layers(None)), ShardSequence()
    parallelize_module(styled, init_device_mesh("cpu", (world_size,)), style)
    [other] = style.contexts.values()
    y = other.shard(torch.randn(1, 41, 32))
    for modules, given in (([copy.deepcopy(layer) for _ in range(3)], x), (styled, y)):
        go_through(modules, given)
        drops = partial(go_through, modules, given, dropped=rank)
        assert APART in message_of(drops)
    model = LongNetLM(CONFIG, parallel=parallel)
    layer = nn.TransformerEncoderLayer(32, 4, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3)
    replace_attention(encoder, PATTERN, parallel=parallel)
    for call, blocks in (
        (partial(model.loss, tokens), model.blocks),
        (partial(encoder, x), encoder.layers),
        *(torchscale_layers(parallel, x, padding) for padding in ("exact", "torchscale")),
    ):
        call()
        del blocks[rank]
        assert APART in message_of(call)


def torchscale_layers(parallel, x, padding):
    """The call of an encoder, and its layers. Copies of it are told apart."""
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "ffn_dim": 32, "num_heads": 4, "num_layers": 3}
    encoder = LongNetEncoder(
        TorchscaleConfig((4, 16), (1, 2), **sizes, padding=padding), parallel=parallel
    )
    encoder(x).sum().backward()
    pair = encoder, copy.deepcopy(encoder)
    assert APART in message_of(lambda: pair[parallel.rank](x))
    return partial(encoder, x), encoder.layers


def test_layers_that_are_dropped_apart():
    """Catches queries of one layer that meet keys of another, with as many calls of one shape on all ranks."""
    run(2, rank_drops_other_layers)


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


def rank_makes_other_modules(rank, world_size):
    """No false alarm, whatever one rank makes for itself."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "The .grad attribute")  # which torch.compile looks at
    whole = torch.randn(1, 41, 32)
    expected = go_through(make_layers(None), whole)

    def one_more(layers, parallel):
        make_layers(parallel, 1)
        return make_layers(parallel)

    def new_ones(layers, parallel):
        return make_layers(parallel)

    def a_copy(layers, parallel):
        return copy.deepcopy(layers)

    def compiled(layers, parallel):
        return [torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in layers]

    def one_that_fails(layers, parallel):
        message_of(lambda: MultiheadDilatedAttention(32, 5, PATTERN, parallel=parallel))
        return layers

    def functions(layers, parallel):
        def call(layer, x, *_):
            heads = layer._heads(x, x, x, layer._table(x, None, None, None))
            out = dilated_attention(*heads, PATTERN, parallel=parallel)
            return (layer.out_proj(out.flatten(2)),)

        return [partial(call, layer) for layer in layers]

    both = [(x, x) for x in (one_more, a_copy, compiled, one_that_fails, functions)]
    for before, after in [*both, (new_ones, None)]:
        parallel = ContextParallel(timeout=PATIENCE)
        x, right = parallel.shard(whole), parallel.shard(expected)
        several = []
        for change in (before, after):
            layers = make_layers(parallel)
            if rank == 0 and change is not None:
                layers = change(layers, parallel)
            several.append(layers)
            for made in several[::-1]:
                found = go_through(made, x)
                torch.testing.assert_close(found, right)
                found.sum().backward()
        parallel.close()


def test_modules_that_one_rank_makes_alone():
    """Catches an error about modules that are the same, or a call that waits for another."""
    run(2, rank_makes_other_modules, seconds=120)


def rank_forgets_parallel(rank, world_size):
    groups = [dist.new_group([member]) for member in range(world_size)]
    alone = ContextParallel(groups[rank])
    shard = (
        f"has 6 positions, as many as rank {rank}'s shard of the 12 positions that were cut last"
    )
    remedy = "If they are a shard, pass parallel= to the call, or to the module that makes it"

    def attend(length, **options):
        x = torch.zeros(1, length, 4, 8)
        dilated_attention(x, x, x, PATTERN, **options)

    def cut(length, **options):
        parallel = ContextParallel(timeout=PATIENCE, **options)
        parallel.shard(torch.zeros(1, length))
        return parallel

    def times_said(call):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                call()
        for warning in caught:
            assert shard in str(warning.message)
            assert remedy in str(warning.message)
        return len(caught)

    module = MultiheadDilatedAttention(32, 4, PATTERN)
    x, padding = torch.zeros(1, 6, 32), torch.tensor([[False] * 5 + [True]])
    slide = LongNetViT(4, 16, 1, 4, slide_ngrids=8, segment_lengths=(8,), dilation_rates=(1,))
    calls = {
        "a function": (lambda: attend(6), 1),
        "a module": (lambda: module(x, x, x), 1),
        "a module with padding": (lambda: module(x, x, x, key_padding_mask=padding), 1),
        "a slide encoder": (lambda: slide(torch.zeros(1, 6, 4), torch.zeros(1, 6, 2)), 1),
        "the whole": (lambda: attend(12), 0),
        "another length": (lambda: attend(5), 0),
        "one process": (lambda: attend(6, parallel=alone), 0),
        "a cache": (lambda: attend(6, cache=module.make_cache(1)), 0),
        "packed documents": (lambda: attend(6, cu_seqlens=torch.tensor([0, 2, 6]).int()), 0),
    }
    for name, (call, times) in calls.items():
        parallel = cut(12)
        cut(20).close()
        assert times_said(call) == times, name
        parallel.close()
        assert times_said(call) == 0, name
    parallel = cut(6, lengths=(6, 0))
    assert times_said(lambda: attend(6)) == 0  # the whole, on the rank that owns all of it
    parallel.close()
    parallel = cut(12)
    with pytest.warns(UserWarning, match="a call without parallel=") as warned:
        dilated_attention(*[torch.zeros(1, 6, 4, 8)] * 3, PATTERN)
    assert warned[0].filename == __file__  # it names the line of the call
    parallel.close()


def test_a_call_that_forgets_parallel():
    """Catches a shard that is taken for a whole sequence in silence; and warnings where nothing is amiss."""
    run(2, rank_forgets_parallel)
