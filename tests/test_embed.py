"""`rda embed`: every kind of file, batches and ranks, going on, and bad slides beside others."""

import json
import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from distributed import run
from safetensors import safe_open
from safetensors.torch import save_file
from torchscale_cases import fill, waves

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands import cli, embedder
from ring_dilated_attention.commands.embeddings import EmbeddingFile, Entry, fingerprint
from ring_dilated_attention.commands.processes import RankFailedError
from ring_dilated_attention.commands.slides import Keys
from ring_dilated_attention.models import LongNetViT, load_slide_encoder, segment_lengths_for
from ring_dilated_attention.models.longnet_vit import DILATION_RATES

WIDTH, DEPTH = 32, 2
LENGTHS = {"a": 40, "b": 7, "c": 93}


def tiles(length, seed=0):
    return waves(length, 5, seed=seed).float(), ((waves(length, 2, seed=seed + 1) + 1) * 5000).long()


def write(path, features, coords, names=("features", "coords"), attributes=None):
    arrays = {name: x for name, x in zip(names, (features, coords), strict=True) if x is not None}
    if path.suffix == ".h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            for name, x in arrays.items():
                file[name] = x.numpy()
                file[name].attrs.update(attributes or {})
    elif path.suffix == ".npz":
        np.savez(path, **{name: x.numpy() for name, x in arrays.items()}, **(attributes or {}))
    else:
        torch.save({**arrays, **(attributes or {})}, path)
    return path


@pytest.fixture
def weights(tmp_path):
    branches = {"segment_lengths": segment_lengths_for(), "dilation_rates": DILATION_RATES}
    model = fill(LongNetViT(5, WIDTH, DEPTH, 16, **branches))
    torch.save({"model": model.state_dict()}, tmp_path / "slide_encoder.pth")
    return tmp_path / "slide_encoder.pth"


@pytest.fixture
def slides(tmp_path):
    """One file of each kind."""
    (tmp_path / "slides").mkdir()
    kinds = {"a": ".h5", "b": ".npz", "c": ".pt"}
    return [
        write(tmp_path / "slides" / f"{name}{kinds[name]}", *tiles(length, i))
        for i, (name, length) in enumerate(LENGTHS.items())
    ]


def embed(weights, out, *arguments):
    return cli.main(["embed", *map(str, arguments), "--weights", str(weights), "--out", str(out)])


