"""docs/gigapath.md and examples/slide.py: what they say and show is so."""

import inspect
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from distributed import run
from helpers import ROOT
from pages import block

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.models import (
    LongNetViT,
    load_slide_encoder,
    segment_lengths_for,
    torchscale_attention,
)
from ring_dilated_attention.models.longnet_vit import DILATION_RATES
from ring_dilated_attention.models.torchscale.zero_rows import is_misaligned
from ring_dilated_attention.pattern import Branch


@pytest.mark.parametrize("max_wsi_size", [262_144, 250_000])
def test_the_page_says_from_where_on_rows_are_misplaced(max_wsi_size):
    """A number of tiles; with the class token there is one token more."""
    page = (ROOT / "docs" / "gigapath.md").read_text()
    [line] = [line for line in page.splitlines() if line.startswith("| long slides |")]
    for segment_length, rate in zip(segment_lengths_for(max_wsi_size), DILATION_RATES, strict=True):
        branch = Branch(segment_length, rate)
        is_misplaced = is_misaligned(branch, segment_length + 1)
        assert is_misplaced == (f"{segment_length:,}" in line)
        assert not is_misaligned(branch, segment_length)


def test_the_page_for_gigapaths_users(tmp_path, monkeypatch):
    """Its five lines run as they stand, with the smaller size in place of the larger."""
    page, lines = (
        (ROOT / "docs" / "gigapath.md").read_text(),
        block("docs/gigapath.md", "for users of GigaPath"),
    )
    monkeypatch.chdir(tmp_path)
    torch.save({"model": LongNetViT.published("gigapath-flash").state_dict()}, "slide_encoder.pth")
    names = {"features": torch.randn(1, 20, 384), "coords": torch.arange(40).view(1, 20, 2) * 256}
    assert '"gigapath"' in lines
    exec(lines.replace('"gigapath"', '"gigapath-flash"'), names)
    assert names["embedding"].shape == (1, 384)
    assert load_slide_encoder("slide_encoder.pth").encoder.config.num_heads == 16
    for link in re.findall(r"\]\(([^)#:]+?)\)", page):
        assert (ROOT / "docs" / link).exists()


def test_the_function_alone():
    """Its snippet runs as it stands, and its arguments differ from dilated_attention's as the page says."""
    page = (ROOT / "docs" / "gigapath.md").read_text()
    lines = block("docs/gigapath.md", "the function alone")
    names = {}
    exec(lines, names)
    assert names["out"].shape == (1, 1100, 16, 48)
    theirs, ours = (
        set(inspect.signature(f).parameters) for f in (torchscale_attention, dilated_attention)
    )
    assert theirs - ours == {"counted"}
    assert ours - theirs == {
        "cu_seqlens",
        "heads_held",
        "num_heads",
        "cache",
        "lengths",
        "sinks",
    }
    [said] = re.findall(r"^Its other arguments are.*?\n\n", page, flags=re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", said)) == {"dilated_attention"} | theirs ^ ours


def test_the_page_says_how_far_the_two_functions_are_apart():
    """On the page's input; and nothing where it says that they are one function."""
    page = (ROOT / "docs" / "gigapath.md").read_text()
    [counts] = re.findall(r"^\| tiles \| (.*) \|$", page, flags=re.MULTILINE)
    [shares] = re.findall(
        r"^\| `dilated_attention` from `torchscale_attention` \| (.*) \|$", page, flags=re.MULTILINE
    )
    for tiles, share in zip(counts.split(" | "), shares.split(" | "), strict=True):
        found = apart(int(tiles.replace(",", "")), 16, 48, segment_lengths_for(), DILATION_RATES)
        assert f"{100 * found:.{len(share.removesuffix(' %').partition('.')[2])}f} %" == share
    assert apart(130, 4, 16, (16, 64), (1, 4), is_causal=True) < 1e-6
    assert apart(192, 4, 16, (16, 64), (1, 4)) < 1e-6
    assert apart(130, 4, 16, (16, 64), (1, 4)) > 0.1


def apart(tiles, num_heads, head_dim, *branches, is_causal=False):
    """Relative L2 of dilated_attention's output from torchscale_attention's."""
    noise, pattern = (
        torch.Generator().manual_seed(0),
        DilatedPattern(*branches, is_causal=is_causal, phase="blocked"),
    )
    inputs = [torch.randn(1, tiles, num_heads, head_dim, generator=noise) for _ in range(3)]
    theirs = torchscale_attention(*inputs, pattern)
    return float((dilated_attention(*inputs, pattern) - theirs).norm() / theirs.norm())


EXAMPLE = str(ROOT / "examples" / "slide.py")


def test_the_example(tmp_path):
    command = [sys.executable, EXAMPLE, "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "1,145 tiles, embedding (1, 64)" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"slide.npz", "slide.png"}


def refusal_of_example(monkeypatch, capsys, *arguments):
    """What it prints before it exits with 2."""
    monkeypatch.setattr(sys, "argv", [EXAMPLE, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(EXAMPLE, run_name="__main__")
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["slide.npz", "slide.png"])
def test_the_example_overwrites_nothing(name, tmp_path, monkeypatch, capsys):
    (tmp_path / name).write_text("mine")
    said = refusal_of_example(monkeypatch, capsys, "--folder", tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    assert f"{name} is there already: move it away, or choose another --folder" in said


@pytest.mark.parametrize(
    ("option", "message"),
    [("--folder", "is no folder: make it first"), ("--weights", "cannot be read as weights: ")],
)
def test_the_example_without_its_files(option, message, tmp_path, monkeypatch, capsys):
    said = refusal_of_example(monkeypatch, capsys, option, tmp_path / "nothing")
    assert message in said
    assert len(said.splitlines()) == 1


EXAMPLE_OF_FINE_TUNING = str(ROOT / "examples" / "finetune_slides.py")


def finetune(rank, world_size):
    example = runpy.run_path(EXAMPLE_OF_FINE_TUNING)
    classifier = example["make_classifier"](ContextParallel())
    before = {name: x.detach().clone() for name, x in classifier.named_parameters()}
    [_, (loss, _)] = example["finetune"](classifier, num_epochs=1, num_slides=3)
    # As arrays: a tensor of a process that has ended cannot be received.
    return loss, {
        name: x.numpy()
        for name, x in classifier.state_dict().items()
        if not torch.equal(x, before[name])
    }


def test_fine_tuning_on_ranks_is_that_of_one():
    """Nothing but the head and the last layer is trained, and another classifier takes what was."""
    loss, trained = finetune(0, 1)
    for shared_loss, shared in run(2, finetune):
        assert shared_loss == pytest.approx(loss, abs=1e-5)
        assert shared.keys() == trained.keys()
        for name, x in shared.items():
            np.testing.assert_allclose(x, trained[name], rtol=1e-4, atol=1e-4)
    assert {"head.weight", "head.bias", "encoder.encoder.layers.1.ffn.fc1.weight"} < trained.keys()
    assert all(name.startswith(("head.", "encoder.encoder.layers.1.")) for name in trained)
    classifier = runpy.run_path(EXAMPLE_OF_FINE_TUNING)["make_classifier"](ContextParallel())
    saved = {name: torch.tensor(x) for name, x in trained.items()}
    assert not classifier.load_state_dict(saved, strict=False).unexpected_keys
    assert all(torch.equal(x, classifier.state_dict()[name]) for name, x in saved.items())
