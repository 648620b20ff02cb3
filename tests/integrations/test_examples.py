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
import torch.distributed as dist
from distributed import LIKE_NCCL, over_gloo, preload, run
from helpers import ROOT
from safetensors import safe_open

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
# Smaller here, with the words and the backend of the default group. LIKE_NCCL: as after `init_process_group("nccl")`,
# without a backend for the CPU. FSDP2, DeepSpeed and Lightning send by groups of their own, for the devices of their
# tensors, and are not rehearsed so. `make test` runs these alone, and `make examples` all at their size. Their ranks
# are forked from a process that has imported what they need. `make examples` starts them by torchrun.
TOY = {
    "train_fsdp2": ("--seq-len 128 --steps 10 --checkpoints saved", "gloo"),
    "train_hugging_face_long": ("--seq-len 4096 --steps 10", LIKE_NCCL),
}
preload("torch.distributed.fsdp", "torch.distributed.checkpoint")


def rank_runs(rank, world_size, example, words, backend, folder):
    os.chdir(folder)
    script = str(EXAMPLES / f"{example}.py")
    with (
        over_gloo() if backend == LIKE_NCCL else contextlib.nullcontext(),
        mock.patch.object(sys, "argv", [script, *words.split()]),
        mock.patch.object(dist, "init_process_group"),  # it has met the others
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def output_of(example, num_processes, folder):
    if example in TOY:
        words, backend = TOY[example]
        given = (example, words, backend, folder)
        return run(num_processes, rank_runs, *given, backend=backend, seconds=200)[0]
    words = f"-m torch.distributed.run --standalone --nproc-per-node {num_processes}"
    launcher = words.split() if num_processes > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / f"{example}.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
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
            [float(x) for x in re.findall(rf"^{name}: ([\d.]+)$", output, re.MULTILINE)]
            for name in ("dense", "dilated, as it is", "dilated, trained further")
        )
        assert converted[0] > dense[-1] + 0.1
        assert trained[-1] < dense[-1] + 0.05
        return
    if example == "train_fsdp2":
        [(norm, expected)] = re.findall(r"first gradient ([\d.]+); on one rank ([\d.]+)", output)
        assert float(norm) == pytest.approx(float(expected), rel=1e-4)
        words = "--seq-len 128 --steps 5 --checkpoints saved"
        # goes on with the parts of four ranks
        output += run(3, rank_runs, example, words, "gloo", tmp_path, seconds=200)[0]
        assert "wrote saved/step-000015" in output
    losses = [float(x) for x in re.findall(r"loss'?:? '?([\d.]+)", output)]
    assert len(losses) >= 3
    assert losses[-1] < losses[0] - 0.3
    if example == "train_fsdp2":
        assert losses[-1] < losses[-2]  # a model from the seed has more after five steps
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
        [written] = re.findall(r"^(b['\"].*['\"])$", output, re.MULTILINE)
        assert len(eval(written)) == len(b"Exact dilated attention ") + 60
