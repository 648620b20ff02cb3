"""Ranks that die, stop, fail, or do not come: an error on every other rank, in time, and never a hang.

`make faults` tries many more (fault_trials.py). Functions whose name starts with `rank` run on every rank.
"""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path

import distributed
import pytest
import torch
import torch.distributed as dist
from distributed import RankFailedError, Ranks, run
from faults import DENSE, Fault, Report, judge, live, run_trial

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.ranks.link import ExchangeError, GroupLink
from ring_dilated_attention.ranks.reduce import all_reduce

MIB = 2**20


@pytest.mark.parametrize(
    "fault",
    [
        Fault(4, 1, "kill", "forward", "hop 2, keys and values", chunk_bytes=16 * MIB),
        Fault(3, 2, "kill", "backward", "hop 1, gradients", chunk_bytes=4 * MIB),
        Fault(3, 0, "kill", "forward", "handshake"),
        # rank 0 waits for no message of rank 2: it meets 4, 3 and 1
        Fault(5, 2, "kill", "backward", "user"),
        Fault(
            4,
            3,
            "kill",
            "backward",
            "hop 1, keys and values",
            exchange="all_gather",
            chunk_bytes=4 * MIB,
        ),
        Fault(
            4,
            2,
            "kill",
            "forward",
            "heads for positions",
            exchange="all_to_all",
            chunk_bytes=4 * MIB,
        ),
        Fault(4, 3, "kill", "backward", "hop 1, keys and values", exchange="mesh"),
        Fault(3, 1, "stop", "backward", "hop 1, gradients", chunk_bytes=4 * MIB, timeout=2),
        Fault(4, 3, "raise", "forward", "hop 2, keys and values", in_flight=False),
        Fault(2, 0, "raise", "backward", "hop 1, gradients"),
        # Of six ranks, 0 and 3 exchange no message of a handshake.
        Fault(6, 3, "kill", "forward", "after the handshake", exchange="all_gather"),
        Fault(4, 2, "raise", "backward", "after the handshake", is_causal=True),
        # What the user writes is not what carries the messages: None is "undefined", and all three are gloo.
        Fault(3, 1, "raise", "backward", "hop 1, gradients", chunk_bytes=16 * MIB, backend=None),
    ],
    ids=lambda fault: f"{fault.kind} {fault.exchange} {fault.stage} {fault.place} {fault.backend}",
)
def test_every_other_rank_raises(fault):
    """Catches a hang, an error that does not say who, where and in which group, and ranks that cannot go on."""
    trial = run_trial(fault)
    assert not trial.complaints, "\n".join(trial.complaints)


@pytest.mark.parametrize(
    ("num_ranks", "missing"),  # for each other rank: whom it names, and whether in the first round
    [(3, {0: (2, True), 1: (2, True)}), (4, {0: (3, True), 1: (3, False), 2: (3, True)})],
)
def test_a_rank_that_raises_between_calls(num_ranks, missing):
    """Catches ranks that do not learn who is missing, and in what. The failing rank keeps its own error."""
    trial = run_trial(Fault(num_ranks, num_ranks - 1, "raise", "backward", "user", timeout=2))
    assert not trial.complaints, "\n".join(trial.complaints)
    assert trial.messages.pop(num_ranks - 1) == "the user's own error"
    for rank, (peer, is_first_round) in missing.items():
        absence = f"rank {peer} did not enter backward 2"
        if not is_first_round:
            absence += ", or waits there for another rank"
        group = rf"\(group 'control of .+', rank {rank}\)"
        assert re.match(
            rf"backward 2, handshake: {absence} {group}: Timed out", trial.messages[rank]
        )
        assert "only if its loss depends on the output" in trial.messages[rank]


