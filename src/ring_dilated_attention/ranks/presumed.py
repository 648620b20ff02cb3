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
from ..plan.sharding import Borders
from ..run.executor import Means
from ..run.link_contract import Messages, Pending
from .cards import on_stream
from .link import GroupLink


class KnownCall(NamedTuple):
    """A call that was made before. lengths: every rank's number of rows."""

    lengths: tuple[int, ...]
    documents: Borders
    rank_plan: RankPlan
    means: Means


class LengthsChanged(Exception):
    """Another rank has another number of rows than in the call before."""


class Presumed:
    """A handshake in a thread, and a link that carries nothing before it is through.

    found: every rank's number of rows. late: the messages that the thread posts. All others are posted after them.
    """

    def __init__(self, known: KnownCall, link: GroupLink, control: GroupLink, agree: Callable[[], tuple[int, ...]]):
        self.lengths, self.link, self.waits = known.lengths, link, control.waits
        self.num_waits = len(self.waits or ())
        self.late: Future[Pending | None] | None = None
        self.found: Future[tuple[int, ...]] = link.worker.submit(agree)

    def confirm(self) -> None:
        """Wait until the handshake is through. Raises what it raises, and LengthsChanged."""
        start = time.perf_counter()
        if self.found.result() != self.lengths:
            raise LengthsChanged
        if self.waits is not None:  # the thread has waited all the time, but the call only since `start`
            own = [w._replace(start=max(w.start, start), end=max(w.end, start)) for w in self.waits[self.num_waits :]]
            self.waits[self.num_waits :], self.waits = own, None

    def posted_late(self) -> Pending | None:
        """Wait for the thread. Returns the messages that it posted."""
        self.confirm()
        return self.late.result() if self.late else None

    def carry(self, sends: Messages, receives: Messages, moment: str) -> Pending:
        if self.found.done() or self.late:
            self.posted_late()
            return self.link.carry(sends, receives, moment)
        from_here = _from_here(next(x for x, _ in (*sends, *receives)))

        def post() -> Pending | None:
            if self.found.exception() is not None or self.found.result() != self.lengths:
                return None  # `confirm` raises. An error here would keep the messages' memory
            with from_here():
                return self.link.carry(sends, receives, moment)

        self.late = self.link.worker.submit(post)
        return _Late(self)

    def carry_apart(self, sends: Messages, receives: Messages, moment: str) -> tuple[Pending, Pending]:
        self.posted_late()
        return self.link.carry_apart(sends, receives, moment)


class _Late(NamedTuple):
    """Messages that the thread posts after the handshake."""

    presumed: Presumed

    def wait(self) -> None:
        posted = self.presumed.posted_late()
        assert posted is not None
        posted.wait()


def _from_here(x: Tensor) -> Callable[[], AbstractContextManager[object]]:
    """For a thread: a stream that waits for the work that the GPU has now, and not for what it is given later. (No GPU
    has run this.)"""
    if not x.is_cuda:
        return nullcontext
    stream = torch.cuda.Stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    return lambda: on_stream(stream)
