"""Examples at a toy size, in this process or on two ranks: they print what they should.

slide.py runs in tests/test_gigapath_page.py, and those of models and trainers in tests/integrations/test_examples.py.
`make examples` runs all at their size.
"""

import contextlib
import io
import re
import runpy

import pytest
import torch
from distributed import LIKE_NCCL, over_gloo, run
from helpers import ROOT, TEXT, TINY
from matplotlib.image import imread
from pages import text_of
from safetensors.torch import load_file

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands import cli

EXAMPLES = ROOT / "examples"
README = text_of("examples/README.md")
MAKEFILE = (ROOT / "Makefile").read_text()


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


FASTA = ">one first\nACGTNacgt\nTTT\n\n>two\nRRAC\n"


def test_a_chromosome(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "chromosome.py"))
    (tmp_path / "genome.fa").write_text(FASTA)
    genome = example["read_fasta"](tmp_path / "genome.fa")
    assert {name: "".join("ACGTN"[i] for i in bases) for name, bases in genome.items()} == {
        "one": "ACGTNACGTTTT",
        "two": "NNAC",
    }
    assert example["reverse_complement"](genome["one"]).tolist() == [
        "ACGTN".index(x) for x in "AAAACGTNACGT"
    ]
    drawn = example["windows"]([genome["one"], genome["two"]], 50, 5)
    assert {x for row in drawn for x in row.tolist()} == {0, 1, 2, 3, 4}
    sizes = "--bases 1000 --seq-len 256 --embed-dim 16 --steps 30"
    printed = output_of("chromosome", *sizes.split())
    forward, reverse, least = numbers(
        r"chr3: ([\d.]+) bits.* strand ([\d.]+)\n.* first base ([\d.]+)", printed
    )
    assert least < forward < 2.2
    assert least < reverse < 2.2


@pytest.mark.parametrize(
    ("genome", "said"),
    [
        (FASTA, "--held-out three: give one of ['one', 'two'] with two known bases, beside others"),
        # each is the first of a window
        (FASTA + ">three\nANNNNNC\n", "with two known bases"),
        (FASTA + ">two again\nAC\n", "needs a name of its own, and one begins with '>two again'"),
        (None, "No such file"),
    ],
)
def test_what_is_no_genome_is_refused(tmp_path, capsys, genome, said):
    """In a sentence, before anything is trained."""
    file = tmp_path / "genome.fa"
    if genome is not None:
        file.write_text(genome)
    with pytest.raises(SystemExit) as left:
        output_of("chromosome", "--fasta", file, *["--held-out", "three", "--seq-len", "6"])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


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


def test_packing_loses_no_byte():
    pack = runpy.run_path(str(EXAMPLES / "code_base.py"))["pack"]
    documents = [bytes([i]) * length for i, length in enumerate((3, 20, 1, 8, 9, 2), start=1)]
    sequences = pack(documents, 10)
    assert b"".join(bytes(tokens[0].tolist()) for tokens, _ in sequences) == b"".join(documents)
    for tokens, borders in sequences:
        assert tokens.shape[1] == borders[-1] <= 10
        assert all(len(set(one.tolist())) == 1 for one in tokens[0].split(borders.diff().tolist()))


def test_video_tokens():
    printed = output_of("video", "--frames", 20, "--patches", 16, "--embed-dim", 16)
    assert numbers(r"planned for ([\d,]+) tokens: ([\d.]+) GB", printed)[0] == 320
    loss, guess = numbers(r"loss ([\d.]+); a guess has ln 1024 = ([\d.]+)", printed)
    assert loss == pytest.approx(guess, abs=0.5)


def serve(rank, world_size, backend):
    torch.set_num_threads(1)
    with over_gloo() if backend == LIKE_NCCL else contextlib.nullcontext():
        return output_of("serve", "--prompt-len", 701, "--new-tokens", 12)


def test_serving_on_two_ranks_writes_what_one_writes():
    written, silent = run(2, serve, LIKE_NCCL, backend=LIKE_NCCL)
    assert "2 ranks computed a prompt of 701 tokens" in written
    assert "12 of 12 tokens are those of rank 0 alone" in written
    assert silent == ""


def finetune_slides(rank, world_size, out, backend="gloo"):
    torch.set_num_threads(1)
    with over_gloo() if backend == LIKE_NCCL else contextlib.nullcontext():
        return output_of("finetune_slides", "--slides", 6, "--epochs", 1, "--out", out)


def test_slides_are_fine_tuned_on_two_ranks_as_in_one_process(tmp_path):
    out = tmp_path / "finetuned.safetensors"
    written, silent = run(2, finetune_slides, out, LIKE_NCCL, backend=LIKE_NCCL)
    before, after = (float(x) for x in re.findall(r"held-out loss ([\d.]+)", written))
    assert after < before - 0.02
    trained = load_file(out)
    assert "head.weight" in trained
    assert all(name.startswith(("head.", "encoder.encoder.layers.1.")) for name in trained)
    assert silent == ""
    alone = finetune_slides(0, 1, tmp_path / "alone.safetensors")
    assert [float(x) for x in re.findall(r"held-out loss ([\d.]+)", alone)] == pytest.approx(
        [before, after], abs=2e-4
    )


def measured_here(rank, world_size, folder, backend="gloo"):
    example = runpy.run_path(str(EXAMPLES / "longer.py"))
    with over_gloo() if backend == LIKE_NCCL else contextlib.nullcontext():
        return example["measure"](folder, [64, 128], ContextParallel())


def test_longer_sequences(tmp_path):
    """Of a tiny run, on one rank and on two: every length has its row, and the picture is drawn."""
    (tmp_path / "text.txt").write_bytes(TEXT)
    options = [*TINY.split(), "--steps", "1", "--data", str(tmp_path / "text.txt")]
    assert cli.main(["train", *options, "--run-folder", str(tmp_path / "run")]) == 0
    example = runpy.run_path(str(EXAMPLES / "longer.py"))
    alone = example["measure"](tmp_path / "run", [64, 128], None)
    shared = run(2, measured_here, tmp_path / "run")[0]
    without_cpu = run(2, measured_here, tmp_path / "run", LIKE_NCCL, backend=LIKE_NCCL)
    for steps in (alone, shared, *without_cpu):
        assert all(step["seconds"] > 0 for step in steps)
        assert steps[0]["bytes"] <= steps[1]["bytes"]
    dense = example["measure_dense"](tmp_path / "run", (32, 64))
    assert [length for length, _ in dense] == [32, 64]
    # 3 n + 2 n^2
    dense = example["dense_seconds"]([(10, 230.0), (20, 860.0)], [10, 100])
    assert dense == pytest.approx([230, 20_300])
    example["draw"](tmp_path / "longer.png", [64, 128], alone, shared, dense)
    assert imread(tmp_path / "longer.png").std() > 0.1


def test_the_readme_lists_every_example():
    """With the command that runs it, and `make examples` runs it too."""
    files = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert sorted(set(re.findall(r"^\| \[(\w+\.py)\]\(\1\)", README, flags=re.MULTILINE))) == files
    for name in files:
        assert f"examples/{name}" in MAKEFILE
