"""The README's examples run as they are written, and its links and commands exist."""

import json
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT
from pages import block

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.commands.cli import SUBCOMMANDS

README = (ROOT / "README.md").read_text()
ONE_DEVICE, MANY = block("README.md", "one device"), block("README.md", "ring.py")
LOOP, PACKED = block("README.md", "loop.py"), block("README.md", "packed.py")
SIMULATED, RUN = block("README.md", "simulated ranks"), block("README.md", "of a run")
CACHED = block("docs/generation.md", "a cache")


def test_the_example_for_one_device():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ONE_DEVICE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([1, 4096, 8, 64]) torch.Size([1, 4096, 8, 64])\n"


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (MANY, [f"rank {rank}: (1, 2048, 8, 64), (1, 2048, 8, 64)" for rank in range(2)]),
        (LOOP, ["rank 0: 2050 of 4099 tokens, loss 2.", "rank 1: 2049 of 4099 tokens, loss 2."]),
        (
            PACKED,
            [
                "rank 0: rows at 0 to 3095, in all (1, 4096, 8, 64)",
                "rank 1: rows at 24 to 2071, in all (1, 4096, 8, 64)",
            ],
        ),
    ],
    ids=["ring.py", "loop.py", "packed.py"],
)
def test_the_examples_for_many(example, expected, tmp_path):
    """As written, under torchrun with the README's number of processes."""
    [num_ranks] = re.findall(r"torchrun --nproc-per-node (\d+) ring\.py", README)
    (tmp_path / "ring.py").write_text(example)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    done = subprocess.run(
        [*torchrun, "ring.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    # torchrun's Python writes a line's end on its own: another rank's line may stand before it.
    lines = sorted(re.findall(r"rank \d.*?(?=rank \d|\n)", done.stdout))
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


def test_the_page_to_start_from_has_the_same_ring():
    assert block("docs/start.md", "ring.py") == MANY
    printed = [f"rank {rank}: (1, 2048, 8, 64), (1, 2048, 8, 64)" for rank in range(2)]
    assert block("docs/start.md", "ring.py prints").splitlines() == printed


def test_the_example_of_simulated_ranks():
    """It prints what it holds and sends for each rank, and nobody sends nothing."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SIMULATED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"rank {rank} of 4" for rank in range(4)]
    assert all(re.search(r": held [\d,]{9,} bytes at most, sent [\d,]{9,}$", line) for line in lines)


def test_the_example_of_a_cache():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CACHED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "tensor([10003]) 2048 rows per head\n"


def test_the_example_of_explain(capsys):
    """docs/planning.md shows what it prints."""
    from ring_dilated_attention.ranks.explain import Explanation

    page = (ROOT / "docs" / "planning.md").read_text().partition("## What a call uses: `explain`")[2]
    example, output = re.findall(r"```(?:python)?\n(.*?)```", page, flags=re.DOTALL)[:2]
    exec(example, {})
    assert capsys.readouterr().out == output
    [fields] = re.findall(r"`\.(\w+)`, `\.(\w+)` and `\.(\w+)` are\s+its fields", page)
    assert fields == tuple(Explanation.__dataclass_fields__)
    assert "branch 0" in DilatedPattern((64,), (4,)).explain(num_heads=8)


def test_the_patterns_of_the_table():
    """Each row makes a pattern; the rule's row says what the rule makes."""
    found = re.findall(r"^\| `(DilatedPattern.*?)` \|", README, flags=re.MULTILINE)
    experiments, longnet, dense = (eval(x, {"DilatedPattern": DilatedPattern, "max_len": 16384}) for x in found)
    assert len(experiments.branches) == 5
    assert longnet.branches == ((2048, 1), (4096, 2), (8192, 4), (16384, 8))
    assert dense == DilatedPattern.dense()


def test_names_of_the_text_are_the_packages():
    """Catches a function that the text names and that `from ring_dilated_attention import` does not find."""
    import ring_dilated_attention

    for name in ("save_attention", "MultiheadDilatedAttention", "DilatedCache"):
        assert name in README
        assert name in ring_dilated_attention.__all__
    assert {"shard", "unshard", "positions"} <= set(dir(ring_dilated_attention.ContextParallel))


def test_examples_are_short():
    """Ten lines, not counting imports and the message at the end."""
    for example in (ONE_DEVICE, MANY, PACKED, SIMULATED, CACHED, RUN):
        lines = [line for line in example.splitlines() if line and not line.startswith(("import", "from", "print"))]
        assert len(lines) <= 10


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", README))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_commands_exist():
    assert set(re.findall(r"`rda ([\w ]+)`", README)) == set(SUBCOMMANDS)
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_figures_are_those_of_the_records():
    """Catches a benchmark that is run anew, and a README that goes on with what it said before."""

    def record(case):
        return json.loads((ROOT / f"benchmarks/results/{case}.json").read_text())["rows"]

    def span(values, places=1):
        return f"{min(values):.{places}f} to {max(values):.{places}f}"

    crossed = {n: [x["speed_up"] for x in record("crossover") if x["seq_len"] == n] for n in (1024, 2048, 4096, 16384)}
    slower = [1 / x for n in (1024, 2048) for x in crossed[n]]
    text = " ".join(README.split())
    assert f"up to 2,048 positions (by {span(slower)} times), and slower from 4,096 on: {span(crossed[4096])}" in text
    assert f"{span(crossed[16384])} times at 16,384" in text


def test_files_to_read_exist():
    package = ROOT / "src" / "ring_dilated_attention"
    order = README.partition("## Read the code in this order")[2]
    names = re.findall(r"`([\w/]+\.py)`", order)
    assert len(names) > 5
    assert all((package / name).exists() for name in names)


def test_the_pictures_are_those_of_the_code(tmp_path):
    """docs/*.png is what `readme_pictures.py` makes: the same size, almost all pixels."""
    import numpy as np
    from matplotlib.image import imread
    from readme_pictures import draw_readme

    for made in draw_readme(tmp_path):
        kept = imread(ROOT / "docs" / made.name)
        assert kept.shape == imread(made).shape
        assert np.abs(kept - imread(made)).mean() < 0.01  # fonts may differ between machines
