"""The main job: which bytes a step reads, that a resumed run is the same run, and how the command ends."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from functools import partial
from pathlib import Path, PurePosixPath
from unittest import mock

import pytest
import torch
from distributed import run as run_ranks
from forked import ForkedLauncher
from helpers import TEXT, StopAfter, free_port
from helpers import TINY as OPTIONS
from restart_trials import children
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from transcripts import PREPARED, play

from ring_dilated_attention import ContextParallel
from ring_dilated_attention.commands import train as train_command
from ring_dilated_attention.commands.cli import main
from ring_dilated_attention.models.longnet import LongNetLM
from ring_dilated_attention.models.saved_run import find_checkpoint
from ring_dilated_attention.training import loop, machine
from ring_dilated_attention.training.data import Document, load_document, source_files
from ring_dilated_attention.training.loop import (
    TrainingDiverged,
    make_optimizers,
    share_of_peak,
    train,
)
from ring_dilated_attention.training.machine import peak_resident_bytes, resident_bytes
from ring_dilated_attention.training.options import (
    Hyperparameters,
    add_hyperparameters,
    resolve,
)
from ring_dilated_attention.training.rank_launcher import (
    cause,
    leave_reason,
    share_of_cores,
    started,
)
from ring_dilated_attention.training.run import Run
from ring_dilated_attention.training.run_folder import LOCK_FILE
from ring_dilated_attention.training.run_report import summary, write_report
from ring_dilated_attention.training.stop_request import StopRequest

TINY = {
    "seq_len": 48,
    "steps": 5,
    "embed_dim": 16,
    "num_heads": 2,
    "segment_lengths": (8, 48),
    "dilation_rates": (1, 3),
    "warmup_steps": 2,
    "held_out_bytes": 96,
}
PHASES = {"phases": ("8:3:1", "16:2:2"), "steps": 2}
WINDOWS = (8999, 8003)  # where those of step 0 of seed 0 begin


NEVER = StopAfter(10**9)


def tiny_run(folder, resume=False, **changes):
    options = Hyperparameters(**{**TINY, **changes})
    document = Document(TEXT, "text", options.seq_len, options.held_out_bytes)
    return Run(options, document, folder, find_checkpoint(folder) if resume else None, save_every=2)


def saved_bytes(folder):
    """Of each tensor. (In the head of a file, entries have any order.)"""
    checkpoint = find_checkpoint(folder)
    assert checkpoint.name == "checkpoint-000005"
    tensors = load_file(checkpoint / "shard-00001-model-00001-of-00001.safetensors")
    return {name: x.numpy().tobytes() for name, x in tensors.items()}


def test_window_is_a_function_of_seed_and_step():
    document = Document(TEXT, "text", 48, 96)
    windows = [bytes(document.train_windows(0, step, 48, 2)) for step in range(50)]
    assert len({window[i : i + 48] for window in windows for i in (0, 48)}) > 80
    assert windows[7] != bytes(document.train_windows(1, 7, 48, 2))
    # The bytes themselves: another order of the data would break every resumed run.
    assert windows[0] == TEXT[WINDOWS[0] :][:48] + TEXT[WINDOWS[1] :][:48]


def test_held_out_bytes_are_the_end_and_never_trained_on():
    content = bytes(range(200))
    document = Document(content, "text", 32, 95)
    trained = {byte for step in range(300) for byte in document.train_windows(0, step, 32, 2)}
    assert trained == set(content[:-95])


def test_shortest_document():
    document = Document(bytes(8), "text", 4, 4)
    assert document.num_train == len(document.train_windows(0, 3, 4, 1)) == 4
    remedy = r"text has 7 bytes.* 4 \+ 4 = 8: pass more --data, or a smaller --held-out-b"
    with pytest.raises(ValueError, match=remedy):
        Document(bytes(7), "text", 4, 4)


def test_source_files_are_sorted_and_skip_what_is_not_source():
    names = "b.py a/z.py a-b.py site-packages/x.py json/tests/y.py test/x.py a/__pycache__/q.py"
    found = source_files(map(PurePosixPath, names.split()))
    assert list(map(str, found)) == ["a-b.py", "a/z.py", "b.py"]


def test_default_is_megabytes_of_the_standard_library():
    document = load_document([], 32_768, 131_072)
    assert len(document.content) > 3e6
    assert Path(json.__file__).read_bytes() in document.content


def test_files_make_one_document(tmp_path):
    paths = [str(tmp_path / name) for name in ("b.txt", "a.txt")]
    for path in paths:
        Path(path).write_text(path[-5:])
    assert load_document(paths, 4, 1).content == b"b.txta.txt"


def held_out_of_steps(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["held_out_bits_per_byte"] for line in lines]


def test_resumed_run_equals_uninterrupted_to_the_bit(tmp_path):
    """Within a phase, and at the borders of phases."""
    sizes = PHASES | {"dtype": "bfloat16"}
    whole = train(tiny_run(tmp_path / "whole", **sizes), ContextParallel(), NEVER)
    scores = held_out_of_steps(tmp_path / "whole")
    assert [score is not None for score in scores] == [True] * 4 + [False]
    for stop_after in (1, 2, 4):
        folder = tmp_path / str(stop_after)
        first = train(tiny_run(folder, **sizes), ContextParallel(), StopAfter(stop_after))
        assert (first["status"], first["step"]) == ("interrupted", stop_after)
        assert first["held_out_bits_per_byte"] is None
        second = train(tiny_run(folder, resume=True, **sizes), ContextParallel(), NEVER)
        assert second["status"] == "complete"
        assert held_out_of_steps(folder) == scores
        for name in ("bits_per_byte", "held_out_bits_per_byte"):
            assert second[name] == whole[name]
        assert saved_bytes(folder) == saved_bytes(tmp_path / "whole")


def test_loss_falls_below_that_of_byte_frequencies(tmp_path):
    """Byte frequencies alone give 4.1 bits on this text; what is less was learned from context."""
    first = {}
    for dtype, stop in ((None, StopAfter(5)), ("float32", NEVER), ("bfloat16", NEVER)):
        sizes = {"steps": 60, "seq_len": 96, "learning_rate": 2e-2, "dtype": dtype}
        record = train(tiny_run(tmp_path / str(dtype), **sizes), ContextParallel(), stop)
        first[dtype] = record["bits_per_byte"][:5]
        assert abs(first[dtype][0] - 8) < 0.2
        assert dtype is None or record["held_out_bits_per_byte"] < 2
    assert first["bfloat16"] != first["float32"] == first[None]


@pytest.mark.parametrize(
    ("flags", "words", "dtype"),
    [
        ("fma avx512_bf16 avx2", [], "bfloat16"),
        ("fma amx_bf16 amx_int8", [], "bfloat16"),
        ("fma avx512f avx2", [], None),
        ("fma avx512_bf16 avx2", ["--dtype", "float32"], "float32"),
        ("fma avx512f avx2", ["--dtype", "bfloat16"], "bfloat16"),
    ],
)
def test_the_dtype_is_the_processors_or_the_users(flags, words, dtype):
    """A run that goes on keeps its dtype, on another processor too."""
    parser = ArgumentParser()
    add_hyperparameters(parser, int)
    with mock.patch.object(machine, "_values", return_value=iter([flags])):
        options = resolve(parser.parse_args(words))
    assert options.dtype == dtype
    for other in ("avx2", "avx512_bf16"):
        with mock.patch.object(machine, "_values", return_value=iter([other])):
            assert resolve(parser.parse_args([]), options).dtype == dtype


def test_diverged_loss_stops_the_run(tmp_path):
    run = tiny_run(tmp_path, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(TrainingDiverged, match=r"the loss is nan at step \d: start again"):
        train(run, ContextParallel(), NEVER)


def test_learning_rate():
    options = Hyperparameters(**TINY | {"phases": ("8:1:4",), "steps": 8})
    rates = [share_of_peak(options, step) for step in range(12)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0.05 < rates[-1] < 0.1
    assert [options.positions_before(step) for step in (0, 4, 5, 12, 13)] == [
        0,
        32,
        80,
        416,
        416,
    ]
    assert [options.phase_of(step).length for step in (0, 3, 4, 12)] == [8, 8, 48, 48]
    muon, adamw = make_optimizers(LongNetLM(options.model_config()), options)
    peaks = [group["peak"] for group in (*muon.param_groups, *adamw.param_groups)]
    assert peaks == [0.015, 4e-3, 4e-3]
    assert {x.dim() for x in muon.param_groups[0]["params"]} == {2}


def test_a_step_is_that_of_its_sequences_one_by_one(tmp_path):
    """Catches packed sequences that see each other, a loss that is no mean over them, and a seed of no effect."""
    packed = tiny_run(tmp_path / "packed", batch_size=3, steps=1, seed=7)
    record = train(packed, ContextParallel(), NEVER)
    torch.manual_seed(7)
    model = LongNetLM(packed.hyperparameters.model_config())
    window = packed.document.train_windows(7, 0, 48, 3)
    loss = model.loss(torch.frombuffer(window, dtype=torch.uint8).view(3, 48))
    assert record["bits_per_byte"] == pytest.approx([loss.item() / math.log(2)], rel=1e-6)


def test_report(tmp_path):
    """Also one that is made again: it tells of the machine, versions and memory that trained."""
    record = train(tiny_run(tmp_path), ContextParallel(), NEVER)
    for _ in range(2):  # the second time over its own files
        write_report(record)
    assert (tmp_path / "record.json").read_text() == json.dumps(record, indent=1) + "\n"
    assert len(record["bits_per_byte"]) == 5
    assert record["ranks"][0]["resident_peak"] > 0
    bits = f"{record['held_out_bits_per_byte']:.3f} bits per byte on 96 bytes"
    assert f"held out: {bits}\ngzip on the same bytes: " in summary(record)
    with mock.patch.object(loop, "versions", return_value={"torch": "another"}):
        again = train(tiny_run(tmp_path, resume=True), ContextParallel(), NEVER)
    assert json.dumps(again) == json.dumps(record)


def train_twice(rank, world_size, folder):
    """One run in one go, one interrupted on the last rank's request, at a phase's end, and resumed: its losses, and of
    each step this rank's rows and whether they are a shard."""
    calls = []
    loss_of = loop.LongNetLM.loss

    def loss(model, tokens, *arguments, **options):
        if torch.is_grad_enabled():  # not of scoring
            calls.append((tokens.shape[1], model.parallel is not None))
        return loss_of(model, tokens, *arguments, **options)

    with mock.patch.object(loop.LongNetLM, "loss", loss):
        whole = train(tiny_run(folder / "whole", **PHASES), ContextParallel(), NEVER)
    stop = StopAfter(3) if rank == world_size - 1 else NEVER
    first = train(tiny_run(folder / "parts", **PHASES), ContextParallel(), stop)
    assert first["step"] == 3
    torch.distributed.barrier()
    second = train(tiny_run(folder / "parts", resume=True, **PHASES), ContextParallel(), NEVER)
    assert second["bits_per_byte"] == whole["bits_per_byte"]
    torch.distributed.barrier()
    assert saved_bytes(folder / "parts") == saved_bytes(folder / "whole")
    return whole["bits_per_byte"], calls[1:]  # without DDP's rehearsal


