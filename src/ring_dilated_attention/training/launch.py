"""`rda train --ranks P`: the ranks run under torchrun, one process each on this machine. No torch in this process."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from .interrupt import NOTICE, SIGNALS, STDERR

ABORTED = -1


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(arguments: Sequence[str], num_ranks: int) -> int:
    """Run `rda train <arguments>` on every rank and return torchrun's exit code, or ABORTED after a second request.

    torchrun gets a session of its own, so that Ctrl-C reaches only this process, which passes it on as the end of the
    ranks' stdin. torchrun itself would give them 30 seconds to save and end in a traceback.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // num_ranks)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [*torchrun, "-m", "ring_dilated_attention.commands.cli", "train", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    assert process.stdin is not None
    pipe = process.stdin

    aborted = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal aborted
        if pipe.closed:
            aborted = True
            process.send_signal(signal.SIGHUP)  # torchrun passes it on, and to the ranks it is no request
        else:
            os.write(STDERR, NOTICE)
            pipe.close()

    previous = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        code = process.wait()
        return ABORTED if aborted else code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
