"""`rda embed`: every kind of file, bad slides beside others, and going on with a folder."""

import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from embed_cases import LENGTHS, embed, make_weights, read, tiles, unwrapped, write
from full_disk import on_a_full_disk
from pages import block
from torchscale_cases import TINY

from ring_dilated_attention.commands import cli
from ring_dilated_attention.models import LongNetViT, load_slide_encoder
from ring_dilated_attention.models.longnet_vit import PUBLISHED


@mock.patch.dict(PUBLISHED, tiny=TINY)
def expected(weights, name, layer, tile_size=256, **options):
    model = load_slide_encoder(weights, **options)
    # set afterwards: it serves coordinates, and segments stay as they are
    model.tile_size = tile_size
    features, coords = tiles(LENGTHS[name], list(LENGTHS).index(name))
    with torch.no_grad():
        return torch.stack(model(features[None], coords[None], layer != "encoder"))[:, 0]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {"global_pool": True}),
        (["--embedding", "class", "--layer", "encoder"], {}),
        (["--layer", "all"], {"global_pool": True}),
        (["--layer", "1"], {"global_pool": True}),
        (
            ["--max-wsi-size", "1024", "--tile-size", "300"],
            {"global_pool": True, "max_wsi_size": 1024, "tile_size": 300},
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_embeddings_are_the_models(arguments, options, weights, slides, tmp_path, capsys):
    out = tmp_path / "out"
    assert embed(weights, out, slides[0].parent, *arguments) == 0
    found, settings = read(out)
    assert found.keys() == LENGTHS.keys()
    layer = arguments[arguments.index("--layer") + 1] if "--layer" in arguments else "last"
    for name in LENGTHS:
        states = expected(weights, name, layer, **options)
        if layer != "all":
            states = states[int(layer) if layer.isdecimal() else -1]
        torch.testing.assert_close(found[name], states, rtol=1e-5, atol=1e-6)
    assert settings["embedding"] == ("class" if "class" in arguments else "pooled")
    assert (settings["layer"], settings["model"]) == (layer, "2 layers x 32")
    said = "slides embedded: 3; there already: 0; model: 2 layers x 32\n"
    assert capsys.readouterr().out == said


def damaged_in_the_middle(path, signature):
    """HDF5 opens such a file, and fails when it is looked into."""
    write(path, *tiles(9))
    path.write_bytes(path.read_bytes().replace(signature, bytes(len(signature))))
    return path


def bad_slides(folder):
    """Files that cannot be embedded, with what is said of each. (tests/models has what the model refuses.)"""
    features, coords = tiles(9)
    stated = {"patch_size_level0": 512}
    for name, arrays, reason in (
        ("no_coords.h5", (features, None), "holds no coordinates: it has features, and coords"),
        ("no_features.npz", (None, coords), "holds no features: it has coords"),
        ("outside.h5", (features, coords + 256_000), "lies in cell (1"),
        ("flat.npz", (features.flatten(), coords), "features have shape (1, 45)"),
        ("nan.pt", (features * torch.nan, coords), "not finite: tile 0"),
        ("sparse.pt", (features.to_sparse(), coords), "parse"),
        ("large.pt", (features * 1e38, coords), "are finite and its embedding is not"),
        ("larger.pt", (features.double() * 1e300, coords), "tile 0 (and 8 more), taken as"),
    ):
        yield write(folder / name, *arrays), reason
    yield (
        write(folder / "stated.h5", features, coords, attributes=stated),
        "patch_size_level0=512, the step from tile to tile: pass --tile-size 512, or --tile-size 256",
    )
    for name, content, reason in (
        ("numbered.pt", {1: features, 2: coords}, "holds no features: it has 1, 2, and"),
        ("bare.pt", features, "holds a Tensor alone: save "),
        ("pickle.pt", torch.nn.Linear(2, 2), "torch.load(weights_only=True) refuses it, and"),
    ):
        torch.save(content, folder / name)
        yield folder / name, reason
    np.savez(folder / "text.npz", features=features.numpy(), coords=coords.numpy().astype(str))
    yield folder / "text.npz", "cannot be read: can't convert np.ndarray of type numpy.str_"
    yield damaged_in_the_middle(folder / "group.h5", b"TREE"), "cannot be read: "
    changed = write(folder / "bit.pt", features, coords)
    changed.write_bytes(
        changed.read_bytes().replace(features.numpy().tobytes(), (features + 1).numpy().tobytes())
    )
    yield changed, "it is damaged: the checksum of its"
    (folder / "gone.h5").symlink_to(folder / "nowhere.h5")
    yield folder / "gone.h5", "No such file or directory"
    for name in ("damaged.h5", "damaged.npz", "damaged.pt"):
        (folder / name).write_bytes(b"not a slide")
        yield folder / name, ""  # by torch, numpy or HDF5, in their words


# by torch.load, since torch 2.14
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
def test_bad_slides_do_not_stop_the_others(weights, slides, tmp_path, capsys):
    """Each is named with its reason, exit code 1, and the others are as if alone."""
    out, folder = tmp_path / "out", tmp_path / "mixed"
    folder.mkdir()
    bad = dict(bad_slides(folder))
    # names without their endings must differ
    bad = {
        path.rename(path.with_stem(path.name.replace(".", "_"))): why for path, why in bad.items()
    }
    for path in slides:
        path.rename(folder / path.name)
    assert embed(weights, out, folder) == 1
    error = unwrapped(capsys.readouterr().err)
    for path, reason in bad.items():
        [line] = [line for line in error.splitlines() if line.startswith(f"rda embed: {path}: ")]
        assert reason in line
    assert read(out)[0].keys() == LENGTHS.keys()
    for name, embedding in read(out)[0].items():
        torch.testing.assert_close(
            embedding, expected(weights, name, "last", global_pool=True)[-1], rtol=1e-5, atol=1e-6
        )


def device_is_full():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


@pytest.mark.parametrize(
    ("allocate", "message"),
    [
        (device_is_full, "Tried to allocate 9 GiB"),
        (
            lambda: torch.empty(2**50),
            "can't allocate memory: you tried to allocate 4503599627370496 bytes",
        ),
        (lambda: np.empty(2**50), "Unable to allocate 8.00 PiB"),
        (lambda: bytearray(2**60), "MemoryError"),
    ],
    ids=["cuda", "cpu", "numpy", "python"],
)
def test_a_slide_that_does_not_fit_the_memory(
    allocate, message, weights, slides, tmp_path, capsys, monkeypatch
):
    """It is named, and the others are embedded."""
    forward = LongNetViT.forward

    def limited(self, x, *args, **options):
        if x.shape[:2].numel() > 100:
            allocate()
        return forward(self, x, *args, **options)

    monkeypatch.setattr(LongNetViT, "forward", limited)
    large = write(tmp_path / "large.npz", *tiles(101))
    assert embed(weights, tmp_path / "out", large, *slides) == 1
    [line] = [
        line
        for line in unwrapped(capsys.readouterr().err).splitlines()
        if line.startswith(f"rda embed: {large}: ")
    ]
    assert message in line
    assert read(tmp_path / "out")[0].keys() == LENGTHS.keys()


@pytest.mark.parametrize("suffix", [".h5", ".npz", ".pt"])
def test_a_file_that_states_another_tile_size(suffix, weights, tmp_path, capsys):
    """It is refused unless the user says which it is to be; and then it is that one, whatever the file states."""
    stated = write(tmp_path / f"stated{suffix}", *tiles(9), attributes={"patch_size_level0": 512})
    plain = write(tmp_path / "plain.npz", *tiles(9), names=("tile_embeds", "coordinates"))
    assert embed(weights, tmp_path / "none", stated) == 1
    assert (
        "states patch_size_level0=512, the step from tile to tile: pass --tile-size 512"
        in capsys.readouterr().err
    )
    for size in (256, 512):
        assert embed(weights, tmp_path / f"a{size}", stated, "--tile-size", size) == 0
        assert embed(weights, tmp_path / f"b{size}", plain, "--tile-size", size) == 0
        assert torch.equal(
            read(tmp_path / f"a{size}")[0]["stated"], read(tmp_path / f"b{size}")[0]["plain"]
        )
        assert read(tmp_path / f"a{size}")[1]["tile_size"] == size
    assert not torch.equal(*(read(tmp_path / f"a{size}")[0]["stated"] for size in (256, 512)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a.h5 --layer 3", "--layer 3: "),
        (
            "a.h5 --layer top",
            "argument --layer: top is not last, encoder, all or a number from 0 on",
        ),
        ("a.h5 --tile-size -1", "--tile-size: must be a positive number of pixels, got -1"),
        ("a.h5 --max-wsi-size 1e15", "max_wsi_size=1e+15 is more than 2**31 tiles of 256 pixels"),
        ("a.h5 --tile-size inf", "--tile-size: 'inf' is not a number"),
        ("missing.h5", "there is no missing.h5"),
        ("slides.txt", "slides.txt holds no slides: files that end in .h5"),
        ("a.h5 other/a.npz", "would both be called 'a'"),
        ("nothing", "nothing holds no slides: files that end in .h5"),
        ("a.h5 --weights other.pth", "other.pth does not hold a published slide encoder's"),
        ("a.h5 --weights none.pth", "none.pth cannot be read as weights: [Errno 2] No such file"),
        (
            "a.h5 --weights short.pth",
            "short.pth: Error(s) in loading state_dict for LongNetViT: Missing key(s)",
        ),
        ("a.h5 --device no", "--device no cannot be used: "),
        ("a.h5 --device meta", "--device meta cannot be used: "),
        ("a.h5 --device cuda:99", "--device cuda:99 cannot be used: "),
    ],
)
def test_refused_before_anything_is_written(
    arguments, message, weights, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for folder in ("other", "nothing"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "a.h5", *tiles(4))
    write(tmp_path / "other" / "a.npz", *tiles(4))
    (tmp_path / "slides.txt").write_text("")
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pth")
    if "short.pth" in arguments:
        make_weights(tmp_path, 384, 11).rename(tmp_path / "short.pth")
    given = ["--weights", str(weights)] if "--weights" not in arguments else []
    with mock.patch.dict(PUBLISHED, tiny=TINY):
        assert cli.main(["embed", *arguments.split(), *given, "--out", "out"]) == 2
    error = unwrapped(capsys.readouterr().err)
    assert message in error.splitlines()[-1]
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_what_it_needs(weights, tmp_path, monkeypatch, capsys):
    """HDF5 alone needs h5py."""
    write(tmp_path / "b.pt", *tiles(4))
    (tmp_path / "a.h5").touch()
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert embed(weights, tmp_path / "out", tmp_path / "a.h5") == 2
    assert "needs h5py: pip install 'ring-dilated-attention[slides]'" in unwrapped(
        capsys.readouterr().err
    )
    assert embed(weights, tmp_path / "out", tmp_path / "b.pt") == 0


def test_weights_of_another_size_are_refused(slides, tmp_path, capsys):
    """Catches 16 heads of other weights, which are another function."""
    other = make_weights(tmp_path)
    argv = ["embed", str(slides[0]), "--weights", str(other), "--out", str(tmp_path / "out")]
    assert cli.main(argv) == 2
    error = unwrapped(capsys.readouterr().err)
    assert "its cls_token has the shape (1, 1, 32), and not (1, 1, 768) or (1, 1, 384)" in error
    assert "No weights tell their number of heads" in error
    assert not (tmp_path / "out").exists()


# The folder.


def test_goes_on_where_it_ended(weights, slides, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    assert embed(weights, out, slides[0]) == 0
    first = (out / "a.npy").read_bytes()
    capsys.readouterr()
    assert embed(weights, out, slides[0]) == 0
    assert capsys.readouterr().out.startswith("slides embedded: 0; there already: 1;")
    forward, calls = LongNetViT.forward, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return forward(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LongNetViT, "forward", interrupted)
        assert embed(weights, out, *slides) == 130
    assert read(out)[0].keys() == {"a", "b"}
    capsys.readouterr()
    assert embed(weights, out, *slides) == 0
    assert capsys.readouterr().out.startswith("slides embedded: 1; there already: 2;")
    assert (out / "a.npy").read_bytes() == first


def test_an_embedding_is_saved_before_the_next_begins(weights, slides, tmp_path, monkeypatch):
    """So that a run that is killed loses nothing that is finished."""
    out, forward, saved = tmp_path / "out", LongNetViT.forward, []

    def watched(*args, **options):
        saved.append({path.stem for path in out.glob("*.npy")})
        return forward(*args, **options)

    monkeypatch.setattr(LongNetViT, "forward", watched)
    assert embed(weights, out, *slides) == 0
    assert saved == [set(), {"a"}, {"a", "b"}]


def test_other_settings_and_other_folders_are_refused(weights, slides, tmp_path, capsys):
    """And nothing in them changes."""
    out, mine = tmp_path / "out", tmp_path / "mine"
    assert embed(weights, out, slides[0]) == 0
    mine.mkdir()
    (mine / "thesis.npy").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for arguments, message in (
        (
            [out, slides[1], "--max-wsi-size", "250000"],
            "settings.json has other settings: choose another --out",
        ),
        ([out, slides[1], "--tile-size", "255"], "settings.json has other settings: "),
        (
            [mine, slides[0]],
            "mine is no folder of `rda embed`, and is not empty: choose another --out",
        ),
        ([tmp_path / "file", slides[0]], "file cannot be written: Not a directory"),
        (["/proc/embeddings", slides[0]], "--out /proc/embeddings cannot be written: "),
    ):
        assert embed(weights, *arguments) == 2
        assert message in capsys.readouterr().err
    for wrong in ("[1]", "3", "{", '{"made_by": "me"}'):
        (mine / "settings.json").write_text(wrong)
        assert embed(weights, mine, slides[0]) == 2
        assert "settings.json has other settings" in capsys.readouterr().err
    (mine / "settings.json").unlink()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_slide_that_changed_stops_no_other(weights, slides, tmp_path, capsys):
    """It is named and keeps the embedding that is there; new ones are added."""
    out = tmp_path / "out"
    assert embed(weights, out, *slides[:2]) == 0
    before = read(out)[0]
    later = (out / "a.npy").stat().st_mtime + 1
    os.utime(slides[0], (later, later))
    capsys.readouterr()
    assert embed(weights, out, *slides) == 1
    output = capsys.readouterr()
    assert (
        f"rda embed: {slides[0]}: is newer than {out / 'a.npy'}: remove the older file to embed the slide again"
        in output.err
    )
    assert output.out.startswith("slides embedded: 1; there already: 2")
    after = read(out)[0]
    assert after.keys() == LENGTHS.keys()
    assert all(torch.equal(after[name], x) for name, x in before.items())


def test_no_folder_is_made_for_slides_that_cannot_be_embedded(weights, tmp_path):
    features, coords = tiles(9)
    bad = write(tmp_path / "bad.pt", features, coords - 20_000)
    assert embed(weights, tmp_path / "out", bad) == 1
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_full_is_a_sentence(weights, slides, tmp_path, monkeypatch):
    """And leaves no embedding that is cut short."""
    monkeypatch.chdir(tmp_path)
    code, error = on_a_full_disk(450, embed, weights, "out", slides[2], "--layer", "all")
    assert code == 2
    assert error.rstrip().endswith("rda embed: out/c.npy: File too large")
    assert [path.name for path in Path("out").iterdir()] == ["settings.json"]


def test_the_page_reads_the_folder(weights, slides, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert embed(weights, "embeddings", *slides) == 0
    capsys.readouterr()
    exec(block("docs/gigapath.md", "reading the folder"), {})
    embedding, *lines = capsys.readouterr().out.splitlines()
    assert embedding == "pooled"
    assert lines == [f"{name}: (32,)" for name in LENGTHS]


def test_coordinates_in_other_units_are_warned_of(weights, tmp_path, capsys):
    """Once, by the slide's name. The embedding is written."""
    features, coords = tiles(93)
    numbers, pixels = (
        write(tmp_path / f"{unit}.npz", features, coords // unit) for unit in (256, 1)
    )
    for arguments, num_warnings in (([], 1), (["--tile-size", "1"], 0)):
        out = tmp_path / str(num_warnings)
        slides = [numbers, pixels] if num_warnings else [numbers]
        assert embed(weights, out, *slides, *arguments) == 0
        assert len(read(out)[0]) == len(slides)
        err = unwrapped(capsys.readouterr().err)
        said = f"rda embed: warning: {numbers}: 93 tiles lie in 1 cell of tile_size=256"
        assert err.count("tiles lie in") == err.count(said) == num_warnings
        assert err.count("(--tile-size) is the distance") == num_warnings