def test_three_ranks_resume_to_the_bit_and_agree_with_one(tmp_path):
    """Three, since gloo's sum of two is the same in any order. On one rank the losses differ by rounding only. And a
    report that is made again by one rank tells of the three that trained.

    Three sequences of 8 bytes go to three ranks, two of 16 cannot; those of --seq-len are always shared.
    """
    results = run_ranks(3, train_twice, tmp_path, seconds=200)
    losses = results[0][0]
    for (found, calls), rows_of_32 in zip(results, (11, 11, 10), strict=True):
        assert found == losses
        assert calls == [(8, False)] + [(rows_of_32, True)] * 2 + [(16, True)] * 2
    alone = train(tiny_run(tmp_path / "alone", **PHASES), ContextParallel(), NEVER)
    assert losses == pytest.approx(alone["bits_per_byte"], abs=1e-4)
    again = train(tiny_run(tmp_path / "whole", resume=True, **PHASES), ContextParallel(), NEVER)
    assert again["bits_per_byte"] == losses
    assert again["num_ranks"] == 3
    assert [row["rank"] for row in again["ranks"]] == [0, 1, 2]


@pytest.mark.parametrize("says", [True, False])
def test_signals_are_requests_inside_the_context_only(says, capfd):
    """Two at once are one, as of Slurm, which signals launchers and ranks. Catches ranks that end before they have
    saved."""
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(says=says) as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before
    error = capfd.readouterr().err
    assert error.count("stopping after this step, to save; a second") == says
    assert error.count("\n") == 2 * says


