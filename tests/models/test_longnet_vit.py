"""GigaPath's slide encoder against what the original computed, in batches, on ranks, and with bad input."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from distributed import run
from helpers import relative_error
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchscale_cases import SLIDES, Slide, kept, waves

from benchmarks.measure import allocated
from ring_dilated_attention import ContextParallel
from ring_dilated_attention.models import LongNetViT, segment_lengths_for
from ring_dilated_attention.models.longnet_vit import cells_of
from ring_dilated_attention.pattern import WHOLE_DOCUMENT

POOLED, MISALIGNED = SLIDES["aligned, pooled"], SLIDES["misaligned, pooled"]


EXACT = {"rtol": 1e-11, "atol": 1e-12}


@pytest.mark.parametrize("name", SLIDES)
def test_equals_what_gigapath_computed(name):
    """The last state with the encoder's LayerNorm, and all states without it; also by a float32 model."""
    case = SLIDES[name]
    model, (x, coords) = case.model(), case.inputs()
    single = copy.deepcopy(model).float()
    for all_layer_embed, key in ((False, f"slide: {name}"), (True, f"slide, all layers: {name}")):
        with torch.no_grad():
            found = model(x, coords, all_layer_embed)
            in_float32 = single(x.float(), coords.long(), all_layer_embed)
        assert [x.shape for x in found] == [(2, 32)] * (3 if all_layer_embed else 1)
        torch.testing.assert_close(torch.stack(found), kept()[key], **EXACT)
        assert relative_error(torch.stack(in_float32), kept()[key]) < 1e-6


@pytest.mark.parametrize(
    ("name", "num_parameters", "first"),
    [("gigapath", 86_330_880, 1536), ("gigapath-flash", 21_489_408, 384)],
)
def test_published_sizes(name, num_parameters, first):
    with torch.device("meta"):
        model = LongNetViT.published(name)
    weights = model.state_dict()
    assert len(weights) == 247
    assert sum(x.numel() for x in weights.values()) == num_parameters
    assert weights["patch_embed.proj.weight"].shape[1] == first
    assert "encoder.layers.11.self_attn.inner_attn_ln.bias" in weights
    assert model.encoder.pattern.branches[3][:2] == (185_363, 8)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((262_144,), (1024, 5792, 32768, 185363, 1048576)),
        ((250_000,), (1024, 4870, 23170, 110217, 524288)),
        ((16_384,), (1024, 1448, 2048, 2896, 4096)),
        ((2048, 512), (1024, 362, 128, 45, 16)),
    ],
)
def test_segment_lengths(sizes, expected):
    assert segment_lengths_for(*sizes) == expected


def test_slides_beyond_every_segment():
    assert segment_lengths_for(2**31 * 256)[-1] == WHOLE_DOCUMENT
    assert segment_lengths_for(np.int32(262_144), np.int16(256)) == segment_lengths_for()
    for sizes in ((2**31 * 256 + 1,), (1e300,), (10**200,), (262_144, 5e-324)):
        with pytest.raises(ValueError, match=r"is more than 2\*\*31 tiles of"):
            segment_lengths_for(*sizes)


def test_a_table_of_positions_is_never_made():
    """Grid cells count, not pixels; x is not y; and memory does not grow with the grid (3 GB in the original)."""
    model = Slide(2048, 5, True).model()
    x, coords = waves(1, 5, 5), torch.tensor([[[0, 0], [256, 0], [0, 256], [511, 0], [4000, 5119]]])
    cells = model._positions(cells_of(coords, model.tile_size))[0]
    assert torch.equal(cells[1], cells[3])
    assert torch.equal(cells[1][16:], cells[2][:16])
    assert not torch.equal(cells[1], cells[2])
    with torch.device("meta"):
        assert all(x.numel() < 1e6 for x in LongNetViT.published("gigapath-flash").buffers())
    model.tile_size = 512
    assert not torch.allclose(model(x, coords)[0], Slide(2048, 5, True).model()(x, coords)[0])


GRID = torch.cartesian_prod(torch.arange(20), torch.arange(20)).double()  # of 400 tiles


@pytest.mark.parametrize(
    ("coords", "num_cells"),
    [
        (GRID * 50, 16),  # units from 0 to 1000
        (GRID / 20, 1),  # from 0 to 1
        (GRID, 1),  # numbers of tiles
        (GRID * 112 + 7.5, 81),  # micrometres
        (GRID * 256 + 100, None),
        (GRID * 200, None),  # tiles that overlap
        (GRID[:15], None),  # few tiles
    ],
)
def test_tiles_that_share_cells_are_warned_of(coords, num_cells):
    """Catches coordinates in other units, which give most tiles the position of another."""
    model, x = Slide(2048, 5, True).model(), waves(1, len(coords), 5)
    if num_cells is None:
        model(x, coords[None])  # a warning would be an error
        return
    said = f"400 tiles lie in {num_cells} cells? of tile_size=256, .* Set model.tile_size"
    with pytest.warns(UserWarning, match=f"^{said}"):
        model(x, coords[None])
    with pytest.warns(UserWarning, match=f"^slide 1: {said}"):
        model(x.expand(2, -1, -1), torch.stack([GRID * 256, coords]))


