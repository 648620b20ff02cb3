"""Ranks that die, stop, fail, or do not come: an error on every other rank, in time, and never a hang.

`make faults` tries many more (fault_trials.py). Functions whose name starts with `rank` run on every rank.
"""

import ctypes
import re
import time
from datetime import timedelta
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from definition import DENSE, PATIENCE, check_step, noted_messages, whole
from distributed import Ranks, run
from faults import Fault, run_trial
from helpers import message_of

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.ranks.link import ExchangeError
from ring_dilated_attention.ranks.reduce import all_reduce

MIB = 2**20
AT_KEYS, AT_HEADS = "hop 1, keys and values", "heads for positions"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(4, 1, "kill", "forward", "hop 2, keys and values", chunk_bytes=16 * MIB),
        Fault(3, 0, "kill", "forward", "handshake"),
        # rank 0 waits for no message of rank 2: it meets 4, 3 and 1
        Fault(5, 2, "kill", "backward", "user"),
        Fault(4, 3, "kill", "backward", AT_KEYS, exchange="all_gather", chunk_bytes=4 * MIB),
        Fault(4, 2, "kill", "forward", AT_HEADS, exchange="all_to_all", chunk_bytes=4 * MIB),
        Fault(4, 3, "kill", "backward", AT_KEYS, exchange="mesh"),
        Fault(3, 1, "stop", "backward", "hop 1, gradients", chunk_bytes=4 * MIB, timeout=2),
        # causal: rank 1 sends its keys to rank 3, and rank 0 needs none
        Fault(4, 1, "raise", "forward", "hop 2, keys and values", in_flight=False, is_causal=True),
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


def test_a_rank_that_raises_between_calls():
    """Catches ranks that do not learn who is missing, and in what. The failing rank keeps its own error. Rank 1 waits
    in the second round of the handshake only."""
    trial = run_trial(Fault(4, 3, "raise", "backward", "user", timeout=2))
    assert not trial.complaints, "\n".join(trial.complaints)
    assert trial.messages.pop(3) == "the user's own error"
    later = ", or waits there for another rank"
    for rank, round_of in {0: "", 1: later, 2: ""}.items():
        absence = f"rank 3 did not enter backward 2{round_of}"
        group = rf"\(group 'control of .+', rank {rank}\)"
        assert re.match(
            rf"backward 2, handshake: {absence} {group}: Timed out", trial.messages[rank]
        )
        assert "only if its loss depends on the output" in trial.messages[rank]


def rank_waits_for_one_that_does_not_come(rank, world_size):
    patience = timedelta(seconds=1)
    contexts = [ContextParallel(timeout=patience) for _ in range(4)]
    x = torch.ones(1, 4, 2, requires_grad=True)
    whole = contexts[0].unshard(x)
    y = torch.ones(1, 5, 4, 8, requires_grad=True)
    out = dilated_attention(y, y, y, DENSE, parallel=contexts[1])
    calls = {
        "forward 1": lambda: dilated_attention(y, y, y, DENSE, parallel=contexts[2]),
        "backward 1": lambda: out.sum().backward(),
        "backward of unshard": lambda: whole.sum().backward(),
        "all_reduce": lambda: all_reduce(contexts[3].ranks, torch.ones(1)),
    }
    if rank != 2:
        for name, call in calls.items():
            start = time.monotonic()
            said = message_of(call, ExchangeError)
            assert time.monotonic() - start < 20
            absence = f"{name}, handshake: rank 2 did not enter {name} (group 'control of "
            assert said.startswith(absence), said
            assert f", rank {rank}): Timed out" in said
            cause = "an evaluation under `if rank == 0`"
            assert ("if its loss depends on" if name.startswith("backward") else cause) in said
        said = message_of(partial(ContextParallel, timeout=patience), ExchangeError)
        assert "making a ContextParallel: some of the ranks [0, 1, 2] did not make it " in said
        assert ": make contexts alike on all" in said
    dist.barrier()  # the default group is whole


def test_a_rank_that_does_not_come():
    """Catches a function of ContextParallel that waits without end, or does not say for whom."""
    run(3, rank_waits_for_one_that_does_not_come, seconds=120)


def rank_has_nothing_to_send(rank, world_size):
    posted = noted_messages()
    cases = [
        ((8, 8, 8), DilatedPattern((4, 8), (1, 2)), False),  # no segment straddles
        ((0, 9, 0), DENSE, False),  # one rank owns everything
        ((0, 5, 5), DENSE, True),  # one rank owns nothing
    ]
    for exchange, (lengths, pattern, sends) in product(("ring", "all_gather"), cases):
        cp = ContextParallel(lengths=lengths, exchange=exchange, timeout=PATIENCE)
        check_step(cp, whole(sum(lengths)), pattern)
        assert bool(posted) == (sends and lengths[rank] > 0)
        posted.clear()
    x = torch.zeros(1, 0, 2, 8, requires_grad=True)  # all ranks own nothing
    out = dilated_attention(x, x, x, DENSE, parallel=ContextParallel(timeout=PATIENCE))
    out.sum().backward()
    assert (out.shape, x.grad.shape, posted) == (x.shape, x.shape, [])


def test_ranks_with_nothing_to_send():
    """Catches a rank that owns nothing and is waited for, and messages of no rows."""
    run(3, rank_has_nothing_to_send)


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(self.seconds)


def rank_leaves(rank, world_size):
    global slow
    parallel = ContextParallel()
    time.sleep(rank)  # so long that rank 0 watches rank 1
    parallel.unshard(torch.ones(1, 8, 2, 8))
    slow = Slow()  # goes when Python is ending: rank 1 leaves while rank 0 is at it
    slow.seconds = 1 - rank / 2
    ctypes.pythonapi.Py_Exit(0)  # as a program that comes to its end, which a forked rank does not


def test_ranks_that_leave():
    """Catches threads that come back from gloo when Python is ending, which aborts the process."""
    with Ranks(2, rank_leaves) as ranks:
        for process in ranks.processes:
            process.join(60)
        assert [process.exitcode for process in ranks.processes] == [0, 0]
