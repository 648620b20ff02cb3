"""Which module calls, and calls that forget `parallel`.

Every function whose name starts with `rank` runs on every rank, and every rank asserts.
"""

import copy
import warnings
from functools import partial

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
    LongNetEncoder,
    LongNetViT,
    TorchscaleConfig,
)

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
    x, heads = parallel.shard(torch.randn(1, 41, 32)), parallel.shard(torch.randn(1, 41, 4, 8))
    layers = make_layers(parallel)
    for dropped in (None, 0, 2):  # the same on all ranks
        go_through(layers, x, dropped).sum().backward()
    found = message_of(lambda: go_through(layers, x, dropped=rank))
    assert f"{APART} 2, rank 1 has 1. All ranks" in found
    assert "If layers are dropped at random, drop the same ones on all ranks." in found
    # a refused call leaves nothing behind: the next call, of no module, is not taken for the module's
    layers[0].backend = "none" if rank == 0 else "auto"
    assert "backend" in message_of(lambda: layers[0](x, x, x))
    layers[0].backend = "auto"
    dilated_attention(heads, heads, heads, PATTERN, parallel=parallel)
    [layer] = make_layers(parallel, 1)
    styled, style = nn.ModuleList(make_layers(None)), ShardSequence()
    parallelize_module(styled, init_device_mesh("cpu", (world_size,)), style)
    [other] = style.contexts.values()
    y = other.shard(torch.randn(1, 41, 32))
    copies = [copy.deepcopy(layer) for _ in range(3)]
    for modules, given in ((layers, x), (copies, x), (styled, y)):
        go_through(modules, given)
        drops = partial(go_through, modules, given, dropped=rank)
        assert APART in message_of(drops)
    layer = nn.TransformerEncoderLayer(32, 4, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3)
    replace_attention(encoder, PATTERN, parallel=parallel)
    sizes = {"embed_dim": 32, "ffn_dim": 32, "num_heads": 4, "num_layers": 3}
    torchscale = LongNetEncoder(TorchscaleConfig((4, 16), (1, 2), **sizes), parallel=parallel)
    torchscale(x).sum().backward()
    pair = torchscale, copy.deepcopy(torchscale)  # copies are told apart
    assert APART in message_of(lambda: pair[rank](x))
    for module in (encoder, torchscale):
        module(x)
        del module.layers[rank]
        assert APART in message_of(partial(module, x))


def test_layers_that_are_dropped_apart():
    """Catches queries of one layer that meet keys of another, with as many calls of one shape on all ranks; and the
    number of a refused call's module in a later call, after which ranks compare no more."""
    run(2, rank_drops_other_layers)


def rank_makes_other_modules(rank, world_size):
    """No false alarm, whatever one rank makes for itself."""
    warnings.simplefilter("error")
    whole = torch.randn(1, 41, 32)
    expected = go_through(make_layers(None), whole)

    def one_more(layers, parallel):
        make_layers(parallel, 1)
        return make_layers(parallel)

    def new_ones(layers, parallel):
        return make_layers(parallel)

    def a_copy(layers, parallel):
        return copy.deepcopy(layers)

    def one_that_fails(layers, parallel):
        message_of(lambda: MultiheadDilatedAttention(32, 5, PATTERN, parallel=parallel))
        return layers

    def without_numbers(layers, parallel):
        """As functions call, and compiled code."""
        for layer in layers:
            layer._number = None
        return layers

    both = [(x, x) for x in (one_more, a_copy, one_that_fails, without_numbers)]
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
    run(2, rank_makes_other_modules)


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

    def check_said(call, times):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                call()
        assert len(caught) == times
        for warning in caught:
            assert shard in str(warning.message)
            assert remedy in str(warning.message)
        return caught

    module = MultiheadDilatedAttention(32, 4, PATTERN)
    x, padding = torch.zeros(1, 6, 32), torch.tensor([[False] * 5 + [True]])
    slide = LongNetViT(4, 16, 1, 4, slide_ngrids=8, segment_lengths=(8,), dilation_rates=(1,))
    calls = [
        (lambda: attend(6), 1),
        (lambda: module(x, x, x, key_padding_mask=padding), 1),
        (lambda: slide(torch.zeros(1, 6, 4), torch.zeros(1, 6, 2)), 1),
        (lambda: attend(12), 0),  # the whole
        (lambda: attend(5), 0),
        (lambda: attend(6, parallel=alone), 0),
        (lambda: attend(6, cache=module.make_cache(1)), 0),
        (lambda: attend(6, cu_seqlens=torch.tensor([0, 2, 6]).int()), 0),
    ]
    lines = []
    for call, times in calls:
        parallel = cut(12)
        cut(20).close()
        lines += [warning.filename for warning in check_said(call, times)]
        parallel.close()
        check_said(call, 0)
    assert lines[0] == __file__  # it names the line of the call
    parallel = cut(6, lengths=(6, 0))
    check_said(lambda: attend(6), 0)  # the whole, on the rank that owns all of it
    parallel.close()


def test_a_call_that_forgets_parallel():
    """Catches a shard that is taken for a whole sequence in silence; and warnings where nothing is amiss."""
    run(2, rank_forgets_parallel)