def test_a_process_ends_though_a_message_is_stuck():
    """Catches an exit that waits for the timeout of a message which will never come through."""
    fault = Fault(3, 2, "kill", "backward", "hop 1, keys and values", chunk_bytes=16 * MIB)
    hears, tells = Pipe(duplex=False)
    with Ranks(3, live, fault, tells) as ranks, hears, tells:
        outcomes = ranks.collect([0, 1], 60)
        assert all(outcome.succeeded for outcome in outcomes.values()), outcomes
        for process in ranks.processes[:2]:
            process.join(10)
            assert process.exitcode == 0


def rank_waits_for_one_that_does_not_come(rank, world_size):
    contexts = [ContextParallel(timeout=timedelta(seconds=1)) for _ in range(6)]
    x = torch.ones(1, 4, 2, requires_grad=True)
    shard, whole = contexts[0].shard(x), contexts[3].unshard(x)
    y = torch.ones(1, 5, 4, 8, requires_grad=True)
    out = dilated_attention(y, y, y, DENSE, parallel=contexts[5])
    calls = {
        "forward 1": lambda: dilated_attention(y, y, y, DENSE, parallel=contexts[4]),
        "backward 1": lambda: out.sum().backward(),
        "backward of shard": lambda: shard.sum().backward(),
        "backward of unshard": lambda: whole.sum().backward(),
        "unshard": lambda: contexts[1].unshard(torch.ones(1, 2)),
        "all_reduce": lambda: all_reduce(contexts[2].ranks, torch.ones(1)),
    }
    if rank != 2:
        for name, call in calls.items():
            start = time.monotonic()
            cause = (
                "if its loss depends on"
                if name.startswith("backward")
                else "an evaluation under `if rank == 0`"
            )
            group = rf"\(group 'control of .+', rank {rank}\)"
            missed = rf"^{name}, handshake: rank 2 did not enter {name} {group}: Timed out"
            missed += f".+{cause}"
            with pytest.raises(ExchangeError, match=missed):
                call()
            assert time.monotonic() - start < 5
        missed = r"making a ContextParallel: not all of the ranks \[0, 1, 2\] did .+: make contexts alike on all"
        with pytest.raises(ExchangeError, match=missed):
            ContextParallel(timeout=timedelta(seconds=1))
    dist.barrier()  # the default group is whole


def test_a_rank_that_does_not_come():
    """Catches a function of ContextParallel that waits without end, or does not say for whom."""
    run(3, rank_waits_for_one_that_does_not_come)


def count_messages(posted):
    """Note every message of this process but those of handshakes."""
    post = GroupLink._post

    def counting_post(link, messages, moment):
        if not link.name.startswith("control"):
            posted.extend(messages)
        return post(link, messages, moment)

    GroupLink._post = counting_post


def rank_has_nothing_to_send(rank, world_size):
    posted = []
    count_messages(posted)
    generator = torch.Generator().manual_seed(0)
    cases = [
        ((0,) * world_size, DENSE, False),  # all ranks own nothing
        ((8,) * world_size, DilatedPattern((4, 8), (1, 2)), False),  # no segment straddles
        ((0, 9, *[0] * (world_size - 2)), DENSE, False),  # one rank owns everything
        ((0, *[5] * (world_size - 1)), DENSE, world_size > 2),  # one rank owns nothing
    ]
    for exchange in ("ring", "all_gather"):
        for lengths, pattern, sends in cases:
            full = torch.randn(
                1, sum(lengths), 2, 8, dtype=torch.float64, generator=generator
            ).requires_grad_()
            expected = dilated_attention(full, full, full, pattern)
            (gradient,) = torch.autograd.grad(expected.sin().sum(), full)
            cp = ContextParallel(lengths=lengths, exchange=exchange, timeout=timedelta(seconds=20))
            local = cp.shard(full.detach()).requires_grad_()
            out = dilated_attention(local, local, local, pattern, parallel=cp)
            (local_gradient,) = torch.autograd.grad(out.sin().sum(), local)
            torch.testing.assert_close(out, cp.shard(expected))
            torch.testing.assert_close(local_gradient, cp.shard(gradient))
            assert bool(posted) == (sends and lengths[rank] > 0)
            posted.clear()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_nothing_to_send(world_size):
    """Catches a rank that owns nothing and is waited for, and messages of no rows."""
    run(world_size, rank_has_nothing_to_send)