def read(out):
    with safe_open(out, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118  not a dict


def expected(weights, name, layer, **options):
    model, _ = load_slide_encoder(weights, **options)
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
    assert metadata["embedding"] in capsys.readouterr().out
    assert json.loads(metadata["slides"])["c"][1] == 93


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


def rank_reads(rank, world_size, options):
    """The second slide cannot be read on rank 1, as where a disk is missing on one host."""
    results = []
    can_open = embedder.open_slide

    def open_slide(path, keys):
        if rank == 1 and path.stem == "b":
            raise OSError("the disk is gone")
        return can_open(path, keys)

    with mock.patch.object(embedder, "open_slide", open_slide):
        assert embedder._embed_here(options, ContextParallel(), "cpu", results.append) is None
    return [(result.name, result.failure) for result in results]


def test_a_slide_that_one_rank_cannot_read(weights, slides):
    given = ("pooled", "last", "torchscale", 262_144, None, 16, "float32", "cpu", 1, Keys())
    options = embedder.Options([(path.stem, path) for path in slides], weights, *given)
    first, second = run(2, rank_reads, options)
    assert first == [("a", None), ("b", "rank 1 refused the call: the disk is gone"), ("c", None)]
    assert second == [("a", None), ("b", "the disk is gone"), ("c", None)]


def test_goes_on_where_it_ended(weights, slides, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.safetensors"
    assert embed(weights, out, slides[0]) == 0
    first = out.read_bytes()
    assert embed(weights, out, slides[0]) == 0
    assert "0 slides embedded, 1 were there already" in capsys.readouterr().out
    assert out.read_bytes() == first
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
    assert embed(weights, out, *slides, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["slides"].keys() == {"a", "b", "c"}
    (tmp_path / "first").write_bytes(first)
    assert torch.equal(read(out)[0]["a"], read(tmp_path / "first")[0]["a"])


def test_processes_that_die(weights, slides, tmp_path, capsys, monkeypatch):
    """What was embedded before is saved, and no traceback of the command's own is shown."""

    def killed(options, num_ranks, take):
        take(embedder.Result("a", [1.0], 40, 256.0, fingerprint(slides[0], Keys())))
        raise RankFailedError("rank 1: died without a word")

    out = tmp_path / "out.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(embedder, "embed_all", killed)
        assert embed(weights, out, *slides, "--ranks", 2) == 1
    error = capsys.readouterr().err
    assert "the processes failed. What was embedded before is saved" in error
    assert error.endswith("rank 1: died without a word\n")
    assert embed(weights, out, *slides) == 0
    assert "2 slides embedded, 1 were there already" in capsys.readouterr().out


def test_two_processes_lose_nothing(tmp_path):
    """Both write the same file: what the other has written meanwhile is kept."""
    settings = {"embedding": "the mean", "dtype": "float32"}
    mine, other = (EmbeddingFile(tmp_path / "out.st", settings) for _ in range(2))
    other.add("b", [2.0], Entry("1", 1, 256.0))
    other.write()
    mine.add("a", [1.0], Entry("1", 1, 256.0))
    mine.write()
    assert read(tmp_path / "out.st")[0] == {"a": torch.ones(1), "b": torch.full((1,), 2.0)}
    assert EmbeddingFile(tmp_path / "out.st", settings).entries.keys() == {"a", "b"}


def test_other_settings_are_not_mixed(weights, slides, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert embed(weights, out, slides[0]) == 0
    before = out.read_bytes()
    assert embed(weights, out, slides[1], "--padding", "exact") == 2
    assert "made with padding='torchscale', not 'exact'" in capsys.readouterr().err
    (tmp_path / "again").mkdir()
    for length in (41, LENGTHS["a"]):  # the second is a file of the same size
        other = write(tmp_path / "again" / "a.h5", *tiles(length, 3))
        assert embed(weights, out, other) == 2
        assert "'a' is in" in capsys.readouterr().err
    assert other.stat().st_size == slides[0].stat().st_size
    assert embed(weights, out, slides[0], "--keys", "features", "coords") == 2
    assert "or from other arrays in it: rename" in capsys.readouterr().err
    save_file({"a": torch.ones(2)}, tmp_path / "mine.safetensors")
    assert embed(weights, tmp_path / "mine.safetensors", slides[0]) == 2
    assert "`rda embed` did not make it" in capsys.readouterr().err
    (tmp_path / "text").write_text("mine")
    assert embed(weights, tmp_path / "text", slides[0]) == 2
    assert "is there and cannot be read" in capsys.readouterr().err
    assert (tmp_path / "text").read_text() == "mine"
    assert out.read_bytes() == before
    assert not list(tmp_path.glob("*unfinished*"))


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
    yield write(folder / "outside.h5", features, coords + 256_000), "tile 0 of slide 0 at (2"
    yield write(folder / "negative.npz", features, coords - 20_000), "lies in cell (-"
    yield write(folder / "empty.pt", features[:0], coords[:0]), "no tiles"
    yield (
        write(folder / "nan.pt", features.index_fill(0, torch.tensor(4), torch.nan), coords),
        "not finite: tile 4 of slide 0",
    )
    yield write(folder / "wide.h5", torch.cat((features, features), 1), coords), "in_chans=5"
    yield write(folder / "fewer.npz", features, coords[1:]), "features has 9 tiles and coords has 8"
    yield write(folder / "flat.npz", features.flatten(), coords), "features has shape (45,)"
    yield write(folder / "three.h5", features, features[:, :3]), "coords has shape (9, 3), not (tiles, 2)"
    yield write(folder / "integers.pt", features.int(), coords), "dtype torch.int32"
    yield write(folder / "complex.npz", features, coords + 0j), "coords has dtype complex64, not real numbers"
    yield write(folder / "complex.pt", features, coords + 0j), "coords has dtype torch.complex64, not real"
    yield write(folder / "sparse.pt", features.to_sparse(), coords), "features has torch.sparse_coo"
    yield write(folder / "large.pt", features * 1e38, coords), "its features are finite and its embedding is not"
    yield write(folder / "larger.pt", features.double() * 1e300, coords), "tile 0 of slide 0 (and 8 more), taken as"
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
    yield write(folder / "stated.h5", features, coords, attributes={"patch_size_level0": 512}), "=512, the step from"
    torch.save(features, folder / "bare.pt")
    yield folder / "bare.pt", "holds a tensor alone, and no coordinates"
    torch.save(torch.nn.Linear(2, 2), folder / "pickle.pt")
    yield folder / "pickle.pt", "cannot be read with torch.load(weights_only=True)"
    for name in ("damaged.h5", "damaged.npz", "damaged.pt"):
        (folder / name).write_bytes(b"not a slide")
        yield folder / name, "cannot be read"


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
    error = capsys.readouterr().err
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
    assert f"{bad}: features have shape (1, 9, 5) and dtype torch.int32" in capsys.readouterr().err


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
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"rda embed: {large}: ")]
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "3"], "--layer 3: "),
        (["--layer", "first"], "--layer first is none of last, encoder, all, nor a number from 0 on"),
        (["--batch", "2", "--ranks", "2"], "--batch 2 with --ranks 2"),
        (["--ranks", "0"], "--ranks 0 must be at least 1"),
        (["--tile-size", "-1"], "--tile-size -1 is neither"),
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
        (["--device", "no"], "no"),
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
    slides = [] if arguments[0] == "a.h5" else ["a.h5"]
    given = ["--weights", str(weights)] if "--weights" not in arguments else []
    assert cli.main(["embed", *slides, *arguments, *given, "--out", "out.st"]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert not (tmp_path / "out.st").exists()


def test_a_disk_that_is_full_is_a_sentence(weights, slides, tmp_path, capsys):
    """safetensors has errors of its own, which are no OSError."""
    from safetensors import SafetensorError

    full = SafetensorError("I/O error: No space left on device (os error 28)")
    with mock.patch("safetensors.torch.save_file", side_effect=full):
        assert embed(weights, tmp_path / "out.safetensors", slides[2]) == 2
    assert "out.safetensors cannot be written: I/O error: No space left" in capsys.readouterr().err
    assert not list(tmp_path.glob("out.safetensors*"))


def test_what_it_needs(weights, tmp_path, monkeypatch, capsys):
    """HDF5 alone needs h5py."""
    write(tmp_path / "b.pt", *tiles(4))
    (tmp_path / "a.h5").touch()
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert embed(weights, tmp_path / "out.st", tmp_path / "a.h5") == 2
    assert "needs h5py: pip install h5py" in capsys.readouterr().err
    assert embed(weights, tmp_path / "out.st", tmp_path / "b.pt") == 0


def test_options_are_refused_before_torch_is_imported():
    code = "import sys; from ring_dilated_attention.commands import embed; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