def test_a_rank_that_failed_is_not_ended_while_it_says_so():
    """An elastic launcher ends by SIGTERM the ranks that are left."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RuntimeError, match="lost"), StopRequest():
            raise RuntimeError("lost")
        assert signal.getsignal(signal.SIGTERM) != before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_later_signal_ends_the_process_at_once():
    code = """
import os, signal
from ring_dilated_attention.training import stop_request
stop_request.TWICE_SECONDS = 0
with stop_request.StopRequest():
    for _ in range(9):
        os.kill(os.getpid(), signal.SIGINT)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        ([(1, "lost another", False), (1, "KeyError: 'x'", True)], "rank 1: KeyError: 'x'"),
        ([(-9,), (1, "lost another", False)], "rank 0 was ended by SIGKILL"),
        ([(1, "lost another", False), (-15,)], "rank 1 was ended by SIGTERM"),
        ([(1,)], "rank 0 ended with code 1"),
    ],
)
def test_the_cause_is_not_what_followed(failures, said, tmp_path, monkeypatch):
    found = {}
    for rank, (exitcode, *reason) in enumerate(failures):
        path = str(tmp_path / f"error-{rank}.json")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
        if reason:
            text, is_cause = reason
            leave_reason(text, is_cause=is_cause)
        found[rank] = ProcessFailure(local_rank=rank, pid=rank, exitcode=exitcode, error_file=path)
    assert cause(ChildFailedError("rda", found)) == said


