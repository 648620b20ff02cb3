"""docs/porting.md: the loop on many ranks has the losses of the loop on one device, and its other programs run."""

import contextlib
import io
import os
import re
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run
from pages import block

MODEL, BEFORE = block("docs/porting.md", "model.py"), block("docs/porting.md", "before.py")
AFTER, PREFERENCE = block("docs/porting.md", "after.py"), block("docs/porting.md", "preference.py")
ALREADY_CUT, FLEX = block("docs/porting.md", "already_cut.py"), block("docs/porting.md", "flex")


def rank_prints(rank, world_size, program, folder, replicas=1):
    """What the program prints on this rank, where `model.py` and checkpoints lie in the folder."""
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["REPLICAS"] = str(replicas)
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(dist, "init_process_group"),
    ):
        exec(program, {})
    return printed.getvalue()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


@pytest.fixture
def expected(folder):
    """The losses of one device: those of four steps, and that of held-out sequences."""
    [printed] = run(1, rank_prints, BEFORE, folder)
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d{4})\n", printed)]
    assert len(losses) == 5
    assert losses[0] - losses[3] > 1  # it learns, so that a wrong gradient is seen in the next loss
    return losses


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (2, 2), (4, 2)])
def test_the_losses_are_those_of_one_device(world_size, replicas, folder, expected):
    """Catches whatever the page forgets, with shards and with replicas of unequal counts; two steps, then two more on
    another number of ranks from the checkpoint."""
    first = run(world_size, rank_prints, AFTER, folder, replicas)
    then = run(world_size - 1, rank_prints, AFTER, folder)
    assert not any(first[1:] + then[1:])
    lines = (first[0] + then[0]).splitlines()
    names = [line.partition(":")[0] for line in lines]
    assert names == ["step 0", "step 1", "held out", "step 2", "step 3", "held out"]
    losses = [float(line.split()[-1]) for line in lines]
    assert losses[:2] + losses[3:] == pytest.approx(expected, abs=2e-4)


def test_a_preference_is_that_of_one_device(folder):
    """Value and gradient, from log-probabilities that are gathered from the ranks."""
    alone, shared = run(1, rank_prints, PREFERENCE, folder), run(3, rank_prints, PREFERENCE, folder)
    numbers = [re.sub(r"^rank \d: ", "", line) for line in alone + shared]
    assert re.fullmatch(r"loss 0\.\d{4}, norm of the gradient [1-9]\.\d{4}\n", numbers[0])
    assert len(set(numbers)) == 1


def test_batches_that_are_cut_already(folder):
    assert run(2, rank_prints, ALREADY_CUT, folder) == [
        "rank 0: (1, 21, 4, 16), positions 0 to 20\n",
        "rank 1: (1, 20, 4, 16), positions 21 to 40\n",
    ]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_documents_are_those_of_flex_attention(capsys):
    exec(FLEX, {})
    assert capsys.readouterr().out == "True\n"
