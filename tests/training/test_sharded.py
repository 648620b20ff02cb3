"""`rda train --fsdp`: each rank holds and writes its part, and any number of ranks read them again."""

import os
import re
import resource
import shutil
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from distributed import preload
from distributed import run as run_ranks
from helpers import TEXT, StopAfter
from torch.distributed import distributed_c10d

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands.train import LOST_CONNECTION
from ring_dilated_attention.models.longnet import LongNetLM
from ring_dilated_attention.models.saved_run import (
    check_whole,
    find_checkpoint,
    find_checkpoints,
    read_state,
)
from ring_dilated_attention.training import checkpoint
from ring_dilated_attention.training.agreement import Refusal, check_alike
from ring_dilated_attention.training.checkpoint import load_checkpoint, save_checkpoint, tensors_of
from ring_dilated_attention.training.data import Document
from ring_dilated_attention.training.loop import make_optimizers, sharded_model, train
from ring_dilated_attention.training.options import Hyperparameters
from ring_dilated_attention.training.run import Run, fingerprint
from ring_dilated_attention.training.run_folder import own_folder

preload(
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "ring_dilated_attention.training.loop"
)

# A width of 4 on three ranks: the last rank's part of a norm is empty.
TINY = Hyperparameters(
    seq_len=48, steps=3, num_layers=2, embed_dim=4, num_heads=2, segment_lengths=(8, 48), dilation_rates=(1, 3),
    warmup_steps=2, held_out_bytes=96,
)  # fmt: skip


def make_run(folder, *, fsdp=True, resume=False):
    return Run(
        TINY,
        Document(TEXT, "text", TINY.seq_len, TINY.held_out_bytes),
        folder,
        find_checkpoint(folder) if resume else None,
        save_every=2,
        fsdp=fsdp,
    )


def train_rank(rank, world_size, folder):
    """The record of a run that is never stopped, and of one that goes on after its second step."""
    parallel = ContextParallel()
    never = train(make_run(folder / "never"), parallel, StopAfter(10**9))
    train(make_run(folder / "stopped"), parallel, StopAfter(2))
    return never, train(make_run(folder / "stopped", resume=True), parallel, StopAfter(10**9))


def sharded_here(options, timeout=timedelta(seconds=60)):
    torch.manual_seed(options.seed)
    parallel = ContextParallel(timeout=timeout)
    model = sharded_model(options.model_config(), parallel=parallel, activation_checkpointing=False)
    return model, make_optimizers(model, options)


def whole(model, optimizers):
    """Every tensor of a checkpoint, whole."""
    tensors = tensors_of(model, optimizers)
    return {name: getattr(x, "full_tensor", x.clone)().numpy() for name, x in tensors.items()}


def save_cut(folder, model, optimizers):
    state = {"run": "a run", "step": 2}
    return save_checkpoint(folder, state, model, optimizers, model.parallel, is_cut=True)


