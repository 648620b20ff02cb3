"""The file that `rda embed` writes: going on with it, and what is not mixed in it."""

import csv
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from embed_cases import LENGTHS, embed, read, tiles, unwrapped, write
from pages import block, blocks
from safetensors.torch import save_file

from ring_dilated_attention.commands.embed import embedder, embeddings
from ring_dilated_attention.commands.embed.embeddings import EmbeddingFile, Keys, SlideEntry, fingerprint
from ring_dilated_attention.commands.local_ranks import RankFailedError
from ring_dilated_attention.models import LongNetViT


def test_goes_on_where_it_ended(weights, slides, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.safetensors"
    assert embed(weights, out, slides[0]) == 0
    first = out.read_bytes()
    assert embed(weights, out, slides[0]) == 0
    assert "0 slides embedded, 1 was there already" in capsys.readouterr().out
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


def test_an_embedding_is_saved_before_the_run_ends(weights, slides, tmp_path, monkeypatch):
    """So that a run that is killed loses little: nothing older than some seconds."""
    assert 0 < embeddings.SECONDS_BETWEEN_WRITES <= 30
    out, forward, saved = tmp_path / "out.safetensors", LongNetViT.forward, []

    def watched(*args, **options):
        saved.append(set(read(out)[0]) if out.exists() else set())
        return forward(*args, **options)

    monkeypatch.setattr(embeddings, "SECONDS_BETWEEN_WRITES", 0)
    monkeypatch.setattr(LongNetViT, "forward", watched)
    assert embed(weights, out, *slides) == 0
    assert saved == [set(), {"a"}, {"a", "b"}]


def test_processes_that_die(weights, slides, tmp_path, capsys, monkeypatch):
    """What was embedded before is saved, and no traceback of the command's own is shown."""

    def killed(options, slides_to_do, take):
        take(embedder.Result("a", SlideEntry(fingerprint(slides[0], Keys()), 40, 256.0), [1.0]))
        raise RankFailedError("rank 1: died without a word")

    out = tmp_path / "out.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(embedder, "embed_all", killed)
        assert embed(weights, out, *slides, "--ranks", 2) == 1
    error = unwrapped(capsys.readouterr().err)
    assert "the processes failed. What was embedded before is saved" in error
    assert error.endswith("rank 1: died without a word\n")
    assert embed(weights, out, *slides) == 0
    assert "2 slides embedded, 1 was there already" in capsys.readouterr().out


def test_two_processes_lose_nothing(tmp_path):
    """Both write the same file: what the other has written meanwhile is kept."""
    settings = {"embedding": "the mean", "dtype": "float32"}
    mine, other = (EmbeddingFile(tmp_path / "out.st", settings) for _ in range(2))
    other.add("b", [2.0], SlideEntry("1", 1, 256.0))
    other.write()
    mine.add("a", [1.0], SlideEntry("1", 1, 256.0))
    mine.write()
    assert read(tmp_path / "out.st")[0] == {"a": torch.ones(1), "b": torch.full((1,), 2.0)}
    assert EmbeddingFile(tmp_path / "out.st", settings).entries.keys() == {"a", "b"}


def test_other_settings_are_not_mixed(weights, slides, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert embed(weights, out, slides[0]) == 0
    before = out.read_bytes()
    assert embed(weights, out, slides[1], "--padding", "exact") == 2
    assert "made with padding='torchscale', not 'exact'" in unwrapped(capsys.readouterr().err)
    (tmp_path / "again").mkdir()
    for length in (41, LENGTHS["a"]):  # the second is a file of the same size
        other = write(tmp_path / "again" / "a.h5", *tiles(length, 3))
        assert embed(weights, out, other) == 1
        assert f"{other}: the slide 'a' is in" in unwrapped(capsys.readouterr().err)
    assert other.stat().st_size == slides[0].stat().st_size
    assert embed(weights, out, slides[0], "--keys", "features", "coords") == 1
    assert "or from other arrays in it: rename" in unwrapped(capsys.readouterr().err)
    save_file({"a": torch.ones(2)}, tmp_path / "mine.safetensors")
    assert embed(weights, tmp_path / "mine.safetensors", slides[0]) == 2
    assert "`rda embed` did not make it" in unwrapped(capsys.readouterr().err)
    (tmp_path / "text").write_text("mine")
    assert embed(weights, tmp_path / "text", slides[0]) == 2
    assert "is there and cannot be read" in unwrapped(capsys.readouterr().err)
    assert (tmp_path / "text").read_text() == "mine"
    for wrong in ("[1]", "3", "{"):
        metadata = {"made_by": "rda embed", "settings": wrong, "slides": "{}"}
        save_file({"a": torch.ones(2)}, tmp_path / "wrong.safetensors", metadata=metadata)
        assert embed(weights, tmp_path / "wrong.safetensors", slides[0]) == 2
        assert "what it says of itself cannot be read. Choose another name." in unwrapped(capsys.readouterr().err)
    os.mkfifo(tmp_path / "pipe")
    assert embed(weights, tmp_path / "pipe", slides[0]) == 2
    assert "pipe is there, and is no regular file. Choose another name." in unwrapped(capsys.readouterr().err)
    assert out.read_bytes() == before
    assert not list(tmp_path.glob("*unfinished*"))


def test_no_file_is_named_that_was_not_written(weights, slides, tmp_path, capsys):
    features, coords = tiles(9)
    bad = write(tmp_path / "bad.pt", features, coords - 20_000)
    assert embed(weights, tmp_path / "out.st", bad) == 1
    assert capsys.readouterr().out.startswith("0 slides embedded; no file was written: the mean over the tiles")
    assert embed(weights, tmp_path / "out.st", bad, "--json") == 1
    assert json.loads(capsys.readouterr().out)["out"] is None
    assert embed(weights, tmp_path / "out.st", bad, slides[0], "--json") == 1
    assert json.loads(capsys.readouterr().out)["out"] == str(tmp_path / "out.st")


def test_a_symlink_is_written_to_where_it_leads(weights, slides, tmp_path, capsys):
    pointer, place = tmp_path / "link.st", tmp_path / "elsewhere" / "out.st"
    pointer.symlink_to(place)
    for slide in slides[:2]:
        assert embed(weights, pointer, slide) == 0
        assert pointer.is_symlink()
    assert f"1 slide embedded; {pointer}: " in " ".join(capsys.readouterr().out.split())
    assert read(place)[0].keys() == {"a", "b"}
    loop = tmp_path / "loop.st"
    loop.symlink_to(loop)
    assert embed(weights, loop, slides[0]) == 2
    assert "Too many levels of symbolic links" in unwrapped(capsys.readouterr().err)


def test_a_slide_that_changed_stops_no_other(weights, slides, tmp_path, capsys):
    """It is named and keeps the embedding that is there; new ones are added."""
    out = tmp_path / "out.safetensors"
    assert embed(weights, out, *slides[:2]) == 0
    before = read(out)[0]
    write(slides[0], *tiles(41, 3))
    capsys.readouterr()
    assert embed(weights, out, *slides) == 1
    output = capsys.readouterr()
    assert f"rda embed: {slides[0]}: the slide 'a' is in {out} already, made from another file" in unwrapped(output.err)
    assert output.out.startswith("1 slide embedded, 1 was there already")
    after = read(out)[0]
    assert after.keys() == LENGTHS.keys()
    assert all(torch.equal(after[name], x) for name, x in before.items())


@pytest.mark.parametrize(
    "same",
    [["--tile-size", "256"], ["--tile-size", "256.0"], ["--layer", "2"], ["--layer", "02"]],
    ids=" ".join,
)
def test_one_function_written_in_another_way(same, weights, slides, tmp_path, capsys):
    """Settings are compared by what they mean."""
    out = tmp_path / "out.safetensors"
    assert embed(weights, out, slides[0]) == 0
    assert embed(weights, out, *slides[:2], *same) == 0
    assert "1 slide embedded, 1 was there already" in capsys.readouterr().out
    assert embed(weights, out, slides[1], "--tile-size", "255") == 2
    assert "made with tile_size=256.0, not 255.0" in unwrapped(capsys.readouterr().err)


def test_a_disk_that_is_full_is_a_sentence(weights, slides, tmp_path, capsys):
    """safetensors has errors of its own, which are no OSError."""
    from safetensors import SafetensorError

    full = SafetensorError("I/O error: No space left on device (os error 28)")
    with mock.patch("safetensors.torch.save_file", side_effect=full):
        assert embed(weights, tmp_path / "out.safetensors", slides[2]) == 2
    assert "out.safetensors cannot be written: I/O error: No space left" in unwrapped(capsys.readouterr().err)
    assert not list(tmp_path.glob("out.safetensors*"))


def test_a_slide_is_known_by_all_of_its_file(tmp_path):
    """Catches samples of a file: a run of tiles that was mended lies between them."""
    path = tmp_path / "slide.h5"
    path.write_bytes(bytes(4 * 2**20))
    before = fingerprint(path, [])
    with path.open("r+b") as file:
        file.seek(1_500_000)
        file.write(b"1")
    assert fingerprint(path, []) != before


def test_files_that_state_a_tile_size_beside_others_that_do_not(weights, tmp_path, capsys):
    """A folder of both goes into one file, whichever --tile-size came first; no size is taken without a word."""
    mixed, alike = tmp_path / "mixed", tmp_path / "alike"
    for i, (folder, name, stated) in enumerate([(mixed, "a", 512), (mixed, "b", None), (alike, "c", 256)]):
        folder.mkdir(exist_ok=True)
        write(folder / f"{name}.pt", *tiles(9 + i, i), attributes={"patch_size_level0": stated} if stated else {})

    def run(out, *given):
        code = embed(weights, tmp_path / out, mixed, alike, *given)
        output = capsys.readouterr()
        sizes = [line for line in unwrapped(output.out).splitlines() if line.startswith("tile size")]
        if not (tmp_path / out).exists():
            return code, {}, sizes, unwrapped(output.err)
        found = json.loads(read(tmp_path / out)[1]["slides"])
        return code, {name: tuple(entry[2:]) for name, entry in found.items()}, sizes, unwrapped(output.err)

    of_256 = "tile size 256, as stated, in 1 file: c"
    none = "tile size 256, and none is stated, in 1 file: b"
    code, found, sizes, error = run("one.st")
    assert (code, found, sizes) == (1, {"b": (256, None), "c": (256, 256)}, [none, of_256])
    assert (
        f"{mixed / 'a.pt'}: states patch_size_level0=512, the step from tile to tile: --tile-size 256 always takes"
        in error
    )
    code, found, sizes, error = run("one.st", "--tile-size", "file:256")
    assert (code, found) == (0, {"a": (512, 512), "b": (256, None), "c": (256, 256)})
    assert sorted(sizes) == [none, of_256, "tile size 512, as stated, in 1 file: a"]
    code, _, _, error = run("one.st", "--tile-size", "file")
    assert code == 1
    assert f"{mixed / 'b.pt'}: states no patch_size_level0, the step" in error
    code, _, _, error = run("one.st", "--tile-size", "256")
    assert code == 1
    assert f"a.pt: the slide 'a' is in {tmp_path / 'one.st'} already, made with tile size 512, not 256" in error
    code, _, _, error = run("one.st", "--tile-size", "file:512")
    assert code == 2
    assert "made with tile_size=256.0, not 512.0" in error

    assert run("two.st", "--tile-size", "file")[:2] == (1, {"a": (512, 512), "c": (256, 256)})
    assert run("two.st", "--tile-size", "file:256")[0] == 0
    assert all(torch.equal(x, read(tmp_path / "two.st")[0][name]) for name, x in read(tmp_path / "one.st")[0].items())
    code, found, sizes, _ = run("three.st", "--tile-size", "256")
    assert (code, found["a"]) == (0, (256, 512))
    assert "tile size 256, and 512 is stated, in 1 file: a" in sizes


def test_a_tile_size_that_is_no_size(weights, tmp_path, capsys):
    slide = write(tmp_path / "a.npz", *tiles(9), attributes={"patch_size_level0": -5})
    for given in ([], ["--tile-size", "file:256"]):
        assert embed(weights, tmp_path / "out.st", slide, *given) == 1
        error = unwrapped(capsys.readouterr().err)
        assert "states patch_size_level0=array(-5), which is no positive number of pixels: correct the file" in error
        assert "file:256" not in error
    assert embed(weights, tmp_path / "out.st", slide, "--tile-size", "256") == 0
    assert "tile size 256, and array(-5) is stated, in 1 file: a" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "layer"), [("float32", "last"), ("float64", "all")])