# The tests themselves: they end in time, and they can fail.


def rank_never_ends(rank, world_size, tells):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    tells.send(os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(1)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_all_end(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{alive} live on"
        time.sleep(0.05)


def test_the_server_of_ranks_finds_what_it_is_to_import():
    """Catches a module that is called otherwise now: the server passes it by, and every rank imports it."""
    code = f"import sys; sys.exit(', '.join({set(distributed._PRELOADED)} - sys.modules.keys()) or None)"
    process = distributed.START.Process(target=exec, args=(code,))  # which imports nothing itself
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_ranks_that_never_end_are_ended_and_fail_the_test():
    """Catches a harness that waits for ranks which ignore signals, sleep or are stopped, and leaves them behind."""
    hears, tells = Pipe(duplex=False)
    with hears, tells:
        start = time.monotonic()
        with pytest.raises(
            RankFailedError, match=r"rank 0: no answer in time\nrank 1: no answer in time"
        ):
            run(2, rank_never_ends, tells, seconds=3)
        assert time.monotonic() - start < 15
        assert_all_end([hears.recv() for _ in range(2) if hears.poll(1)])


def test_a_fault_that_does_not_happen_is_noticed():
    """Catches trials that pass because nobody failed."""
    trial = run_trial(Fault(2, 1, "kill", "forward", "hop 9, keys and values"))
    assert "the rank never came to the place where it was to fail" in trial.complaints


AT_HOP = "forward, hop 1, keys and values: waiting for rank {} (group 'data of context 1', rank {}): Connection closed."


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({0: {"error": "RuntimeError"}}, "rank 0 saw RuntimeError"),
        ({1: {"time": 106.0}}, "rank 1 saw its error after 6.0 s"),
        ({1: {"obstacle": "it hurts"}}, "rank 1 could not go on: it hurts"),
        # it names itself wrongly
        ({1: {"message": AT_HOP.format(2, 0)}}, "the error of rank 1 leads to rank None"),
        (
            {0: {"message": AT_HOP.format(1, 0)}, 1: {"message": AT_HOP.format(0, 1)}},
            "the error of rank 0 leads to",
        ),
    ],
)
def test_what_is_complained_of(changes, complaint):
    """Proof that a trial can fail, for each of its reasons."""
    fault = Fault(3, 2, "kill", "forward", "hop 1, keys and values")
    reports = {
        0: Report("ExchangeError", AT_HOP.format(1, 0), 100.1),
        1: Report("ExchangeError", AT_HOP.format(2, 1), 100.0),
    }
    reports = {rank: report._replace(**changes.get(rank, {})) for rank, report in reports.items()}
    said = "\n".join(judge(fault, reports, struck=100.0))
    assert said == "" if complaint is None else complaint in said


LEAVING = """
import sys, time
import torch
import torch.distributed as dist
from ring_dilated_attention import ContextParallel

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
parallel = ContextParallel()
time.sleep(rank)  # so long that rank 0 watches rank 1
parallel.unshard(torch.ones(1, 8, 2, 8))

class Slow:
    def __del__(self, sleep=time.sleep, seconds=1 - rank / 2):
        sleep(seconds)

slow = Slow()  # goes when Python is ending: rank 1 leaves while rank 0 is at it
"""


def test_ranks_that_leave():
    """Catches threads that come back from gloo when Python is ending, which aborts the process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVING, str(rank), str(store.port)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ends = [(process.communicate(timeout=120)[1], process.returncode) for process in ranks]
    assert all(code == 0 for _, code in ends), ends