def test_memory_figures():
    assert 0 < resident_bytes() <= peak_resident_bytes()


SMALL = f"{OPTIONS} --warmup-steps 2 --steps 5 --data text.txt"
TRAIN = f"-m ring_dilated_attention train --save-every 5 {SMALL}"
RANKS = "--run-folder run --ranks 2"


IN_USE = (
    "rda train: run is in use by another run: let it end, or choose another --run-folder "
    f"(fuser run/{LOCK_FILE} names its process)\n"
)


def again(words):
    """The command that goes on from what `forked` begins."""
    return f"rda {TRAIN.partition(' ring_dilated_attention ')[2]} {words}"


def forked(words, environment=None, change=int):
    return ForkedLauncher(
        [*TRAIN.split(), *words.split()], Path("said.txt"), environment or {}, change
    )


def die_in_the_report():
    def dying(*_):
        time.sleep(1)  # the other rank ends
        os.kill(os.getpid(), signal.SIGKILL)

    train_command.report = dying


def fail_on_rank_1(error, reason):
    """The launcher has no rank."""
    rate = loop.share_of_peak

    def failing(options, step):
        if step == 7 and os.environ["RANK"] == "1":
            raise error(reason)
        return rate(options, step)

    loop.share_of_peak = failing


def sleep_in_a_step(seconds):
    rate = loop.share_of_peak
    PContext.close.__defaults__ = (None, 1)

    def slow(options, step):
        if step == 7 and not Path("sleeping").exists():
            Path("sleeping").touch()
            time.sleep(seconds)
        return rate(options, step)

    loop.share_of_peak = slow


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)


