"""What ranks say before they leave, in the store of their group.

In a handshake in rounds, most ranks have no message from the rank that does not come. They learn of it here.
"""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from .watching import start_thread

_GRACE_SECONDS = 1.0  # another rank may see this much later that messages will not come


NOT_MADE = "did not enter making a ContextParallel"

# Why a rank that is well may not come, by what an error says of it. The first that fits is said.
_USUAL_CAUSES = {
    "did not enter backward": "A rank runs the backward of a call only if its loss depends on the output of that call.",
    NOT_MADE: (
        "If it did make one, these ranks may have made different numbers of contexts of just these ranks before. A "
        "group is named by this number, and each rank waits under another name: make contexts alike on all ranks."
    ),
    "did not enter": (
        "If that rank is well, only some ranks make this call, as in an evaluation under `if rank == 0`, and it waits "
        "for the others. Make it on all ranks, or with a model without `parallel`."
    ),
}


def usual_cause(deed: str, reason: str) -> str:
    """A sentence for an error that comes after the timeout; "" for others."""
    if not re.search("[Tt]imed out|timeout", reason):
        return ""
    return next((f" {cause}" for absence, cause in _USUAL_CAUSES.items() if absence in deed), "")


class Words(NamedTuple):
    """text: why a rank leaves. reason: what the transport said of it. moment, peer: where it waited, and for whom."""

    text: str
    reason: str = ""
    moment: str = ""
    peer: int = -1


DONE = Words("it needs the context no more")


class LastWords:
    """The words of all ranks of a context. Ranks are global."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.store, self.rank, self.has_left = group.get_group_store(), rank, False
        self.is_connecting = False  # whether another rank may be connecting, and look why this one left

    def leave(self, words: Words) -> None:
        """Leave this rank's words. Only the first are kept: what fails later follows from what failed first."""
        if not self.has_left and (words != DONE or self.is_connecting):
            self.has_left = True
            _within(_GRACE_SECONDS, lambda: self.store.set(f"left/{self.rank}", json.dumps(words)))

    def of(self, rank: int) -> Words | None:
        """Another rank's words. None if it has left none when the time of grace is over."""

        def read() -> bytes:
            until = time.monotonic() + _GRACE_SECONDS
            while not self.store.check([f"left/{rank}"]) and time.monotonic() < until:
                time.sleep(0.05)  # not the store's `wait`, which warns on stderr
            return self.store.get(f"left/{rank}") if self.store.check([f"left/{rank}"]) else b"null"

        found = json.loads(_within(2 * _GRACE_SECONDS, read) or "null")
        return found and Words(*found)

    def who_did_not_come(self, own: Words) -> tuple[int, str]:
        """Follow who waits for whom at a moment. Returns the last rank, and how its absence was noticed."""
        before, last, reason = [self.rank], own.peer, own.reason
        while (words := self.of(last)) and words.moment == own.moment and words.peer not in (-1, *before):
            before.append(last)
            last, reason = words.peer, words.reason
        return last, reason + (f" Rank {last} said: {words.text}" if words else "")


def _within(seconds: float, function: Callable[[], bytes | None]) -> bytes | None:
    """What a function of the store returns, or None: the store's host may have died, or be stuck."""
    found: list[bytes | None] = [None]

    def call() -> None:
        with suppress(RuntimeError):
            found[0] = function()

    with suppress(RuntimeError):  # while Python ends it may start no thread
        start_thread(call).join(seconds)
    return found[0]
