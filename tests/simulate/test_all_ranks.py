"""Ranks simulated in one process run where their caller runs. What they compute: `tests/ranks/test_ring.py`."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from ring_dilated_attention.simulate.all_ranks import run_in_turn


def test_simulated_ranks_run_on_the_stream_of_the_caller(monkeypatch):
    """Catches threads on the default stream, whose kernels may run before those that make their inputs. And threads
    that go back to GPU 0 at their end, where the process would open a context of half a GB.

    A thread begins with the first device and its default stream; a stand-in plays CUDA.
    """
    entered, devices = [], []

    @contextmanager
    def stream(which):
        entered.append((which, threading.get_ident()))
        yield

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda: SimpleNamespace(device="cuda:1", thread=threading.get_ident()),
    )
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    threads = run_in_turn(3, lambda rank, link: threading.get_ident())
    assert [(which.thread, thread) for which, thread in entered] == [
        (threading.get_ident(), x) for x in threads
    ]
    assert devices == 3 * ["cuda:1"]  # each thread, for good
