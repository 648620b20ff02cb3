"""A rank that is killed, stopped or that raises, at a chosen place of a run of forwards and backwards.

A trial starts the ranks, lets one of them fail, and gathers what the others saw. Nothing of the library knows of it: in
the failing rank's own process, the method that posts messages is wrapped.
"""

import os
import re
import signal
import time
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from typing import NamedTuple

import distributed
import torch
import torch.distributed as dist
from definition import DENSE, PATIENCE, check_step, mesh_of
from distributed import Ranks
from helpers import message_of

from ring_dilated_attention import ContextParallel, DilatedPattern, dilated_attention
from ring_dilated_attention.plan.rounds import MOST_AT_ONCE
from ring_dilated_attention.ranks.link import ExchangeError, GroupLink
from ring_dilated_attention.ranks.processes import Processes

CAUSAL = DilatedPattern.dense(is_causal=True)
FAILING_STEP = 2
ROWS, HEAD_DIM = 64, 128  # per rank; the number of heads makes the size of a chunk

# How long a rank may take to start, to compute, and to tear down its groups on a busy machine. It is ten times what a
# quiet one takes or more, and less than a timeout of 30 s that must not be needed.
START_SECONDS = 60
SLACK_SECONDS = 20


class Fault(NamedTuple):
    """What happens to one rank, in the second step.

    kind: kill (SIGKILL), stop (SIGSTOP), or raise an error.
    place: "user" (before the call), "handshake", "after the handshake" (before other messages), "hop 1, keys and
        values", "hop 2, gradients", ...
    in_flight: the rank fails when it has posted these messages, not before.
    chunk_bytes: of K‖V of one rank, at least 128 KiB. More than sockets buffer (a few MiB) is sure to be on its way.
    timeout: seconds, of the context.
    backend: what the user gives to init_process_group.
    """

    world_size: int
    rank: int
    kind: str
    stage: str
    place: str
    in_flight: bool = True
    exchange: str = "ring"
    is_causal: bool = False
    chunk_bytes: int = 128 * 1024
    timeout: float = 30
    backend: str | None = "gloo"

    @property
    def leaves_rank_alive(self):
        return self.kind == "raise"

    @property
    def is_silent(self):
        """Whether the others know of it by their timeout only: no connection is closed."""
        return self.kind == "stop" or (self.kind == "raise" and self.place == "user")

    @property
    def must_be_named(self):
        """Whether every other rank waits for this one until its timeout. Otherwise it may see first that another one
        gave up, and name that one."""
        return self.place == "user" and self.is_silent and self.world_size <= MOST_AT_ONCE


class Report(NamedTuple):
    """What a rank saw: the error that ended its steps, when, and what kept the ranks that are left from going on
    together."""

    error: str
    message: str
    time: float
    obstacle: str = ""


class Trial(NamedTuple):
    """What came of a fault. `complaints` is empty if everything is as it must be.

    seconds: from the fault to the error of each of the others.
    """

    fault: Fault
    seconds: dict[int, float]
    messages: dict[int, str]
    complaints: list[str]


class UserError(Exception):
    """The failing rank's own error."""


