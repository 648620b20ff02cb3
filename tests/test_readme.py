"""The README's examples run as they are written, and its links and commands exist."""

import contextlib
import io
import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run
from helpers import ROOT
from pages import block

README = (ROOT / "README.md").read_text()
ONE_DEVICE, MANY = block("README.md", "one device"), block("README.md", "ring.py")
LOOP, PACKED = block("docs/many_devices.md", "loop.py"), block("docs/many_devices.md", "packed.py")
CACHED = block("docs/generation.md", "a cache")


def test_the_example_for_one_device():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ONE_DEVICE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([1, 4096, 8, 64]) torch.Size([1, 4096, 8, 64])\n"


def test_the_example_for_many(tmp_path):
    """As written, under torchrun with the README's number of processes; the page to start from has the same."""
    [num_ranks] = re.findall(r"torchrun --nproc-per-node (\d+) ring\.py", README)
    assert block("docs/start.md", "ring.py") == MANY
    (tmp_path / "ring.py").write_text(MANY)
    words = f"-m torch.distributed.run --standalone --nproc-per-node {num_ranks} ring.py"
    done = subprocess.run(
        [sys.executable, *words.split()],
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
    assert lines == block("docs/start.md", "ring.py prints").splitlines()


def rank_prints(rank, world_size, example):
    torch.set_num_threads(1)
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(dist, "init_process_group"),
    ):
        exec(example, {})
    return printed.getvalue()


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (LOOP, ["rank 0: 2050 of 4099 tokens, loss 2.", "rank 1: 2049 of 4099 tokens, loss 2."]),
        (
            PACKED,
            [
                "rank 0: rows at 0 to 3095 of (1, 4096, 8, 64)",
                "rank 1: rows at 24 to 2071 of (1, 4096, 8, 64)",
            ],
        ),
    ],
    ids=["loop.py", "packed.py"],
)
def test_more_examples_for_many(example, expected):
    """As written, on two ranks that have met."""
    for printed, start in zip(run(2, rank_prints, example), expected, strict=True):
        assert printed.startswith(start)
        assert printed.count("\n") == 1


@pytest.mark.filterwarnings("error")
def test_the_example_of_a_cache(capsys):
    exec(CACHED, {})
    assert capsys.readouterr().out == "tensor([10003]) 2048 rows per head\n"
