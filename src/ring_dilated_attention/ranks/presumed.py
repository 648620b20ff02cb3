"""A call computes with its own rows while its handshake is under way. Only what it sends waits for the handshake.

It presumes that every rank repeats a call. If one does not, what was computed is dropped.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.exchange import RankPlan
from ..run.executor import Means
from ..run.link_contract import Messages, Pending
from .link import GroupLink


class KnownCall(NamedTuple):
    """A call that was made before. lengths: every rank's number of rows."""

    lengths: tuple[int, ...]
    rank_plan: RankPlan
    means: Means


class LengthsChanged(Exception):
    """Another rank has another number of rows than in the call before."""


class Presumed:
    """A handshake in a thread, and a link that carries nothing before it is through.

    found: every rank's number of rows.
    """

    def __init__(self, known: KnownCall, link: GroupLink, control: GroupLink, agree: Callable[[], tuple[int, ...]]):
        self.lengths, self.link, self.waits = known.lengths, link, control.waits
        self.num_waits = len(self.waits or ())
        self.found: Future[tuple[int, ...]] = link.worker.submit(agree)

    def confirm(self) -> None:
        """Wait until the handshake is through. Raises what it raises, and LengthsChanged."""
        start = time.perf_counter()
        if self.found.result() != self.lengths:
            raise LengthsChanged
        if self.waits is not None:  # the thread has waited all the time, but the call only since `start`
            own = [w._replace(start=max(w.start, start), end=max(w.end, start)) for w in self.waits[self.num_waits :]]
            self.waits[self.num_waits :], self.waits = own, None

    def carry(self, sends: Messages, receives: Messages, moment: str) -> Pending:
        if self.found.done():
            self.confirm()
            return self.link.carry(sends, receives, moment)
        from_here = _from_here(next(x for x, _ in (*sends, *receives)))

        def post() -> Pending:
            if self.found.result() != self.lengths:
                raise LengthsChanged
            with from_here():
                return self.link.carry(sends, receives, moment)

        return _Late(self, self.link.worker.submit(post))

    def carry_apart(self, sends: Messages, receives: Messages, moment: str) -> tuple[Pending, Pending]:
        self.confirm()  # a program waits for its first messages before it sends in this way
        return self.link.carry_apart(sends, receives, moment)


class _Late(NamedTuple):
    """Messages that the thread posts after the handshake."""

    handshake: Presumed
    posted: Future[Pending]

    def wait(self) -> None:
        self.handshake.confirm()
        self.posted.result().wait()


def _from_here(x: Tensor) -> Callable[[], AbstractContextManager[object]]:
    """For a thread: to go on after what the GPU was given so far, and not after what it is given meanwhile. (No GPU has
    run this.)"""
    if not x.is_cuda:
        return nullcontext
    stream = torch.cuda.Stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    return lambda: torch.cuda.stream(stream)