class TestCommand:
    @pytest.fixture(autouse=True)
    def in_tmp_path(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name, content in (("text", TEXT), ("empty", b""), ("short", b"x" * 100)):
            Path(f"{name}.txt").write_bytes(content)

    def test_a_rank_of_a_launcher_is_refused(self, monkeypatch, capsys):
        """Catches restarts that rda counts beside torchrun, or whose ranks would not find their run."""
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        play(PREPARED / "launched.txt", capsys)

    def test_tasks_of_a_slurm_step_train_one_model(self):
        """Catches as many separate models as there are tasks, each in a folder of its own."""
        place = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
        tasks = [
            forked("--steps 2", environment=place | {"SLURM_PROCID": str(task)})
            for task in range(2)
        ]
        said = [task.end() for task in tasks][1]
        assert [task.poll() for task in tasks] == [0, 0], said
        [folder] = Path("runs").iterdir()
        assert json.loads((folder / "record.json").read_text())["num_ranks"] == 2
        assert "SLURM" not in said

    @pytest.mark.parametrize(
        ("environment", "place"),
        [
            ("", (0, 1)),
            ("RANK=1 WORLD_SIZE=4", (1, 4)),
            ("SLURM_PROCID=0 SLURM_NTASKS=4", (0, 1)),
            ("SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4", (3, 4)),
            ("SLURM_STEP_ID=1 SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=2", (1, 2)),
            # The shell of salloc is a step of one task.
            ("SLURM_STEP_ID=9 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=1", (0, 1)),
            # torchrun's own ranks, one torchrun in each task.
            ("RANK=5 WORLD_SIZE=8 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2", (5, 8)),
        ],
    )
    def test_whose_variables_count(self, environment, place):
        given = dict(pair.split("=") for pair in environment.split())
        with mock.patch.dict(os.environ, given, clear=True):
            assert started() == place

    def test_ranks_share_the_cores_that_they_may_use(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(1000), raising=False)
        assert share_of_cores(3) == 333

    def test_the_same_command_goes_on_and_another_is_refused(self, capsys):
        play(PREPARED / "train.txt", capsys)
        record = Path("run/record.json")
        assert json.loads(record.read_text())["status"] == "complete"
        record.unlink()
        newest = find_checkpoint(Path("run")).stat().st_ino
        Path("text.txt").write_bytes(TEXT)
        assert main(f"train {SMALL} --run-folder run".split()) == 0
        # it is reported again, and not repeated
        assert json.loads(record.read_text())["status"] == "complete"
        assert find_checkpoint(Path("run")).stat().st_ino == newest

    def test_the_same_command_begins_again_after_a_kill_before_the_first_checkpoint(self):
        words = ["train", *SMALL.split(), "--run-folder", "run"]
        metrics = Path("run/metrics.jsonl")
        metrics.parent.mkdir()
        metrics.write_text('{"run": "killed", "step": 1, "bits_per_byte": 8.0}\n')
        assert main(words) == 0
        assert "killed" not in metrics.read_text()

    @pytest.mark.parametrize(("number", "seconds"), [(signal.SIGINT, 3), (signal.SIGTERM, 0)])
    def test_interrupted_ranks_save_and_go_on(self, number, seconds, capsys):
        """The signal reaches the launcher alone; both ranks stop at the same step, although that step takes longer than
        the second that torch leaves to others here, and no traceback is seen. Meanwhile nobody beyond this machine can
        reach the ranks, and nobody else has their folder."""
        words = f"{RANKS} --steps 100000"
        process = forked(words, change=partial(sleep_in_a_step, seconds))
        wait_for(lambda: Path("sleeping").exists(), process)
        if number == signal.SIGTERM:
            addresses = listening(process.pid)
            assert addresses  # the ranks do listen, for each other
            assert addresses <= {"0100007F", "00000000000000000000000001000000"}
            for second in (f"{SMALL} --steps 100000 --run-folder ./run", "--run-folder run"):
                assert main(["train", *second.split()]) == 2
                assert capsys.readouterr().err == IN_USE
        os.kill(process.pid, number)
        error = process.end()
        assert process.poll() == 130
        assert "Traceback" not in error
        record = json.loads(Path("run/record.json").read_text())
        assert record["status"] == "interrupted"
        assert record["step"] == 8 or not seconds
        saved = f"saved at step {record['step']}; go on with: {again(words)}\n"
        assert error.endswith(saved)
        assert not Path("run", LOCK_FILE).exists()

    @pytest.mark.parametrize(
        ("change", "reason", "other", "step"),
        [
            (partial(fail_on_rank_1, RuntimeError, "can't allocate memory"),
             "rank 1: there is not enough memory", "lost another: ", "run/checkpoint-000005"),
            # What nobody foresaw keeps its traceback.
            (partial(fail_on_rank_1, KeyError, "weight"),
             "rank 1: KeyError: 'weight'", "lost another: ", "run/checkpoint-000005"),
            # catches an exit code of 0, which the other rank has left
            (die_in_the_report, "rank 0 was ended by SIGKILL", "", "run/checkpoint-000010"),
        ],
        ids=["memory", "unforeseen", "killed in the report"],
    )  # fmt: skip
    def test_a_rank_that_fails_is_named_with_its_reason(self, change, reason, other, step):
        """And not the one that only lost it, which says so in a line; nobody waits for anybody."""
        words = f"{RANKS} --steps 10"
        process = forked(words, change=change)
        said = process.end()
        assert process.poll() == 1
        assert re.search(rf"\nrda train: rank 0 on host \S+ {other}", said) or not other
        assert ("Traceback" in said) == ("KeyError" in reason)
        last = f"rda train: the ranks failed: {reason}; newest checkpoint: {step}; "
        assert said.splitlines()[-1] == f"{last}go on with: {again(words)}"
        assert not Path("run/record.json").exists()

    def test_memory_that_ran_out_is_said_with_what_goes_on(self, monkeypatch, capsys):
        def without_memory(options, step):
            if step == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return share_of_peak(options, step)

        monkeypatch.setattr(loop, "share_of_peak", without_memory)
        words = f"train {SMALL} --run-folder run --save-every 2"
        assert main(words.split()) == 1
        said = "\nrda train: there is not enough memory; newest checkpoint: run/checkpoint-000002; "
        assert capsys.readouterr().err.endswith(f"{said}go on with: rda {words}\n")

    def test_whoever_is_left_under_torchrun_says_how_to_go_on(self):
        """Above torchrun's own block; catches a rank that torchrun ends before it could say so, and one that looks for
        checkpoints in a folder of its own."""
        words = f"-m torch.distributed.run --standalone --nproc-per-node 2 {TRAIN} --steps 100000"
        process = ForkedLauncher(words.split(), Path("said.txt"), {})
        wait_for(lambda: any(map(find_checkpoint, Path("runs").glob("*"))), process)
        os.kill(children(process.pid)[0], signal.SIGKILL)
        error = process.end()
        assert process.poll() == 1
        said = r"rda train: rank 1 on host \S+ lost another: .*; newest checkpoint: runs/.*; "
        said += r"go on with: \.\.\. -m ring_dilated_attention train .* --run-folder runs/[\d-]+\n"
        assert re.search(said, error)
        assert error.index("go on with") < error.index("_rank FAILED")


def listening(launcher):
    """Addresses at which a process and its children listen, as Linux lists them."""
    links, found = set(), set()
    for pid in (launcher, *children(launcher)):
        links |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in links:
                found.add(local.split(":")[0])
    return found