def test_gradients_are_those_of_the_forward():
    """Along one direction in all weights and features at once: the difference quotient, which torchscale's own gradient
    misses."""
    model, (x, coords) = MISALIGNED.model(activation_checkpointing=True), MISALIGNED.inputs()
    x.requires_grad_()
    leaves = [x, *model.parameters()]
    directions = [waves(*leaf.shape, seed=seed) for seed, leaf in enumerate(leaves)]
    gradients = torch.autograd.grad(model(x, coords)[0].sin().sum(), leaves)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True)).item()

    def at(step):
        with torch.no_grad():
            for leaf, direction in zip(leaves, directions, strict=True):
                leaf += step * direction
            return model(x, coords)[0].sin().sum().item()

    step = 1e-5
    ahead = at(step)
    assert (ahead - at(-2 * step)) / (2 * step) == pytest.approx(slope, rel=1e-6)


@torch.no_grad()
def test_exported():
    """As docs/deploy.md says: for one number of tiles, and without a branch on their values."""
    model, (x, coords) = POOLED.model(), POOLED.inputs()
    exported, others = torch.export.export(model, (x, coords)).module(), (x.flip(1), coords)
    torch.testing.assert_close(exported(*others), model(*others))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Trains in 16 bits: an embedding of float32 near the exact one, gradients everywhere."""
    model = POOLED.model().float()
    x, coords = POOLED.inputs()
    with torch.autocast("cpu", dtype):
        found = model(x.to(dtype), coords)[0]
    expected = kept()["slide: aligned, pooled"][0]
    assert found.dtype == torch.float32
    assert relative_error(found, expected) < 20 * torch.finfo(dtype).eps
    found.sin().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    half = copy.deepcopy(model).to(dtype)
    # features of any dtype are taken in that of the weights
    assert half(x, coords)[0].dtype == dtype


def rank_embeds(rank, world_size, name, lengths):
    case, cp = SLIDES[name], ContextParallel()
    inputs = case.inputs()
    alone = case.model()
    expected = alone(*inputs, True)
    torch.stack(expected).sin().mean().backward()
    start = sum(lengths[:rank])
    x, coords = (whole[:, start : start + lengths[rank]] for whole in inputs)
    model = case.model(parallel=cp, activation_checkpointing=world_size == 3)
    # No layer's output has passed the encoder's last LayerNorm.
    replicated = DistributedDataParallel(model, find_unused_parameters=True)
    found = replicated(x, coords, True)
    torch.stack(found).sin().mean().backward()
    torch.testing.assert_close(found, expected, **EXACT)
    for key, parameter in alone.named_parameters():
        if parameter.grad is None:
            assert key.startswith("encoder.layer_norm.")
        else:
            gradient = model.get_parameter(key).grad
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(model(x, coords), alone(*inputs), **EXACT)
    bad = coords.clone()
    if rank == world_size - 1:
        bad[1, -1, 0] = 20 * 256
    with pytest.raises(ValueError, match=rf"tile {case.num_tiles - 1} of slide 1 at \(5120.0, "):
        model(x, bad)
    with pytest.raises(ValueError, match="no tiles"):
        model(x[:, :0], coords[:, :0])
    if lengths == (47, 46):
        is_warned(rank, case, ContextParallel())
    with pytest.raises(ValueError, match="parallel has sharding='zigzag'"):
        case.model(parallel=ContextParallel(sharding="zigzag"))


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("aligned, pooled", (47, 46)),
        ("aligned, class token", (30, 0, 63)),
        ("misaligned, pooled", (20, 40)),
    ],
)
def test_on_ranks(name, lengths):
    """Embeddings are those of one rank, and so is the mean of the ranks' gradients; also where a rank owns nothing."""
    run(len(lengths), rank_embeds, name, lengths)


