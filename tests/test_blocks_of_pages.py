"""Examples of pages that need ranks, files or more than their output to be judged: they run as they are written."""

import contextlib
import io
import os
import re
import sys

import distributed
import pytest
import torch
import torch.distributed as dist
from distributed import run
from helpers import ROOT
from pages import block

from ring_dilated_attention.models import LongNetViT, load_slide_encoder

MODEL, BEFORE = block("docs/porting.md", "model.py"), block("docs/porting.md", "before.py")
AFTER, PREFERENCE = block("docs/porting.md", "after.py"), block("docs/porting.md", "preference.py")


def rank_prints(rank, world_size, program, folder, replicas=1):
    """What the program prints on this rank, where `model.py` and checkpoints lie in the folder. It makes its own group,
    with what torchrun tells it."""
    dist.destroy_process_group()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    words = f"REPLICAS={replicas} RANK={rank} WORLD_SIZE={world_size} MASTER_ADDR=127.0.0.1"
    words += f" MASTER_PORT={distributed.store.port}"
    words += " TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=0"
    os.environ |= dict(word.split("=") for word in words.split())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {})
    return printed.getvalue()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("example", "printed"),
    [
        (block("README.md", "one device"), "torch.Size([1, 4096, 8, 64]) " * 2),
        (block("docs/generation.md", "a cache"), "tensor([10003]) 2048 rows per head "),
        (block("docs/porting.md", "flex"), "True "),
    ],
    ids=["README.md", "a cache", "flex"],
)
def test_the_examples_for_one_device(example, printed, capsys):
    exec(example, {})
    assert capsys.readouterr().out.split() == printed.split()


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (
            block("docs/many_devices.md", "loop.py"),
            ["rank 0: 2050 of 4099 tokens, loss 2.", "rank 1: 2049 of 4099 tokens, loss 2."],
        ),
        (
            block("docs/many_devices.md", "packed.py"),
            [
                "rank 0: rows at 0 to 3095 of (1, 4096, 8, 64)",
                "rank 1: rows at 24 to 2071 of (1, 4096, 8, 64)",
            ],
        ),
        (
            block("docs/porting.md", "already_cut.py"),
            [
                "rank 0: (1, 21, 4, 16), positions 0 to 20",
                "rank 1: (1, 20, 4, 16), positions 21 to 40",
            ],
        ),
    ],
    ids=["loop.py", "packed.py", "already_cut.py"],
)
def test_more_examples_for_many(example, expected, tmp_path):
    """As written, on two ranks."""
    for printed, start in zip(run(2, rank_prints, example, tmp_path), expected, strict=True):
        assert printed.startswith(start)
        assert printed.count("\n") == 1


def test_the_example_for_many(tmp_path):
    """As written, with the README's number of processes; the page to start from has the same."""
    example = block("README.md", "ring.py")
    [num_ranks] = re.findall(
        r"torchrun --nproc-per-node (\d+) ring\.py", (ROOT / "README.md").read_text()
    )
    assert block("docs/start.md", "ring.py") == example
    lines = "".join(run(int(num_ranks), rank_prints, example, tmp_path))
    assert lines == block("docs/start.md", "ring.py prints")


# docs/porting.md: the loop on many ranks has the losses of the loop on one device.


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of one device: those of four steps, and that of held-out sequences."""
    folder = tmp_path_factory.mktemp("one device")
    (folder / "model.py").write_text(MODEL)
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
    line = r"rank \d: loss (0\.\d{4}), norm of the gradient ([1-9]\.\d{4})\n"
    expected, *found = (
        [float(x) for x in re.fullmatch(line, printed).groups()] for printed in alone + shared
    )
    for numbers in found:
        assert numbers == pytest.approx(expected, abs=2e-4)


# docs/gigapath.md


def test_the_page_for_gigapaths_users(tmp_path, monkeypatch):
    """Its five lines run as they stand, with the smaller size in place of the larger. So does the function alone."""
    lines = block("docs/gigapath.md", "for users of GigaPath")
    monkeypatch.chdir(tmp_path)
    torch.save({"model": LongNetViT.published("gigapath-flash").state_dict()}, "slide_encoder.pth")
    names = {"features": torch.randn(1, 20, 384), "coords": torch.arange(40).view(1, 20, 2) * 256}
    assert '"gigapath"' in lines
    exec(lines.replace('"gigapath"', '"gigapath-flash"'), names)
    assert names["embedding"].shape == (1, 384)
    assert load_slide_encoder("slide_encoder.pth").encoder.config.num_heads == 16
    exec(block("docs/gigapath.md", "the function alone"), names)
    assert names["out"].shape == (1, 1100, 16, 48)