def run_trial(fault):
    """Start the ranks, let one fail, and judge what the others saw."""
    hears, tells = Pipe(duplex=False)
    survivors = [
        rank for rank in range(fault.world_size) if rank != fault.rank or fault.leaves_rank_alive
    ]
    stay, complaints = fault.kind != "kill", []
    with Ranks(fault.world_size, live, fault, tells, stay=stay, backend=fault.backend) as ranks:
        outcomes = ranks.collect(survivors, START_SECONDS + fault.timeout + SLACK_SECONDS)
        for rank in survivors if not stay else []:
            # a process ends though a message is stuck which will never come through
            process = ranks.processes[rank]
            process.join(10)
            if process.exitcode != 0:
                complaints.append(f"rank {rank} ended with {process.exitcode}")
        if fault.kind == "stop" and hears.poll():  # it finds the groups broken when it goes on
            os.kill(ranks.processes[fault.rank].pid, signal.SIGCONT)
            outcomes |= ranks.collect([fault.rank], fault.timeout + SLACK_SECONDS)
        struck = hears.recv() if hears.poll() else None
    hears.close()
    tells.close()
    complaints += [
        f"rank {rank}: {value}" for rank, (succeeded, value) in outcomes.items() if not succeeded
    ]
    if struck is None:
        complaints.append("the rank never came to the place where it was to fail")
    reports = {rank: outcome.value for rank, outcome in outcomes.items() if outcome.succeeded}
    if not complaints:
        complaints = judge(fault, reports, struck)
    seconds = {
        rank: report.time - (struck or 0) for rank, report in reports.items() if rank != fault.rank
    }
    return Trial(
        fault, seconds, {rank: report.message for rank, report in reports.items()}, complaints
    )


# In the processes of the ranks.


