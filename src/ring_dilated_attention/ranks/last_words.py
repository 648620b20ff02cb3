"""What ranks say before they leave, in the store of their group.

In a handshake in rounds, most ranks have no message from the rank that does not come. They learn of it here.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event
from typing import Any, NamedTuple

import torch.distributed as dist

from ..plan.rounds import chain
from .watching import start_thread

_GRACE_SECONDS = 1.0  # so much later may another rank learn that messages will not come


class Words(NamedTuple):
    """text: why a rank leaves. reason: what the transport said of it. moment, peer: in what it waited, and for whom;
    the peer is None if the rank left for an error of its own."""

    text: str
    reason: str = ""
    moment: str = ""
    peer: int | None = None


class LastWords:
    """The words of the ranks of a context, and those of this rank. Ranks are global."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store, self.rank, self.has_left = store, rank, False

    def leave(self, words: Words) -> None:
        """Leave the words of this rank. The first are kept: what fails later follows from what failed first."""
        if not self.has_left:
            self.has_left = True
            _within(_GRACE_SECONDS, lambda: self.store.set(f"left/{self.rank}", json.dumps(words)))

    def of(self, rank: int) -> Words | None:
        """The words of another rank, or None if it has left none when the time of grace is over."""

        def read() -> str | None:
            until, pause = time.monotonic() + _GRACE_SECONDS, 0.01  # the store's own `wait` warns on stderr
            while not self.store.check([f"left/{rank}"]):
                if time.monotonic() > until:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
            return self.store.get(f"left/{rank}").decode()

        text = _within(2 * _GRACE_SECONDS, read)
        return None if text is None else Words(*json.loads(text))

    def who_did_not_come(self, own: Words) -> tuple[int, str]:
        """The rank for which this one, and those for which it waits, wait in their moment; and why one knows of it."""
        assert own.peer is not None
        found = {self.rank: own}

        def waits_for(rank: int) -> int | None:
            words = self.of(rank)
            if words is not None:
                found[rank] = words
            return words.peer if words is not None and words.moment == own.moment else None

        *before, last = [self.rank, *chain(self.rank, own.peer, waits_for)]
        said = f" Rank {last} said: {found[last].text}" if last in found else ""
        return last, found[before[-1]].reason + said


def _within(seconds: float, function: Callable[[], Any]) -> Any:
    """What a function of the store returns, or None: the store's host may have died, or be stuck."""
    found: list[Any] = []
    ended = Event()

    def call() -> None:
        with suppress(RuntimeError):
            found.append(function())
        ended.set()

    start_thread(call)
    ended.wait(seconds)
    return found[0] if found else None
