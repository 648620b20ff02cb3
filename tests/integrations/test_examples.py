"""The examples of trainers run, each in under a minute, and their losses fall."""

import contextlib
import io
import os
import re
import resource
import runpy
import subprocess
import sys
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import LIKE_NCCL, over_gloo, preload, run
from helpers import ROOT
from safetensors import safe_open

from ring_dilated_attention.models import LongNetConfig, LongNetLM, NextTokenLoss
from ring_dilated_attention.models.rank_files import read_shards

EXAMPLES = ROOT / "examples"
# What each needs, and on how many processes it runs.
CASES = {
    "train_fsdp2": ((), 4),
    "train_hugging_face": (("transformers", "accelerate"), 1),
    "train_hugging_face_ranks": (("transformers", "accelerate"), 2),
    "train_hugging_face_long": (("transformers",), 2),
    "convert_dense": (("transformers",), 1),
    "train_accelerate": (("accelerate",), 2),
    "train_deepspeed": (("deepspeed",), 2),
    "train_lightning": (("lightning",), 2),
    "train_fabric": (("lightning",), 4),
    "finetune_slides": ((), 2),
}
# Smaller here. `make test` runs these alone, and `make examples` all at their size.
TOY = {
    "train_fsdp2": ("--seq-len", "128", "--steps", "15", "--checkpoints", "saved"),
    "train_hugging_face_long": ("--seq-len", "4096", "--steps", "20"),
}
# Their ranks are forked from a process that has imported what they need. `make examples` starts them by torchrun.
FORKED = tuple(TOY)
preload("torch.distributed.fsdp", "torch.distributed.checkpoint")


def rank_runs(rank, world_size, example, words, folder):
    os.chdir(folder)
    script = str(EXAMPLES / f"{example}.py")
    with (
        mock.patch.object(sys, "argv", [script, *words]),
        mock.patch.object(dist, "init_process_group"),  # it has met the others
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def rank_runs_without_cpu(*args):
    with over_gloo():
        return rank_runs(*args)


def output_of(example, num_processes, folder):
    if example in FORKED:
        return run(num_processes, rank_runs, example, TOY[example], folder)[0]
    launcher = [sys.executable]
    if num_processes > 1:
        words = f"-m torch.distributed.run --standalone --nproc-per-node {num_processes}"
        launcher += words.split()
    done = subprocess.run(
        [*launcher, EXAMPLES / f"{example}.py", *TOY.get(example, ())],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unused parameters" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("example", CASES)
def test_runs_in_a_minute(example, tmp_path):
    needs, num_processes = CASES[example]
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make test-integrations runs it")
    # as in the environment of `make test`
    if example not in TOY and find_spec("accelerate") is None:
        pytest.skip("make test-integrations runs it")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = output_of(example, num_processes, tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # A minute on two cores, however busy they are: seconds of all its processes.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2 * 60
    if example == "convert_dense":
        dense, converted, trained = (
            [float(x) for x in re.findall(rf"^{name}: ([\d.]+)$", output, flags=re.MULTILINE)]
            for name in ("dense", "dilated, as it is", "dilated, trained further")
        )
        assert converted[0] > dense[-1] + 0.1
        assert trained[-1] < dense[-1] + 0.05
        return
    if example == "train_fsdp2":
        [(norm, expected)] = re.findall(r"first gradient ([\d.]+); on one rank ([\d.]+)", output)
        assert float(norm) == pytest.approx(float(expected), rel=1e-4)
        check_parts(tmp_path, output)
    losses = [float(x) for x in re.findall(r"loss'?:? '?([\d.]+)", output)]
    assert len(losses) >= 3
    assert losses[-1] < losses[0] - 0.3
    if example == "finetune_slides":
        accuracies = [int(x) for x in re.findall(r"accuracy (\d+)%", output)]
        assert accuracies[0] < 50
        assert accuracies[-1] > 90
        with safe_open(tmp_path / "finetuned.safetensors", framework="pt") as file:
            assert "head.weight" in file.keys()  # noqa: SIM118  not a dict
    if example == "train_hugging_face_long":
        [(held, whole)] = re.findall(r"holds ([\d,]+) bytes at any length; ([\d,]+)", output)
        assert int(held.replace(",", "")) < int(whole.replace(",", "")) / 10
    elif "hugging_face" in example:
        [written] = re.findall(r"^(b['\"].*['\"])$", output, flags=re.MULTILINE)
        assert len(eval(written)) == len(b"Exact dilated attention ") + 60


def test_runs_after_the_usual_call(tmp_path):
    """The default group has no backend for the CPU, as after `init_process_group("nccl")`. Examples without
    transformers are in tests/test_toy_examples.py. FSDP2, DeepSpeed and Lightning send by groups of their own, for
    the devices of their tensors, and torchrun's processes choose gloo where there is no GPU: they are not rehearsed
    so."""
    pytest.importorskip("transformers")
    words = ("--seq-len", "1024", "--steps", "1")
    arguments = ("train_hugging_face_long", words, tmp_path)
    printed, _ = run(2, rank_runs_without_cpu, *arguments, backend=LIKE_NCCL)
    assert re.search(r"step 1: loss [\d.]+", printed)


def check_parts(folder, output):
    """What four processes wrote as two replicas is read by one, and has about the loss of the last step. Three go on
    with it."""
    checkpoint = folder / "saved" / "step-000015"
    assert {path.suffix for path in checkpoint.iterdir()} == {".safetensors"}
    config = LongNetConfig((64, 256), (1, 4), embed_dim=64, num_layers=2, num_heads=4)
    model = NextTokenLoss(LongNetLM(config))
    written = read_shards(checkpoint, dict(model.named_parameters()))
    model.load_state_dict(model.state_dict() | written)
    last = float(re.findall(r"step 15: loss ([\d.]+)", output)[0])
    tokens = (torch.arange(128)[None] * 7) % 256
    assert model(tokens).item() == pytest.approx(last, abs=0.3)  # a step later, of another sample
    words = ("--seq-len", "128", "--steps", "5", "--checkpoints", "saved")
    output = run(3, rank_runs, "train_fsdp2", words, folder)[0]
    assert "wrote saved/step-000020" in output
    [loss] = re.findall(r"step 20: loss ([\d.]+)", output)
    assert float(loss) < last  # a model from the seed has more after five steps
