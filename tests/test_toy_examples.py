"""Examples at a toy size, in this process or on two ranks: they print what they should.

Those of models and trainers run in tests/integrations/test_examples.py. `make examples` runs all at their size.
"""

import contextlib
import io
import re
import runpy
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from distributed import LIKE_NCCL, over_gloo, run
from helpers import ROOT, TEXT, TINY
from matplotlib.image import imread
from safetensors.torch import load_file

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands import cli

EXAMPLES = ROOT / "examples"


def output_of(name, *arguments):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(map(str, arguments)))
    return printed.getvalue()


def numbers(pattern, text):
    """Those of the one line that has the pattern."""
    [found] = re.findall(pattern, text)
    return [float(x.replace(",", "")) for x in ([found] if isinstance(found, str) else found)]


def test_torchs_encoder_made_long():
    """It learns what only the long branch shows it."""
    printed = output_of("encoder", "--seq-len", 512, "--steps", 40)
    assert numbers(r"at most (\S+)", printed)[0] < 1e-5
    assert numbers(r": right at ([\d.]+)%", printed)[0] > 99
    assert numbers(r"branch alone: ([\d.]+)%", printed)[0] < 80


# after so few steps
@pytest.mark.filterwarnings("ignore:the influences are:UserWarning")
def test_windows_of_signals_are_labelled(tmp_path):
    """By a burst that only the wide branch shows; the picture is written, and the burst is what mattered."""
    picture = tmp_path / "made.png"
    sizes = "--samples 4096 --steps 60 --batch 8 --picture"
    printed = output_of("signals", *sizes.split(), picture)
    assert numbers(r"both branches: ([\d.]+)% of windows", printed)[0] > 90
    assert numbers(r"window alone: ([\d.]+)%", printed)[0] < 70
    share, part = numbers(r"influence: (\d+)% .* are ([\d.]+)%", printed)
    assert share > 3 * part
    assert imread(picture).std() > 0.1


def test_a_rank_of_a_billion_positions():
    """At a short length; some rows see keys of other ranks."""
    printed = output_of("billion", "--seq-len", 4096, "--ranks", 16, "--rank", 9)
    assert numbers(r"keys of (\d+) ranks", printed)[0] > 5
    assert numbers(r"error of out: (\S+)", printed)[0] < 2e-6
    assert numbers(r"query's gradient: (\S+)", printed)[0] < 2e-6


def test_a_chromosome(tmp_path):
    """It has no file here; one that it is given is read in both cases of letters, and without what is no base."""
    file, example = tmp_path / "genome.fa", runpy.run_path(str(EXAMPLES / "chromosome.py"))
    file.write_text(">one first\nACGTNacgt\nTTT\n\n>two\nRRAC\n")
    genome = example["read_fasta"](file)
    read = {name: "".join("ACGTN"[i] for i in bases) for name, bases in genome.items()}
    assert read == {"one": "ACGTNACGTTTT", "two": "NNAC"}
    complement = example["reverse_complement"](genome["one"]).tolist()
    assert complement == ["ACGTN".index(x) for x in "AAAACGTNACGT"]
    with pytest.raises(SystemExit, match="2"):  # no such chromosome
        output_of("chromosome", "--fasta", file, "--held-out", "three", "--seq-len", 6)
    sizes = "--bases 1000 --seq-len 256 --embed-dim 16 --steps 30"
    printed = output_of("chromosome", *sizes.split())
    said = r"chr3: ([\d.]+) bits.* strand ([\d.]+)\n.* first base ([\d.]+)"
    forward, reverse, least = numbers(said, printed)
    assert least < forward < 2.2
    assert least < reverse < 2.2


def test_a_code_base(tmp_path):
    for i in range(11):
        (tmp_path / f"{i:02}.py").write_text(f"def function_{i}():\n    return {i}\n" * (i + 1))
    (tmp_path / "folder.py").mkdir()
    sizes = "--seq-len 256 --embed-dim 32 --steps 60"
    printed = output_of("code_base", "--folder", tmp_path, *sizes.split())
    packed, alone = numbers(r"packed ([\d.]+), one by one ([\d.]+)", printed)
    assert packed == pytest.approx(alone, abs=2e-5)
    reached, without = numbers(r"files: ([\d.]+) bits per byte; ([\d.]+) by", printed)
    assert reached < without
    assert "\ndef " in printed


