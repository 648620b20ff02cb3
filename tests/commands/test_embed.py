"""`rda embed`: every kind of file, batches and ranks, and bad slides beside others."""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from distributed import run
from embed_cases import LENGTHS, embed, make_weights, read, tiles, unwrapped, write

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands import cli
from ring_dilated_attention.commands.embed import embed as embed_command
from ring_dilated_attention.commands.embed import embedder
from ring_dilated_attention.commands.embed import slides as slide_files
from ring_dilated_attention.commands.embed.embeddings import Keys, TileSizes
from ring_dilated_attention.models import LongNetViT, load_slide_encoder


def expected(weights, name, layer, tile_size=256, **options):
    model, _ = load_slide_encoder(weights, num_heads=16, **options)
    model.tile_size = tile_size  # set afterwards: it serves coordinates, and segments stay as they are
    features, coords = tiles(LENGTHS[name], list(LENGTHS).index(name))
    with torch.no_grad():
        return torch.stack(model(features[None], coords[None], layer != "encoder"))[:, 0]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {"global_pool": True}),
        (["--batch", "2"], {"global_pool": True}),
        (["--embedding", "class", "--layer", "encoder"], {}),
        (["--layer", "all", "--batch", "3"], {"global_pool": True}),
        (["--layer", "1", "--padding", "exact"], {"global_pool": True, "padding": "exact"}),
        (
            ["--max-wsi-size", "1024", "--tile-size", "300"],
            {"global_pool": True, "max_wsi_size": 1024, "tile_size": 300},
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_embeddings_are_the_models(arguments, options, weights, slides, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert embed(weights, out, slides[0].parent, *arguments) == 0
    found, metadata = read(out)
    layer = arguments[arguments.index("--layer") + 1] if "--layer" in arguments else "last"
    for name in LENGTHS:
        states = expected(weights, name, layer, **options)
        one = states if layer == "all" else states[int(layer)] if layer.isdecimal() else states[-1]
        torch.testing.assert_close(found[name], one, rtol=1e-5, atol=1e-6)
    kind = "class token" if "class" in arguments else "mean over the tiles"
    assert kind in metadata["embedding"]
    printed = capsys.readouterr().out.split("\n")
    assert f"{metadata['embedding']}; weights of 2 layers x 32" in " ".join(line.strip() for line in printed)
    assert all(len(line) <= 80 for line in printed if str(out) not in line)
    assert json.loads(metadata["slides"])["c"][1] == 93
    assert json.loads(metadata["settings"])["model"] == "2 layers x 32"


def test_several_processes(weights, slides, tmp_path):
    """Ranks share each slide, and a slide that one of them refuses stops nobody."""
    features, coords = tiles(20, 9)
    features[19, 2] = torch.nan  # on the last rank
    slides.append(write(tmp_path / "slides" / "nan.h5", features, coords))
    slides.append(write(tmp_path / "slides" / "one.npz", *tiles(1, 5)))
    for ranks in (1, 2):
        assert embed(weights, tmp_path / f"{ranks}.safetensors", *slides, "--ranks", ranks) == 1
    alone, shared = (read(tmp_path / f"{ranks}.safetensors")[0] for ranks in (1, 2))
    assert alone.keys() == shared.keys() == {"a", "b", "c", "one"}
    for name, embedding in alone.items():
        torch.testing.assert_close(shared[name], embedding, rtol=1e-5, atol=1e-6)


def rank_reads(rank, world_size, options, slides):
    """The second slide cannot be read on rank 1, as where a disk is missing on one host."""
    results = []
    can_open = embedder.open_slide

    def open_slide(path, keys):
        if rank == 1 and path.stem == "b":
            raise OSError("the disk is gone")
        return can_open(path, keys)

    with mock.patch.object(embedder, "open_slide", open_slide):
        assert embedder._embed_here(options, slides, ContextParallel(), "cpu", results.append) is None
    return [(result.name, result.failure) for result in results]


def test_a_slide_that_one_rank_cannot_read(weights, slides):
    parser = argparse.ArgumentParser()
    embed_command.add_arguments(parser)
    options = parser.parse_args(["slides", "--weights", str(weights), "--out", "out.st", "--heads", "16"])
    options.keys, options.tile_size = Keys(), TileSizes.parse(None)
    first, second = run(2, rank_reads, options, [(path.stem, path) for path in slides])
    assert first == [("a", ""), ("b", "rank 1 refused the call: the disk is gone"), ("c", "")]
    assert second == [("a", ""), ("b", "the disk is gone"), ("c", "")]


def test_a_rank_keeps_its_own_rows_alone(tmp_path, monkeypatch):
    """Catches a view, which keeps the whole slide in the memory of each rank."""
    features, coords = tiles(40)
    path, load, loaded = write(tmp_path / "a.npz", features, coords), slide_files._load, []

    def watched(path):
        found = load(path)
        array = found["features"]
        loaded.append(weakref.ref(array if array.base is None else array.base))
        return found

    monkeypatch.setattr(slide_files, "_load", watched)
    with slide_files.open_slide(path, Keys()) as slide:
        rows = slide.features(10, 20)
    del slide
    gc.collect()
    assert torch.equal(rows, features[10:20])
    assert loaded[0]() is None


def damaged_in_the_middle(path, signature):
    """HDF5 opens such a file, and fails when it is looked into."""
    write(path, *tiles(9))
    path.write_bytes(path.read_bytes().replace(signature, bytes(len(signature))))
    return path


def bad_slides(folder):
    """Files that cannot be embedded, with what is said of each."""
    features, coords = tiles(9)
    yield write(folder / "no_coords.h5", features, None), "holds no coordinates: it has features, and coords"
    yield write(folder / "no_features.npz", None, coords), "holds no features: it has coords"
    yield write(folder / "outside.h5", features, coords + 256_000), "tile 0 at (2"
    yield write(folder / "negative.npz", features, coords - 20_000), "lies in cell (-"
    yield write(folder / "empty.pt", features[:0], coords[:0]), "no tiles"
    yield (
        write(folder / "nan.pt", features.index_fill(0, torch.tensor(4), torch.nan), coords),
        "not finite: tile 4",
    )
    yield write(folder / "wide.h5", torch.cat((features, features), 1), coords), "in_chans=5"
    yield write(folder / "fewer.npz", features, coords[1:]), "features has 9 tiles and coords has 8"
    yield write(folder / "flat.npz", features.flatten(), coords), "features has shape (45,)"
    yield write(folder / "three.h5", features, features[:, :3]), "coords has shape (9, 3), not (tiles, 2)"
    yield write(folder / "integers.pt", features.int(), coords), "dtype torch.int32"
    yield write(folder / "bool.pt", features, coords > 5000), "coords has dtype torch.bool, not real numbers"
    yield write(folder / "bool.npz", features, coords > 5000), "coords has dtype bool, not real numbers"
    yield write(folder / "half.pt", features, coords.half()), "coords has dtype torch.float16, too coarse for pixels"
    yield write(folder / "complex.npz", features, coords + 0j), "coords has dtype complex64, not real numbers"
    yield write(folder / "complex.pt", features, coords + 0j), "coords has dtype torch.complex64, not real"
    yield write(folder / "sparse.pt", features.to_sparse(), coords), "features is torch.sparse_coo"
    yield write(folder / "large.pt", features * 1e38, coords), "its features are finite and its embedding is not"
    yield write(folder / "larger.pt", features.double() * 1e300, coords), "tile 0 (and 8 more), taken as"
    torch.save({1: features, 2: coords}, folder / "numbered.pt")
    yield folder / "numbered.pt", "holds no features: it has 1, 2, and"
    np.savez(folder / "text.npz", features=features.numpy(), coords=coords.numpy().astype(str))
    yield folder / "text.npz", "coords has dtype <U"
    yield damaged_in_the_middle(folder / "group.h5", b"TREE"), "cannot be read: Unable to get group info"
    changed = write(folder / "bit.pt", features, coords)
    changed.write_bytes(changed.read_bytes().replace(features.numpy().tobytes(), (features + 1).numpy().tobytes()))
    yield changed, "it is damaged: the checksum of its"
    (folder / "gone.h5").symlink_to(folder / "nowhere.h5")
    yield folder / "gone.h5", "No such file or directory"
    os.mkfifo(folder / "pipe.h5")
    yield folder / "pipe.h5", "is no regular file"
    yield write(folder / "stated.h5", features, coords, attributes={"patch_size_level0": 512}), "=512, the step from"
    torch.save(features, folder / "bare.pt")
    yield folder / "bare.pt", "holds a tensor alone, and no coordinates"
    torch.save(torch.nn.Linear(2, 2), folder / "pickle.pt")
    yield folder / "pickle.pt", "cannot be read as pt: torch.load(weights_only=True) refuses it, and"
    for name in ("damaged.h5", "damaged.npz", "damaged.pt"):
        (folder / name).write_bytes(b"not a slide")
        yield folder / name, "cannot be read"


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")  # by torch.load, since torch 2.14
@pytest.mark.parametrize("batch", [1, 4])
def test_bad_slides_do_not_stop_the_others(batch, weights, slides, tmp_path, capsys):
    """Each is named with its reason, exit code 1, and the others are as if alone."""
    bad = {}
    for path, reason in bad_slides(tmp_path):
        bad.setdefault(path.with_name(f"{path.stem}_{path.suffix[1:]}{path.suffix}"), reason)
        path.rename(path.with_name(f"{path.stem}_{path.suffix[1:]}{path.suffix}"))
    out = tmp_path / "out.safetensors"
    folder = tmp_path / "mixed"
    folder.mkdir()
    for path in (*bad, *slides):
        path.rename(folder / path.name)
    bad = {folder / path.name: reason for path, reason in bad.items()}
    assert embed(weights, out, folder, "--batch", batch) == 1
    error = unwrapped(capsys.readouterr().err)
    for path, reason in bad.items():
        [line] = [line for line in error.splitlines() if line.startswith(f"rda embed: {path}: ")]
        assert reason in line
    assert read(out)[0].keys() == LENGTHS.keys()
    for name, embedding in read(out)[0].items():
        torch.testing.assert_close(
            embedding, expected(weights, name, "last", global_pool=True)[-1], rtol=1e-5, atol=1e-6
        )


def test_a_folder_is_made_for_the_file(weights, slides, tmp_path):
    assert embed(weights, tmp_path / "new" / "folder" / "out.st", slides[0]) == 0
    assert read(tmp_path / "new" / "folder" / "out.st")[0].keys() == {"a"}


def test_integers_are_refused_in_a_batch_too(weights, tmp_path, capsys):
    """They may be something else than features, beside floats of the same width."""
    features, coords = tiles(9)
    good, bad = write(tmp_path / "a.npz", features, coords), write(tmp_path / "b.npz", features.int(), coords)
    assert embed(weights, tmp_path / "out.st", good, bad, "--batch", 2) == 1
    assert f"{bad}: features have shape (1, 9, 5) and dtype torch.int32" in unwrapped(capsys.readouterr().err)


def test_numbers_in_another_byte_order(weights, slides, tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["features"], file["coords"] = (x.numpy().astype(x.numpy().dtype.newbyteorder()) for x in tiles(40))
    assert embed(weights, tmp_path / "out.st", tmp_path / "a.h5") == 0
    assert embed(weights, tmp_path / "native.st", slides[0]) == 0
    assert torch.equal(read(tmp_path / "out.st")[0]["a"], read(tmp_path / "native.st")[0]["a"])


def device_is_full():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


@pytest.mark.parametrize(
    ("allocate", "message"),
    [
        (device_is_full, "Tried to allocate 9 GiB"),
        (lambda: torch.empty(2**50), "can't allocate memory: you tried to allocate 4503599627370496 bytes"),
        (lambda: np.empty(2**50), "Unable to allocate 8.00 PiB"),
        (lambda: bytearray(2**60), "MemoryError"),
    ],
    ids=["cuda", "cpu", "numpy", "python"],
)
def test_a_slide_that_does_not_fit_the_memory(allocate, message, weights, slides, tmp_path, capsys, monkeypatch):
    """It is named, and the others are embedded; a batch that does not fit is embedded slide by slide."""
    forward = LongNetViT.forward

    def limited(self, x, *args, **options):
        if x.shape[:2].numel() > 100:
            allocate()
        return forward(self, x, *args, **options)

    monkeypatch.setattr(LongNetViT, "forward", limited)
    large = write(tmp_path / "large.npz", *tiles(101))
    assert embed(weights, tmp_path / "out.st", large, *slides, "--batch", 4) == 1
    [line] = [
        line for line in unwrapped(capsys.readouterr().err).splitlines() if line.startswith(f"rda embed: {large}: ")
    ]
    assert message in line
    assert read(tmp_path / "out.st")[0].keys() == LENGTHS.keys()


def test_the_tile_size_that_a_file_states(weights, tmp_path):
    """TRIDENT's files state it; taken only when asked for, and refused where a file states none."""
    features, coords = tiles(9)
    stated = write(tmp_path / "stated.h5", features, coords, attributes={"patch_size_level0": 512})
    plain = write(tmp_path / "plain.npz", features, coords, names=("tile_embeds", "xy"))
    keys = ("--keys", "tile_embeds", "xy")
    assert embed(weights, tmp_path / "file.st", stated, plain, "--tile-size", "file") == 1
    assert embed(weights, tmp_path / "given.st", plain, "--tile-size", "512", *keys) == 0
    torch.testing.assert_close(read(tmp_path / "file.st")[0]["stated"], read(tmp_path / "given.st")[0]["plain"])
    assert json.loads(read(tmp_path / "file.st")[1]["slides"])["stated"][2] == 512


@pytest.mark.parametrize("options", [[], ["--batch", "2"], ["--ranks", "2"]])
def test_coordinates_in_other_units_are_warned_of(weights, tmp_path, capsys, options):
    """Once, by the slide's name, whoever computes it. The embedding is written."""
    features, coords = tiles(93)
    numbers, pixels = (write(tmp_path / f"{unit}.npz", features, coords // unit) for unit in (256, 1))
    for arguments, num_warnings in ((options, 1), ([*options, "--tile-size", "1"], 0)):
        out = tmp_path / f"{num_warnings}.st"
        slides = [numbers, pixels] if num_warnings else [numbers]
        assert embed(weights, out, *slides, *arguments) == 0
        assert len(read(out)[0]) == len(slides)
        err = unwrapped(capsys.readouterr().err)
        assert err.count(f"rda embed: warning: {numbers}: 93 tiles lie in 1 cell of tile_size=256") == num_warnings
        assert err.count("tiles lie in") == err.count("Pass --tile-size.") == num_warnings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "3"], "--layer 3: "),
        (["--layer", "first"], "--layer first is none of last, encoder, all, nor a number from 0 on"),
        (["--batch", "2", "--ranks", "2"], "--batch 2 with --ranks 2"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--tile-size", "-1"], "--tile-size -1 is neither"),
        (["--max-wsi-size", "1e15"], "max_wsi_size=1e+15 is more than 2**31 tiles of 256 pixels"),
        (["--max-wsi-size", "1e300"], "--max-wsi-size must be at most 9,223,372,036,854,775,807 (64 bits)"),
        (["--tile-size", "inf"], "--tile-size inf is neither"),
        (["--heads", "5"], "embed_dim=32 is not a multiple of num_heads=5"),
        (["missing.h5"], "there is no missing.h5"),
        (["slides.txt"], "slides.txt does not end in one of"),
        (["a.h5", "other/a.npz"], "would both be called 'a'"),
        (["nothing"], "the folder nothing holds no slides"),
        (["__metadata__.npz"], "'__metadata__.npz': safetensors has no place for a slide of this name"),
        ([os.fsdecode(b"\xff.npz")], "'\\udcff.npz': safetensors has no place for a slide of this name"),
        (["--weights", "other.pth"], "other.pth does not hold a slide encoder's weights"),
        (["--weights", "none.pth"], "none.pth cannot be read: No such file"),
        (["--weights", "short.pth"], "short.pth holds 11 layers x 384, and published encoders of this width have 12"),
        (["--weights", "short.pth", "--depth", "12"], "short.pth holds 11 layers x 384, and you asked for 12 layers"),
        (["--depth", "0"], "--depth must be at least 1, got 0"),
        (["--device", "no"], "--device no cannot be used: "),
        (["--device", "meta"], "--device meta cannot be used: "),
        (["--device", "cuda:99"], "--device cuda:99 cannot be used: "),
        (["--device", "cuda", "--ranks", "99"], "--device cuda cannot be used: 99 ranks take a GPU each"),
        (["--device", "cuda:0", "--ranks", "2"], "--device cuda:0 cannot be used: each of 2 ranks takes"),
    ],
)
def test_refused_before_anything_is_written(arguments, message, weights, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("other", "nothing"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "a.h5", *tiles(4))
    write(tmp_path / "other" / "a.npz", *tiles(4))
    (tmp_path / "slides.txt").write_text("")
    for name in ("__metadata__.npz", os.fsdecode(b"\xff.npz")):
        write(tmp_path / name, *tiles(4))
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pth")
    if "short.pth" in arguments:
        make_weights(tmp_path, 384, 11).rename(tmp_path / "short.pth")
    slides = [] if arguments[0] == "a.h5" else ["a.h5"]
    given = ["--weights", str(weights)] if "--weights" not in arguments else []
    given += ["--heads", "16"] if "--heads" not in arguments else []
    assert cli.main(["embed", *slides, *arguments, *given, "--out", "out.st"]) == 2
    error = unwrapped(capsys.readouterr().err)
    assert message in error.splitlines()[-1]
    assert "Traceback" not in error
    assert not (tmp_path / "out.st").exists()


def test_what_it_needs(weights, tmp_path, monkeypatch, capsys):
    """HDF5 alone needs h5py."""
    write(tmp_path / "b.pt", *tiles(4))
    (tmp_path / "a.h5").touch()
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert embed(weights, tmp_path / "out.st", tmp_path / "a.h5") == 2
    assert "needs h5py: pip install 'ring-dilated-attention[slides]'" in unwrapped(capsys.readouterr().err)
    assert embed(weights, tmp_path / "out.st", tmp_path / "b.pt") == 0


def test_options_are_refused_before_torch_is_imported():
    start = "import sys; from ring_dilated_attention.commands.cli import main; sys.modules['torch'] = None"
    code = f"{start}; sys.exit(main('embed a.npz --weights none.pth --out out.st --layer top'.split()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rda embed: --layer top is none of last, encoder, all")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_a_sentence(weights, slides, tmp_path, capsys):
    assert embed(weights, tmp_path / "out.st", *slides, "--device", "cuda") == 2
    assert unwrapped(capsys.readouterr().err).startswith("rda embed: --device cuda cannot be used: ")


def test_weights_of_another_depth_when_told(tmp_path, slides, capsys):
    """A file that lacks its last layers is a whole model too: of a published width it is taken only when told so."""
    weights = make_weights(tmp_path, 384, 1)
    assert embed(weights, tmp_path / "out.st", slides[0], "--depth", "1") == 0
    assert "weights of 1 layers x 384" in " ".join(capsys.readouterr().out.split())


def test_weights_that_do_not_tell_their_heads(weights, slides, tmp_path, capsys):
    """Catches 16 heads of other weights, which are another function. A file of the published size needs no option."""
    given = ["--weights", str(weights), "--out", str(tmp_path / "out.st")]
    assert cli.main(["embed", str(slides[0]), *given]) == 2
    assert re.search(
        r"rda embed: \S+pth holds 2 layers x 32 .* tell their number of heads: .*\(--heads\)\n$",
        unwrapped(capsys.readouterr().err),
    )
    assert not (tmp_path / "out.st").exists()
    assert cli.main(["embed", str(slides[0]), *given, "--heads", "8"]) == 0
    with torch.no_grad():
        model = load_slide_encoder(weights, num_heads=8, global_pool=True)[0]
        features, coords = tiles(LENGTHS["a"], 0)
        torch.testing.assert_close(read(tmp_path / "out.st")[0]["a"], model(features[None], coords[None], True)[-1][0])
    assert embed(weights, tmp_path / "out.st", slides[1]) == 2
    assert "made with heads=8, not 16" in unwrapped(capsys.readouterr().err)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_are_not_finite(ranks, weights, slides, tmp_path, capsys):
    saved = torch.load(weights)["model"]
    saved["encoder.layers.1.ffn.fc1.weight"][3, 2] = torch.nan
    torch.save(saved, weights)
    assert embed(weights, tmp_path / "out.st", slides[0], "--ranks", ranks) == 2
    error = unwrapped(capsys.readouterr().err)
    assert "is unchanged: encoder.layers.1.ffn.fc1.weight holds NaN or inf as torch.float32." in error
    assert not (tmp_path / "out.st").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_autocast(dtype, weights, slides, tmp_path):
    """As the model under torch.autocast, which is another embedding than that of float32."""
    assert embed(weights, tmp_path / "out.st", slides[0], "--dtype", str(dtype).removeprefix("torch.")) == 0
    [found] = read(tmp_path / "out.st")[0].values()
    with torch.autocast("cpu", dtype):
        half = expected(weights, "a", "last", global_pool=True)[-1]
    torch.testing.assert_close(found, half, rtol=1e-6, atol=1e-6)
    single = expected(weights, "a", "last", global_pool=True)[-1]
    assert (found - single).norm() / single.norm() > torch.finfo(dtype).eps / 10


def test_progress_is_shown(weights, slides, tmp_path, capsys):
    pytest.importorskip("tqdm")
    assert embed(weights, tmp_path / "out.st", *slides) == 0
    error = unwrapped(capsys.readouterr().err)
    assert "3/3" in error
    assert "c, 93 tiles" in error


def test_float64_is_exact(slides, tmp_path):
    """Neither weights nor anything else is rounded to float32 on the way."""
    weights = make_weights(tmp_path)
    exact = {name: x.double() * (1 + 1e-9) for name, x in torch.load(weights)["model"].items()}
    torch.save(exact, weights)
    assert embed(weights, tmp_path / "out.st", slides[0], "--dtype", "float64") == 0
    states = expected(weights, "a", "last", global_pool=True)
    assert states.dtype == torch.float64
    torch.testing.assert_close(read(tmp_path / "out.st")[0]["a"], states[-1], rtol=1e-13, atol=1e-13)
    rounded = expected(weights, "a", "last", global_pool=True, dtype=torch.float32)
    assert (rounded - states).abs().max() > 1e-10