def live(rank, world_size, fault, tells):
    """Steps of forward and backward until an error; then a new context of the ranks that are left."""
    options = {"exchange": fault.exchange}
    if fault.exchange == "mesh":
        options = {"group": mesh_of(2, world_size // 2)}
    cp = ContextParallel(**options, timeout=timedelta(seconds=fault.timeout))
    report = Report("none", "", time.monotonic())
    try:
        take_steps(cp, fault, Injection(fault, tells) if rank == fault.rank else None)
    except (ExchangeError, UserError) as error:
        report = Report(type(error).__name__, str(error), time.monotonic(), in_flight(cp))
    if rank == fault.rank and not fault.leaves_rank_alive:
        return report
    try:
        if rank != fault.rank:
            said = message_of(partial(cp.shard, torch.ones(1, 8)), ExchangeError)
            assert said.startswith("this group has failed before ("), said
            assert "Make a new ContextParallel" in said, said
        go_on(rank, world_size, fault)
    except (RuntimeError, AssertionError) as error:
        return report._replace(obstacle=f"{type(error).__name__}: {error}")
    return report


def in_flight(cp):
    """Messages of a broken context that have not ended. One that ends after torch's profiler stopped would write to
    memory that the profiler has freed."""
    pending = [x for link in cp.ranks.opened if link.failure for x in link._pending]
    names = [
        f"{x.moment}, {handle.deed}"
        for x in pending
        for handle in x.handles
        if not handle.work.is_completed()
    ]
    return f"messages in flight: {'; '.join(names)}" if names else ""


def take_steps(cp, fault, injection):
    pattern = CAUSAL if fault.is_causal else DENSE
    num_heads = max(fault.chunk_bytes // (2 * ROWS * HEAD_DIM * 4), 2)
    x = torch.ones(1, ROWS, num_heads, HEAD_DIM, requires_grad=True)
    for step in range(1, 4):
        out = None
        for stage in ("forward", "backward"):
            if injection is not None:
                injection.enter(step, stage)
            if out is None:
                out = dilated_attention(x, x, x, pattern, parallel=cp)
            else:
                out.sum().backward()


class Injection:
    """Lets this process fail at the place that a fault names."""

    def __init__(self, fault, tells):
        self.fault, self.tells = fault, tells
        self.is_armed = False
        post, route = GroupLink._post, Processes.route

        def failing_post(link, messages, moment):
            is_here = self.is_armed and messages and self.is_place(moment)
            if is_here and not fault.in_flight:
                self.strike()
            pending = post(link, messages, moment)
            if is_here and fault.in_flight:
                self.strike()
            return pending

        def failing_route(*args):
            if self.is_armed and fault.place == "after the handshake":
                self.strike()
            return route(*args)

        GroupLink._post, Processes.route = failing_post, failing_route

    def enter(self, step, stage):
        """Called by the user's loop before every forward and backward."""
        self.is_armed = (step, stage) == (FAILING_STEP, self.fault.stage)
        if self.is_armed and self.fault.place == "user":
            self.strike()

    def is_place(self, moment):
        """A moment names the stage (a handshake's with the number of the call), and then the place."""
        stage, _, place = moment.partition(", ")
        return stage.split(" ")[0] == self.fault.stage and place == self.fault.place

    def strike(self):
        self.is_armed = False
        self.tells.send(time.monotonic())
        if self.fault.kind == "raise":
            raise UserError("the user's own error")
        os.kill(os.getpid(), signal.SIGKILL if self.fault.kind == "kill" else signal.SIGSTOP)


def go_on(rank, world_size, fault):
    """The ranks that are left use the default group among them, and a new context."""
    left = [k for k in range(world_size) if k != fault.rank or fault.leaves_rank_alive]
    for peer in left:
        if peer != rank:
            received = torch.empty(1)
            works = [dist.isend(torch.full((1,), float(rank)), peer), dist.irecv(received, peer)]
            for work in works:
                work.wait(PATIENCE)
            assert received.item() == peer
    if fault.leaves_rank_alive:
        group = dist.group.WORLD
    elif fault.rank % 2:  # a group of the ranks that are left
        group = dist.new_group(left, use_local_synchronization=True, timeout=PATIENCE)
    else:  # or a fresh start
        dist.destroy_process_group()
        store = dist.PrefixStore("after the fault", distributed.store)
        dist.init_process_group("gloo", store=store, rank=left.index(rank), world_size=len(left))
        group = dist.group.WORLD
    cp = ContextParallel(group, timeout=PATIENCE)
    assert cp.world_size == len(left)
    check_step(cp)


# What the others must have seen.

_IN_A_MESSAGE = re.compile(
    r"(?P<moment>(forward|backward), .+): (sending to|waiting for) rank (?P<peer>\d+) "
    r"\(group '(control|data|heads|chunks) of context \w+', rank (?P<own>\d+)\): ."
)
_IN_A_HANDSHAKE = re.compile(
    r"(?P<moment>(forward|backward) \d+), handshake: rank (?P<peer>\d+) did not enter (?P=moment)"
    r"(, or waits there for another rank)? "
    r"\(group 'control of context \w+', rank (?P<own>\d+)\): ."
)


def waited_for(rank, message):
    """The rank that an error names; None if it does not name group, moment and rank."""
    found = _IN_A_MESSAGE.match(message) or _IN_A_HANDSHAKE.match(message)
    return int(found["peer"]) if found and int(found["own"]) == rank else None


def judge(fault, reports, struck):
    """What is wrong with the reports of the ranks."""
    complaints = []
    bound = (fault.timeout if fault.is_silent else 0) + SLACK_SECONDS
    blame = {
        rank: waited_for(rank, report.message)
        for rank, report in reports.items()
        if rank != fault.rank
    }
    for rank, report in reports.items():
        if report.obstacle:
            complaints.append(f"rank {rank} could not go on: {report.obstacle}")
        if rank == fault.rank:
            expected = "UserError" if fault.kind == "raise" else "ExchangeError"
            if report.error != expected:
                complaints.append(f"the failing rank saw {report.error}: {report.message}")
            continue
        if report.error != "ExchangeError":
            complaints.append(f"rank {rank} saw {report.error}: {report.message}")
        elif report.time - struck > bound:
            complaints.append(
                f"rank {rank} saw its error after {report.time - struck:.1f} s, not {bound:.1f} s"
            )
        elif (end := end_of(blame, rank)) != fault.rank:
            complaints.append(f"the error of rank {rank} leads to rank {end}: {report.message}")
        elif fault.must_be_named and blame[rank] != fault.rank:
            complaints.append(
                f"rank {rank} does not name the rank that did not come: {report.message}"
            )
    return complaints


def end_of(blame, rank):
    """From rank to rank along who waited for whom, to one who waited for nobody."""
    for _ in blame:
        if rank in blame:
            rank = blame[rank]
    return rank