def rank_shards_layers(rank, world_size):
    """Every layer and the whole by themselves, at pixels that 16 bits do not have, rows out of place included."""
    x, coords = (
        waves(1, 60, 5).float(),
        (torch.arange(60)[:, None] * torch.tensor([79, 83]) % 5120)[None],
    )
    expected = MISALIGNED.model().float()(x, coords)[0]
    model, seen, policy = (
        MISALIGNED.model().float(),
        [],
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    for layer in model.encoder.layers:
        fully_shard(layer, mp_policy=policy)
        layer.self_attn.register_forward_pre_hook(lambda _, x: seen.append(x))
    fully_shard(model, mp_policy=policy)
    found = model(x, coords)[0]
    assert relative_error(found, expected) < 0.02
    for x_BNE, attend in seen:
        assert x_BNE.dtype == torch.bfloat16
        logs = [call.log_num_zero_keys_NH for call in attend.keywords["counted"]]
        assert {x.dtype for x in logs if x is not None} == {torch.float32}
    assert len(seen) == 2
    with pytest.raises(
        ValueError,
        match=r"dtype torch.bfloat16, .* unless its policy has cast_forward_inputs=False",
    ):
        model(x, coords.float())


def test_fsdp_leaves_patterns_counts_and_coordinates_as_they_are():
    """It casts and copies what it finds in dataclasses and tuples that a module is passed, tile by tile."""
    run(1, rank_shards_layers)


def is_warned(rank, case, cp):
    """93 tiles are 47 and 46, and 48 and 46 rows: of that nobody is warned, but of 60 and 33."""
    model, inputs = case.model(parallel=cp), case.inputs()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(*map(cp.shard, inputs))
        own = slice(60 * rank, 60 + 33 * rank)
        with pytest.raises(
            UserWarning, match=r"ranks have \(60, 33\) positions; a near-equal cut .* of 93 gives"
        ):
            model(*(x[:, own] for x in inputs))


def peak(parallel=None, num_tiles=1000):
    """Bytes that a step of fine-tuning holds at once, this rank's tiles included."""
    own = slice(None) if parallel is None else parallel.positions(num_tiles)
    cells = torch.cartesian_prod(torch.arange(1000), torch.arange(1000))[None, :num_tiles]
    x, coords = torch.randn(1, num_tiles, 32)[:, own], cells[:, own] * 256
    sizes = {"segment_lengths": (512, 2048, 8192), "dilation_rates": (1, 4, 16)}
    options = {"activation_checkpointing": True, "global_pool": True, "parallel": parallel}
    model = LongNetViT(32, 64, 3, 16, **sizes, **options)
    model(x[:, :8], coords[:, :8])[0].sum().backward()
    return x.nbytes + allocated(lambda: model(x, coords)[0].sum().backward()).peak_bytes


def rank_peak(rank, world_size):
    return peak(ContextParallel(exchange="ring"))


def test_two_ranks_hold_half_of_what_one_holds():
    """A step of fine-tuning, checkpointing included; the benchmark `slides` has 100,000 tiles."""
    one = peak()
    assert max(run(2, rank_peak)) <= 1.1 / 2 * one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, c: (x[0], c), r"shape \(9, 5\) .*, not floating .* adds a batch dim"),
        (lambda x, c: (x[..., :4], c), r"not floating \(batch, tiles, in_chans=5\)"),
        (lambda x, c: (x[:0], c[:0]), r"no slides: features have shape \(0, 9, 5\)"),
        (lambda x, c: (x, c[..., :1]), r"\(2, 9, 1\), these features need \(2, 9, 2\)"),
        (lambda x, c: (x[:, :0], c[:, :0]), r"no tiles: features have shape \(2, 0, 5\)"),
        (
            lambda x, c: (x.index_fill(1, torch.tensor([3, 5]), torch.nan), c),
            r"not finite: tile 3 of slide 0 \(and 3 more\)",
        ),
        (
            lambda x, c: (x, c.index_fill(1, torch.tensor(4), -1.0)),
            r"tile 4 of slide 0 \(and 1 more\) at \(-1.0, -1.0\) lies in cell \(-1.0, ",
        ),
        (lambda x, c: (x, c + 20 * 256), r"20 x 20 cells of tile_size=256: tile 0 .* 17 more\)"),
        (lambda x, c: (x, c * torch.nan), r"at \(nan, nan\) lies in cell"),
        (lambda x, c: (x, c > 9), "coords have dtype torch.bool, which cannot hold every pixel"),
        (lambda x, c: (x, c + 0j), "coords have dtype torch.complex128"),
        (lambda x, c: (x.to_sparse(), c), "features have torch.sparse_coo on cpu: pass a dense"),
        (lambda x, c: (x, c.to("meta")), "coords have torch.strided on meta: pass a dense tensor"),
        (lambda x, c: (x, c.bfloat16()), "torch.bfloat16, which cannot hold every pixel: pass int"),
        (lambda x, c: (x.tolist(), c), "features must be a tensor, got list"),
    ],
)
def test_input_that_is_refused(change, message):
    case = Slide(2048, 9, True)
    with pytest.raises(ValueError, match=message):
        case.model()(*change(*case.inputs()))


def encoder_of(**options):
    sizes = {"in_chans": 5, "embed_dim": 32, "depth": 1, "num_heads": 2}
    return LongNetViT(segment_lengths=(8,), dilation_rates=(1,), **{**sizes, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: encoder_of(embed_dim=18), "embed_dim=18 is not a multiple of 4"),
        (lambda: encoder_of(tile_size=0), "tile_size=0 must be a number, positive and finite"),
        (lambda: encoder_of(tile_size=math.inf), "tile_size=inf must be a number, positive and fi"),
        (lambda: encoder_of(depth=2.0), "depth=2.0 must be a whole number, at least 1"),
        (lambda: encoder_of(padding="none"), "padding='none' is unknown"),
        (lambda: LongNetViT.published("giga"), "no published size 'giga'; choose one of"),
        (lambda: LongNetViT.published(["gigapath"]), r"no published size \['gigapath'\]; choose"),
        (lambda: segment_lengths_for(100), "max_wsi_size=100 is less than one tile of 256 pixels"),
        (lambda: segment_lengths_for(tile_size="256"), "tile_size='256' must be a number"),
        (lambda: segment_lengths_for(10**400), "must be a number, positive and finite"),
    ],
)
def test_sizes_that_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
