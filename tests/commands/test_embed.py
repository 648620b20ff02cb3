"""`rda embed`: every kind of file, bad slides beside others, and going on with a folder."""

import json
import sys
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
import torch
from pages import block
from torchscale_cases import TINY, fill, waves
from transcripts import PREPARED, play

from ring_dilated_attention.commands import cli
from ring_dilated_attention.models import LongNetViT, load_slide_encoder, segment_lengths_for
from ring_dilated_attention.models.longnet_vit import DILATION_RATES, PUBLISHED

LENGTHS = {"a.h5": 40, "b.npz": 7, "c.pt": 93}  # of the slides, one of each kind
A, B, C = (f"slides/{name}" for name in LENGTHS)


def tiles(length, seed=0):
    coords = (waves(length, 2, seed=seed + 1) + 1) * 5000
    return waves(length, 5, seed=seed).float(), coords.long()


def tiles_of(path):
    name = Path(path).name
    return tiles(LENGTHS[name], list(LENGTHS).index(name))


def write(path, features, coords, names=("features", "coords"), attributes=None):
    given = dict(zip(names, (features, coords), strict=True))
    arrays = {name: x for name, x in given.items() if x is not None}
    more = attributes or {}
    path = Path(path)
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            for name, x in arrays.items():
                file[name] = x.numpy()
                file[name].attrs.update(more)
    elif path.suffix == ".npz":
        np.savez(path, **{name: x.numpy() for name, x in arrays.items()}, **more)
    else:
        torch.save(arrays | more, path)
    return path


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """With weights and slides."""
    monkeypatch.chdir(tmp_path)
    branches = {"segment_lengths": segment_lengths_for(), "dilation_rates": DILATION_RATES}
    torch.save({"model": fill(LongNetViT(*TINY, 16, **branches)).state_dict()}, "encoder.pth")
    Path("slides").mkdir()
    for path in (A, B, C):
        write(path, *tiles_of(path))


@mock.patch.dict(PUBLISHED, tiny=TINY)
def embed(words):
    """The size of the weights counts as published."""
    return cli.main(["embed", "--weights", "encoder.pth", "--out", "out", *words.split()])


def embeddings():
    return {path.stem: torch.from_numpy(np.load(path)) for path in Path("out").glob("*.npy")}


def settings():
    return json.loads(Path("out/settings.json").read_text())


@mock.patch.dict(PUBLISHED, tiny=TINY)
def expected(tiles, layer="last", tile_size=256, **options):
    model = load_slide_encoder("encoder.pth", **({"global_pool": True} | options))
    model.tile_size = tile_size  # it serves coordinates alone: segments stay as they are
    features, coords = tiles
    with torch.no_grad():
        states = torch.stack(model(features[None], coords[None], layer != "encoder"))[:, 0]
    if layer == "all":
        return states
    return states[int(layer) if layer.isdecimal() else -1]


def assert_embedded(**options):
    found = embeddings()
    assert found.keys() == {"a", "b", "c"}
    for path in (A, B, C):
        states = expected(tiles_of(path), **options)
        torch.testing.assert_close(found[Path(path).stem], states, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("", {}),
        ("--embedding class --layer encoder", {"global_pool": False, "layer": "encoder"}),
        ("--layer all", {"layer": "all"}),
        ("--layer 1", {"layer": "1"}),
        ("--max-wsi-size 1024 --tile-size 300", {"max_wsi_size": 1024, "tile_size": 300}),
    ],
)
def test_embeddings_are_the_models(words, options):
    assert embed(f"slides {words}") == 0
    assert_embedded(**options)
    assert settings()["embedding"] == ("class" if "class" in words else "pooled")
    assert settings()["layer"] == options.get("layer", "last")