def test_a_table(dtype, layer, weights, slides, tmp_path, capsys):
    """It has the same numbers to the bit, goes on as the file of tensors does, and is written over nobody's file."""
    slides[0] = slides[0].rename(slides[0].with_name('a, "1".h5'))
    out, table = tmp_path / "out.safetensors", tmp_path / "new" / "out.csv"
    for given in (slides[:1], slides, slides[:2]):
        assert embed(weights, out, *given, "--csv", table, "--dtype", dtype, "--layer", layer) == 0
    assert f"{table}: a table of 3 slides\n" in capsys.readouterr().out
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    tensors, metadata = read(out)
    assert [row["slide"] for row in rows] == [
        name for name in sorted(tensors) for _ in range(3 if layer == "all" else 1)
    ]
    assert {row["embedding"] for row in rows} == {metadata["embedding"]}
    assert [row["layer"] for row in rows[:3]] == (["0", "1", "2"] if layer == "all" else ["last"] * 3)
    assert {(row["slide"], row["num_tiles"], row["tile_size"], row["stated_tile_size"]) for row in rows} == {
        (name, str(length), "256.0", "") for name, length in zip(sorted(tensors), LENGTHS.values(), strict=True)
    }
    for name, tensor in tensors.items():
        found = [[float(row[f"e{i}"]) for i in range(32)] for row in rows if row["slide"] == name]
        assert torch.equal(torch.tensor(found, dtype=tensor.dtype).reshape(tensor.shape), tensor)


