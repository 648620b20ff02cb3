"""The file that `rda embed` writes: going on with it, and what is not mixed in it."""

import json
import os
from unittest import mock

import pytest
import torch
from embed_cases import LENGTHS, embed, make_slides, make_weights, read, tiles, write
from safetensors.torch import save_file

from ring_dilated_attention.commands.embed import embedder, embeddings
from ring_dilated_attention.commands.embed.embeddings import EmbeddingFile, Entry, Keys, fingerprint
from ring_dilated_attention.commands.local_ranks import RankFailedError
from ring_dilated_attention.models import LongNetViT


@pytest.fixture
def weights(tmp_path):
    return make_weights(tmp_path)


@pytest.fixture
def slides(tmp_path):
    return make_slides(tmp_path)


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
        take(embedder.Result("a", Entry(fingerprint(slides[0], Keys()), 40, 256.0), [1.0]))
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
        assert embed(weights, out, other) == 1
        assert f"{other}: the slide 'a' is in" in capsys.readouterr().err
    assert other.stat().st_size == slides[0].stat().st_size
    assert embed(weights, out, slides[0], "--keys", "features", "coords") == 1
    assert "or from other arrays in it: rename" in capsys.readouterr().err
    save_file({"a": torch.ones(2)}, tmp_path / "mine.safetensors")
    assert embed(weights, tmp_path / "mine.safetensors", slides[0]) == 2
    assert "`rda embed` did not make it" in capsys.readouterr().err
    (tmp_path / "text").write_text("mine")
    assert embed(weights, tmp_path / "text", slides[0]) == 2
    assert "is there and cannot be read" in capsys.readouterr().err
    assert (tmp_path / "text").read_text() == "mine"
    for wrong in ("[1]", "3", "{"):
        metadata = {"made_by": "rda embed", "settings": wrong, "slides": "{}"}
        save_file({"a": torch.ones(2)}, tmp_path / "wrong.safetensors", metadata=metadata)
        assert embed(weights, tmp_path / "wrong.safetensors", slides[0]) == 2
        assert "what it says of itself cannot be read. Choose another name." in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    assert embed(weights, tmp_path / "pipe", slides[0]) == 2
    assert "pipe is there, and is no regular file. Choose another name." in capsys.readouterr().err
    assert out.read_bytes() == before
    assert not list(tmp_path.glob("*unfinished*"))


def test_no_file_is_named_that_was_not_written(weights, slides, tmp_path, capsys):
    features, coords = tiles(9)
    bad = write(tmp_path / "bad.pt", features, coords - 20_000)
    assert embed(weights, tmp_path / "out.st", bad) == 1
    assert capsys.readouterr().out.startswith("0 slides embedded; no file was written: the mean over")
    assert embed(weights, tmp_path / "out.st", bad, "--json") == 1
    assert json.loads(capsys.readouterr().out)["out"] is None
    assert embed(weights, tmp_path / "out.st", bad, slides[0], "--json") == 1
    assert json.loads(capsys.readouterr().out)["out"] == str(tmp_path / "out.st")


def test_a_link_is_written_to_where_it_leads(weights, slides, tmp_path, capsys):
    link, place = tmp_path / "link.st", tmp_path / "elsewhere" / "out.st"
    link.symlink_to(place)
    for slide in slides[:2]:
        assert embed(weights, link, slide) == 0
        assert link.is_symlink()
    assert f"1 slides embedded; {link}: " in capsys.readouterr().out
    assert read(place)[0].keys() == {"a", "b"}
    loop = tmp_path / "loop.st"
    loop.symlink_to(loop)
    assert embed(weights, loop, slides[0]) == 2
    assert "Too many levels of symbolic links" in capsys.readouterr().err


def test_a_slide_that_changed_stops_no_other(weights, slides, tmp_path, capsys):
    """It is named and keeps the embedding that is there; new ones are added."""
    out = tmp_path / "out.safetensors"
    assert embed(weights, out, *slides[:2]) == 0
    before = read(out)[0]
    write(slides[0], *tiles(41, 3))
    capsys.readouterr()
    assert embed(weights, out, *slides) == 1
    output = capsys.readouterr()
    assert f"rda embed: {slides[0]}: the slide 'a' is in {out} already, made from another file" in output.err
    assert output.out.startswith("1 slides embedded, 1 were there already")
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
    assert "1 slides embedded, 1 were there already" in capsys.readouterr().out
    assert embed(weights, out, slides[1], "--tile-size", "255") == 2
    assert "made with tile_size=256.0, not 255.0" in capsys.readouterr().err


def test_a_disk_that_is_full_is_a_sentence(weights, slides, tmp_path, capsys):
    """safetensors has errors of its own, which are no OSError."""
    from safetensors import SafetensorError

    full = SafetensorError("I/O error: No space left on device (os error 28)")
    with mock.patch("safetensors.torch.save_file", side_effect=full):
        assert embed(weights, tmp_path / "out.safetensors", slides[2]) == 2
    assert "out.safetensors cannot be written: I/O error: No space left" in capsys.readouterr().err
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