def planned_here(command, **_):
    """In place of a process of `rda plan model`."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(command[3:]) == 0
    return SimpleNamespace(stdout=printed.getvalue())


@mock.patch("subprocess.run", planned_here)
def test_video_tokens():
    printed = output_of("video", "--frames", 20, "--patches", 16, "--embed-dim", 16)
    assert numbers(r"planned for ([\d,]+) tokens: ([\d.]+) GB", printed)[0] == 320
    loss, guess = numbers(r"loss ([\d.]+); a guess has ln 1024 = ([\d.]+)", printed)
    assert loss == pytest.approx(guess, abs=0.5)


def test_a_slide(tmp_path, monkeypatch, capsys):
    """It writes two files, and none over one that is there."""
    script, files = str(EXAMPLES / "slide.py"), {"slide.npz", "slide.png"}
    monkeypatch.setattr(sys, "argv", [script, "--folder", str(tmp_path)])
    runpy.run_path(script, run_name="__main__")
    assert "1,145 tiles, embedding (1, 64)" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == files
    for name in files:
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / name).write_text("mine")
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(script, run_name="__main__")
        assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
        said = f"{name} is there already: move it away, or choose another --folder"
        assert said in capsys.readouterr().err


def on_a_rank(rank, world_size, function, *args):
    torch.set_num_threads(1)
    with over_gloo():
        return function(*args)


def on_two_ranks(function, *args):
    return run(2, on_a_rank, function, *args, backend=LIKE_NCCL)


def test_serving_on_two_ranks_writes_what_one_writes():
    sizes = ("--prompt-len", 701, "--new-tokens", 12)
    written, silent = on_two_ranks(output_of, "serve", *sizes)
    assert "2 ranks computed a prompt of 701 tokens" in written
    assert "12 of 12 tokens are those of rank 0 alone" in written
    assert silent == ""


def test_slides_are_fine_tuned_on_two_ranks_as_in_one_process(tmp_path):
    out, words = tmp_path / "tuned.safetensors", ("--slides", 6, "--epochs", 1, "--out")
    written, silent = on_two_ranks(output_of, "finetune_slides", *words, out)
    assert silent == ""
    trained = load_file(out)
    assert "head.weight" in trained
    assert all(name.startswith(("head.", "encoder.encoder.layers.1.")) for name in trained)
    alone = output_of("finetune_slides", *words, tmp_path / "alone.safetensors")
    shared, expected = (
        [float(x) for x in re.findall(r"held-out loss ([\d.]+)", said)] for said in (written, alone)
    )
    before, after = shared
    assert after < before - 0.02
    assert shared == pytest.approx(expected, abs=2e-4)


LONGER = runpy.run_path(str(EXAMPLES / "longer.py"))


def measured_here(folder):
    return LONGER["measure"](folder, [64, 128], ContextParallel())


def test_longer_sequences(tmp_path):
    """Of a tiny run, on one rank and on two: every length has its row, and the picture is drawn."""
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_bytes(TEXT)
    options = [*TINY.split(), "--steps", "1", "--data", str(text), "--run-folder", str(folder)]
    assert cli.main(["train", *options]) == 0
    main, words = LONGER["main"], ["--trained", str(folder), "--lengths", "64", "128"]
    shared, _ = on_two_ranks(measured_here, folder)
    with (
        mock.patch.dict(main.__globals__, measured_by_two=lambda *_: shared),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        main(words)
    assert re.findall(r"^ +(\d+) .* \((\w+)\)$", printed.getvalue(), re.MULTILINE) == [
        ("64", "measured"),
        ("128", "computed"),
    ]
    assert imread(folder / "longer.png").std() > 0.1
    # 3 n + 2 n^2
    dense = LONGER["dense_seconds"]([(10, 230.0), (20, 860.0)], [10, 100])
    assert dense == pytest.approx([230, 20_300])