def test_a_table_that_somebody_else_made_stays(weights, slides, tmp_path, capsys):
    out, table = tmp_path / "out.safetensors", tmp_path / "out.csv"
    table.write_text("mine")
    assert embed(weights, out, slides[0], "--csv", table) == 2
    assert f"out.csv was not made by `rda embed --out {out}`, and nothing is written over it" in unwrapped(
        capsys.readouterr().err
    )
    assert (table.read_text(), out.exists()) == ("mine", False)
    table.unlink()
    assert embed(weights, out, slides[0], "--csv", table) == 0
    changed = table.read_bytes() + b"mine\n"
    table.write_bytes(changed)
    assert embed(weights, out, *slides, "--csv", table) == 2
    assert table.read_bytes() == changed
    for name, given in {"x.CSV": [], "x": ["--csv", tmp_path / "x"]}.items():
        assert embed(weights, tmp_path / name, slides[0], *given) == 2
        assert "would hold safetensors: name it so, and write a table with --csv FILE" in unwrapped(
            capsys.readouterr().err
        )


def test_the_page_reads_the_file(weights, slides, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert embed(weights, "slides.safetensors", *slides) == 0
    capsys.readouterr()
    exec(block("docs/gigapath.md", "reading the file"), {})
    embedding, *lines = capsys.readouterr().out.splitlines()
    assert embedding == read("slides.safetensors")[1]["embedding"]
    assert lines == [f"{name}: {length} tiles, (32,)" for name, length in LENGTHS.items()]


def test_the_page_makes_anndata_of_the_table(weights, slides, tmp_path, monkeypatch):
    [example] = [found.text for found in blocks("docs/gigapath.md") if found.text.startswith("import anndata\n")]
    compile(example, "gigapath.md", "exec")
    pytest.importorskip("anndata", reason="anndata is not installed")
    monkeypatch.chdir(tmp_path)
    assert embed(weights, "slides.safetensors", *slides, "--csv", "slides.csv") == 0
    exec(example, names := {})
    tensors = read("slides.safetensors")[0]
    assert list(names["slides"].obs_names) == sorted(tensors)
    assert list(names["slides"].obs["num_tiles"]) == list(LENGTHS.values())
    assert torch.equal(torch.tensor(names["slides"].X), torch.stack([tensors[name] for name in sorted(tensors)]))
    write(Path("NA.npz"), *tiles(9))
    Path("slides.csv").unlink()
    assert embed(weights, "all.safetensors", "NA.npz", slides[0], "--csv", "slides.csv", "--layer", "all") == 0
    exec(example, names := {})
    assert list(names["slides"].obs_names) == [f"{name}, layer {i}" for name in ("NA", "a") for i in range(3)]
    assert list(names["slides"].obs["layer"]) == [0, 1, 2] * 2
    names["slides"].write_h5ad("slides.h5ad")


def test_refusals_fit_a_terminal(weights, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("a.npz"), *tiles(9), attributes={"patch_size_level0": 512})
    features, coords = tiles(9)
    write(Path("007.npz"), features.index_fill(0, torch.tensor(3), torch.nan), coords)
    assert embed(weights, "out.st", "a.npz", "007.npz") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 80
    assert "rda embed: 007.npz: features that are not finite: tile 3" in lines
    assert embed(weights, "out.st", "a.npz", "--batch", 2, "--ranks", 2, "--layer", "9" * 9) == 2
    assert max(map(len, capsys.readouterr().err.splitlines())) <= 80