def write_rank(rank, world_size, folder):
    """Two steps, a checkpoint, and a third step. Returns what was to be written."""
    model, optimizers = sharded_here(TINY)
    for step in range(3):
        model.loss(model.parallel.shard(torch.randint(256, (1, 48)))).backward()
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:
            expected = whole(model, optimizers)
            save_cut(folder, model, optimizers)
    assert not all(
        numpy.array_equal(x, expected[name]) for name, x in whole(model, optimizers).items()
    )
    return expected


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint that two ranks wrote, and what they were to write."""
    folder = tmp_path_factory.mktemp("written")
    expected, _ = run_ranks(2, write_rank, folder)
    return find_checkpoint(folder), expected


def read_rank(rank, world_size, *checkpoints):
    """The initial tensors, and those that are read from each checkpoint."""
    model, optimizers = sharded_here(TINY)
    found = [whole(model, [])]
    for folder in checkpoints:
        load_checkpoint(folder, model, optimizers)
        found.append(whole(model, optimizers))
    return found


def test_what_two_ranks_wrote_one_and_three_read_to_the_bit(written, tmp_path):
    """Steps after the save do not reach the file. Muon's and AdamW's states are among the tensors."""
    folder, expected = written
    assert read_state(folder) == check_whole(folder) == {"run": "a run", "step": 2}
    shards = {f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)}
    assert {path.name for path in folder.iterdir()} == {"state.json"} | shards
    alone = LongNetLM(TINY.model_config())
    optimizers = make_optimizers(alone, TINY)
    load_checkpoint(folder, alone, optimizers)
    of_one = save_checkpoint(tmp_path, {"run": "another", "step": 2}, alone, optimizers)
    by_three = run_ranks(3, read_rank, folder, of_one)  # parts, and parts of files that are whole
    for found in (whole(alone, optimizers), *(read for _, *each in by_three for read in each)):
        assert found.keys() == expected.keys()
        assert all(numpy.array_equal(x, expected[name]) for name, x in found.items())
    torch.manual_seed(TINY.seed)
    # a seed has one beginning, however a run is cut
    for name, x in LongNetLM(TINY.model_config()).named_parameters():
        assert all(numpy.array_equal(x.detach(), initial[name]) for initial, *_ in by_three)


def misfit_rank(rank, world_size, written):
    with pytest.raises(ValueError, match="Size mismatch") as caught:
        load_checkpoint(written, *sharded_here(Hyperparameters(**{**vars(TINY), "embed_dim": 8})))
    return str(caught.value)


def test_what_does_not_fit_the_model_is_refused_in_a_sentence(written):
    """On ranks that hold parts, although the part of a wider model may be as large as the whole of this one."""
    folder, _ = written
    for said in run_ranks(3, misfit_rank, folder):
        assert re.fullmatch(
            rf"{folder} cannot be read: Size mismatch between saved .* and current: .* for .*", said
        )


def test_a_run_goes_on_to_the_bit(tmp_path):
    """It comes to the losses that the same run has without --fsdp. Muon computes in bfloat16."""
    never, resumed = run_ranks(2, train_rank, tmp_path)[0]
    assert resumed["bits_per_byte"] == never["bits_per_byte"]
    assert resumed["held_out_bits_per_byte"] == never["held_out_bits_per_byte"]
    assert [path.name for path in find_checkpoints(tmp_path / "stopped")] == [
        "checkpoint-000003",
        "checkpoint-000002",
    ]
    models = [LongNetLM.from_run(tmp_path / name) for name in ("never", "stopped")]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
    alone = train(make_run(tmp_path / "alone", fsdp=False), ContextParallel(), StopAfter(10**9))
    # the same parameters
    assert alone["bits_per_byte"][0] == pytest.approx(never["bits_per_byte"][0], abs=1e-6)
    assert alone["bits_per_byte"] == pytest.approx(never["bits_per_byte"], abs=1e-3)


def sharing_rank(rank, world_size, folder, other):
    """The first rank has a lock in its folder, and the other rank another one or none. Then they share a folder."""
    (folder / str(rank) / "run").mkdir(parents=True)
    os.chdir(folder / str(rank))
    parallel, run = ContextParallel(), make_run(Path("run"))
    owns = nullcontext() if rank == world_size - 1 and other == "none" else own_folder(Path("run"))
    with owns, pytest.raises(Refusal) as caught:
        check_alike(parallel, fingerprint(run))
    with own_folder(folder / "shared") if rank == 0 else nullcontext():
        torch.distributed.barrier()
        check_alike(parallel, fingerprint(make_run(folder / "shared")))
        torch.distributed.barrier()
    return str(caught.value)


@pytest.mark.parametrize("other", ["its own", "none"])
def test_hosts_without_a_shared_folder_are_refused_in_a_sentence(tmp_path, other):
    """The other host has a lock of its own, or none."""
    for said in run_ranks(2, sharing_rank, tmp_path, other):
        expected = "differ in the owner of the run's folder, which --fsdp needs all hosts to share (rank 0 on host "
        assert expected in said
        assert (": nobody)" in said) == (other == "none")
        assert "\n" not in said


def hang(*args, **options):
    time.sleep(4)
    raise OSError(5, "Input/output error")


def hanging_rank(rank, world_size, folder):
    """The second rank's disk hangs."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=1))  # which `rda train` sets by --timeout
    held = sharded_here(TINY, timedelta(seconds=1))
    with (
        mock.patch.object(checkpoint, "save", side_effect=hang) if rank else nullcontext(),
        pytest.raises(RuntimeError) as caught,
    ):
        save_cut(folder, *held)
    return str(caught.value)


def test_a_write_that_hangs_on_one_rank_is_noticed_within_the_timeout(tmp_path):
    said = run_ranks(2, hanging_rank, tmp_path)
    assert LOST_CONNECTION.search(said[0])
    assert not list(tmp_path.iterdir())


def full_disk_rank(rank, world_size, folder):
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    held = sharded_here(TINY)
    with pytest.raises(Refusal) as caught:
        save_cut(folder, *held)
    return str(caught.value)


def test_a_disk_that_is_full_on_one_rank_is_a_sentence_on_all_and_nothing_is_left(tmp_path):
    for said in run_ranks(2, full_disk_rank, tmp_path):
        assert f"{tmp_path / 'checkpoint-000002'} cannot be written: File too large" in said
    assert not list(tmp_path.iterdir())


def test_a_damaged_part_is_named(written, tmp_path):
    folder = shutil.copytree(written[0], tmp_path / written[0].name)
    part = folder / "shard-00002-model-00001-of-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-3] ^= 4
    part.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{part.name} is damaged: its size or sha256"):
        check_whole(folder)
