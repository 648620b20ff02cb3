"""Runs a function where no file may grow large, as if the disk were full.

It has a process of its own: the limit would hit pytest's output too. The system says "File too large" then, and "No
space left on device" if the disk is really full. `restart_trials.py` fills a real one.
"""

import os
import resource
import sys
import traceback

from distributed import START


def on_a_full_disk(num_bytes, function, *args, seconds=60):
    """What function(*args) returned, and what it and its processes wrote to stderr, where no file may grow beyond so
    many bytes. `function` must be importable."""
    ours, theirs = START.Pipe(duplex=False)
    process = START.Process(target=_fill, args=(theirs, os.getcwd(), num_bytes, function, args))
    process.start()
    theirs.close()
    try:
        assert ours.poll(seconds), f"no answer within {seconds:g} s"
        value, error, failure = ours.recv()
        process.join(seconds)
    finally:
        process.kill()
        process.join()
        ours.close()
    assert failure is None, failure
    return value, error


def _fill(pipe, folder, num_bytes, function, args):
    os.chdir(folder)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )
    reads, writes = os.pipe()  # has no limit but its own, of 64 KiB
    os.set_blocking(reads, False)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(writes, 2)
    sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
    value, failure = None, None
    try:
        value = function(*args)
    except BaseException:  # noqa: BLE001  whatever it was, the parent reports it
        failure = traceback.format_exc()
    sys.stderr.flush()
    os.write(writes, b"\n")  # so that there is something to read
    pipe.send((value, os.read(reads, 2**16).decode().removesuffix("\n"), failure))
