"""Items measured in a process of their own, so that a kernel on a new card cannot take the others with it.

It may hang the card, or make an access after which nothing runs in its process any more. Such an item is left out of
the next process; an error that a process outlives is for the process to keep as the item's reason.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ring_dilated_attention.commands.local_ranks import Launch, RankFailedError, run_ranks

from .gate import GateError

MOST_LOST = 3


class Budget:
    """What is left of the seconds that a case may take, so that it ends with a record and is not ended from outside."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.start = seconds, time.monotonic()

    def of(self, most: float) -> float:
        """At most so many seconds."""
        return min(most, self.seconds - (time.monotonic() - self.start))


def measure_apart(
    function: Callable[..., dict[int, Any]],
    settings: Any,
    number: int,
    on_start: Callable[[int], None],
    seconds: float,
    budget: Budget,
) -> tuple[dict[int, Any], dict[int, str]]:
    """function(worker, settings, left_out) in a process of its own, and again without the item that ended it.

    It returns results by item, 0 .. number - 1, and reports each item before it begins. A process has so many
    seconds, and all of them what is left of the budget.

    Returns:
        What it returned, and the reasons of the items that are not in it.
    """
    lost: dict[int, str] = {}
    while len(lost) < min(MOST_LOST, number) and (left := budget.of(seconds)) > 0:
        begun: list[int] = []

        def on_report(rank: int, item: int, begun: list[int] = begun) -> None:
            begun.append(item)
            on_start(item)

        launch = Launch(1, num_threads=torch.get_num_threads(), seconds=left)
        try:
            [found] = run_ranks(launch, function, settings, tuple(lost), on_report=on_report)
            return found, lost
        except RankFailedError as error:
            reason = "its process was lost: " + _last_line(error).removeprefix("rank 0: ")
            if not begun:
                return {}, lost | {i: reason for i in range(number) if i not in lost}
            lost[begun[-1]] = reason
    why = (
        f"{len(lost)} processes were lost before it"
        if len(lost) == MOST_LOST
        else "the budget was spent"
    )
    return {}, {i: lost.get(i, f"not measured: {why}") for i in range(number)}


def refuse_empty(rows: Sequence[dict[str, Any]]) -> None:
    """Rows that are nothing but reasons make no record.

    Raises:
        GateError: with the first of them.
    """
    if all("reason" in row for row in rows):
        raise GateError(f"nothing could be measured, first because: {rows[0]['reason']}")


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