def write_bad_slides():
    """Files that cannot be embedded. (tests/models has what the model refuses.)"""
    features, coords = tiles(9)
    write("slides/no_coords.h5", features, None)
    write("slides/outside.h5", features, coords + 256_000)
    write("slides/sparse.pt", features.to_sparse(), coords)
    write("slides/large.pt", features * 1e38, coords)
    torch.save({1: features, 2: coords}, "slides/numbered.pt")
    torch.save(features, "slides/bare.pt")
    np.savez("slides/text.npz", features=features.numpy(), coords=coords.numpy().astype(str))
    group = write("slides/group.h5", features, coords)  # HDF5 opens it, and fails later
    group.write_bytes(group.read_bytes().replace(b"TREE", bytes(4)))
    Path("slides/gone.h5").symlink_to("nowhere.h5")
    for name in ("damaged_1.h5", "damaged_2.npz", "damaged_3.pt"):
        Path("slides", name).write_bytes(b"not a slide")


# by torch.load, since torch 2.14
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
@mock.patch.dict(PUBLISHED, tiny=TINY)
def test_bad_slides_do_not_stop_the_others(capsys):
    """Each is named with its reason, exit code 1, and the others are as if alone."""
    write_bad_slides()
    play(PREPARED / "embed_bad_slides.txt", capsys)
    assert_embedded()


def test_a_slide_that_does_not_fit_the_memory(capsys, monkeypatch):
    """It is named, and the others are embedded."""
    forward = LongNetViT.forward

    def limited(self, x, *args, **options):
        if x.shape[1] > 50:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return forward(self, x, *args, **options)

    monkeypatch.setattr(LongNetViT, "forward", limited)
    assert embed(f"{C} {A} {B}") == 1
    reason = "CUDA out of memory. Tried to allocate 9 GiB"
    assert capsys.readouterr().err == f"rda embed: {C}: {reason}\n"
    assert embeddings().keys() == {"a", "b"}


@pytest.mark.parametrize("suffix", [".h5", ".npz", ".pt"])
def test_a_file_that_states_another_tile_size(suffix, capsys):
    """It is refused unless the user says which it is to be; and then it is that one, whatever the file states."""
    names, stated = ("tile_embeds", "coordinates"), {"patch_size_level0": 512}
    path = write(f"stated{suffix}", *tiles(9), names, stated)
    assert embed(str(path)) == 1
    reason = "states patch_size_level0=512, the step from tile to tile"
    remedy = "pass --tile-size 512, or --tile-size 256 to take 256 as GigaPath does"
    assert capsys.readouterr().err == f"rda embed: {path}: {reason}: {remedy}\n"
    assert not Path("out").exists()  # nothing was embedded
    found = []
    for size in (256, 512):
        assert embed(f"{path} --tile-size {size} --out {size}") == 0
        found.append(torch.from_numpy(np.load(f"{size}/stated.npy")))
        torch.testing.assert_close(found[-1], expected(tiles(9), tile_size=size))
    assert not torch.equal(*found)


@mock.patch.dict(PUBLISHED, tiny=TINY)
def test_a_session(capsys):
    features, coords = tiles_of(C)
    write("in_cells.npz", features, coords // 256)
    play(PREPARED / "embed.txt", capsys)


def test_what_it_needs(monkeypatch, capsys):
    """HDF5 alone needs h5py."""
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert embed(A) == 2
    remedy = "pip install 'ring-dilated-attention[slides]'"
    assert capsys.readouterr().err == f"rda embed: needs h5py: {remedy}\n"
    assert embed(C) == 0


# The folder.


def test_goes_on_where_it_ended(capsys, monkeypatch):
    """Each embedding is saved before the next slide begins, so that a run that is killed loses nothing."""
    assert embed(A) == 0
    first = Path("out/a.npy").read_bytes()
    forward, there = LongNetViT.forward, []

    def interrupted(*args, **options):
        there.append(embeddings().keys())
        if len(there) == 2:
            raise KeyboardInterrupt
        return forward(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LongNetViT, "forward", interrupted)
        assert embed("slides") == 130
    assert there == [{"a"}, {"a", "b"}]
    capsys.readouterr()
    assert embed("slides") == 0
    assert capsys.readouterr().out == "slides embedded: 1; there already: 2; model: 2 layers x 32\n"
    assert Path("out/a.npy").read_bytes() == first


def test_the_page_reads_the_folder(capsys):
    assert embed("slides --out embeddings") == 0
    capsys.readouterr()
    exec(block("docs/gigapath.md", "reading the folder"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["pooled", "a: (32,)", "b: (32,)", "c: (32,)"]
