"""A rank fails in the middle of a hop (an exchange with its neighbours). Which errors do other ranks get, and when?"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ring_dilated_attention import ContextParallel, DilatedPattern
from ring_dilated_attention.commands.local_ranks import RankFailedError, Worker
from ring_dilated_attention.ranks.link import ExchangeError, GroupLink

from ..device import synchronize
from ..measure import attend
from ..parts import Row
from .settings import KILLED_WAITING, RAISES, Settings

SLACK_SECONDS = 5  # beyond the timeout: a busy machine needs time to close connections


class StruckError(Exception):
    """The error that the failing rank raises."""


def fault(settings: Settings, seconds: float, kind: str) -> list[Row]:
    """Let the last rank fail in the middle of a hop. Returns a row with the errors of the others, and their seconds.

    kind: how it fails, of KILLED, KILLED_WAITING and RAISES.
    """
    reports: dict[tuple[int, str], Any] = {}

    def on_report(rank: int, report: tuple[str, Any]) -> None:
        name, value = report
        reports[rank, name] = value

    failures = ""
    last = settings.num_ranks - 1
    with TemporaryDirectory() as folder:
        try:
            settings.run_ranks(seconds, _fault, kind, Path(folder), on_report=on_report)
        except RankFailedError as raised:
            failures = str(raised)
    ended = time.monotonic()
    struck = reports.get((last, "struck"))
    if struck is None:
        raise RuntimeError(f"rank {last} never came to the place where it was to fail: {failures}")
    failure_of = {}
    for line in failures.splitlines():
        if line.startswith("rank ") and ": " in line:
            name, failure = line.split(": ", 1)
            failure_of[name] = failure
    others = []
    for rank in range(last):
        failure = failure_of.get(f"rank {rank}", "it went on")
        without_error = ("no error", failure, ended)
        error, message, when = reports.get((rank, "error"), without_error)
        other = {
            "rank": rank,
            "error": error,
            "message": message,
            "seconds": when - struck,
            # the seconds from this rank's error until its device was idle
            "device_seconds": reports.get((rank, "device")),
        }
        others.append(other)
    words = []
    for other in others:
        word = "rank {rank}: {error} after {seconds:.1f} s: {message}".format_map(other)
        words.append(word)
    row = {
        "what": f"rank {last} {kind}",
        "passed": all(is_told(settings, kind, other) for other in others),
        "found": "; ".join(words),
        "others": others,
        "failures": failures[-4000:],
    }
    return [row]


def is_told(settings: Settings, kind: str, other: Row) -> bool:
    """Whether another rank got an ExchangeError in time.

    A rank that waits for its device cannot be told. For this kind of fault it is enough that the wait ended.
    """
    has_idle_device = other["device_seconds"] is not None
    if kind == KILLED_WAITING:
        # NCCL's watchdog ends the messages on the device, or the process.
        return has_idle_device or other["message"] == "died without a word"
    is_in_time = other["seconds"] <= settings.timeout + SLACK_SECONDS
    is_named = other["error"] == ExchangeError.__name__
    return is_named and has_idle_device and is_in_time


def _fault(worker: Worker, settings: Settings, kind: str, folder: Path) -> None:
    """On one rank: three forwards and backwards. In the second of them the last rank fails.

    Reports this rank's error, with the time at which it came, and then the seconds until its device was idle.
    """
    device = settings.device(worker.rank)
    num_ranks = worker.world_size
    waited_for = device if kind == KILLED_WAITING else "cpu"
    parallel = ContextParallel(exchange="ring", timeout=timedelta(seconds=settings.timeout))
    x = torch.ones(1, settings.fault_rows, 16, 64, device=device, requires_grad=True)
    try:
        for number in range(3):
            if worker.rank == num_ranks - 1 and number == 1:
                _strike_in_a_hop(kind, worker.report)
            out = attend([x, x, x], DilatedPattern.dense(), parallel)
            synchronize(waited_for)
            torch.autograd.grad(out, x, torch.ones_like(out))
            synchronize(waited_for)
    except (RuntimeError, StruckError) as error:
        begun = time.monotonic()
        worker.report(("error", (type(error).__name__, str(error), begun)))
        synchronize(device)
        worker.report(("device", time.monotonic() - begun))
    # A process that ends closes its connections, which is another fault. So wait until all ranks have had their error.
    (folder / str(worker.rank)).touch()
    num_survivors = num_ranks if kind == RAISES else num_ranks - 1
    until = time.monotonic() + settings.timeout + SLACK_SECONDS
    while len(list(folder.iterdir())) < num_survivors and time.monotonic() < until:
        time.sleep(0.05)


def _strike_in_a_hop(kind: str, report: Callable[[Any], None]) -> None:
    """Let this process fail as soon as it has posted the messages of a forward's first hop."""
    post = GroupLink._post

    def failing(link: GroupLink, messages: Any, moment: str) -> Any:
        pending = post(link, messages, moment)
        if messages and moment.startswith("forward, hop 1"):
            report(("struck", time.monotonic()))
            if kind == RAISES:
                raise StruckError("the failing rank's own error")
            os.kill(os.getpid(), 9)
        return pending

    GroupLink._post = failing  # type: ignore[method-assign,assignment]
