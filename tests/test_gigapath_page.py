"""docs/gigapath.md and examples/slide.py: what they say and show is so."""

import runpy
import subprocess
import sys

import pytest
import torch
from helpers import ROOT
from pages import block

from ring_dilated_attention.models import LongNetViT, load_slide_encoder


def test_the_page_for_gigapaths_users(tmp_path, monkeypatch):
    """Its five lines run as they stand, with the smaller size in place of the larger."""
    lines = block("docs/gigapath.md", "for users of GigaPath")
    monkeypatch.chdir(tmp_path)
    torch.save({"model": LongNetViT.published("gigapath-flash").state_dict()}, "slide_encoder.pth")
    names = {"features": torch.randn(1, 20, 384), "coords": torch.arange(40).view(1, 20, 2) * 256}
    assert '"gigapath"' in lines
    exec(lines.replace('"gigapath"', '"gigapath-flash"'), names)
    assert names["embedding"].shape == (1, 384)
    assert load_slide_encoder("slide_encoder.pth").encoder.config.num_heads == 16


def test_the_function_alone():
    """Its snippet runs as it stands."""
    names = {}
    exec(block("docs/gigapath.md", "the function alone"), names)
    assert names["out"].shape == (1, 1100, 16, 48)


EXAMPLE = str(ROOT / "examples" / "slide.py")


def test_the_example(tmp_path):
    command = [sys.executable, EXAMPLE, "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "1,145 tiles, embedding (1, 64)" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"slide.npz", "slide.png"}


@pytest.mark.parametrize("name", ["slide.npz", "slide.png"])
def test_the_example_overwrites_nothing(name, tmp_path, monkeypatch, capsys):
    (tmp_path / name).write_text("mine")
    monkeypatch.setattr(sys, "argv", [EXAMPLE, "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(EXAMPLE, run_name="__main__")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    said = f"{name} is there already: move it away, or choose another --folder"
    assert said in capsys.readouterr().err
