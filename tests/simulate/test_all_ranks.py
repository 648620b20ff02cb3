"""Ranks simulated in one process run where their caller runs. What they compute: `tests/ranks/test_ring.py`."""

import threading
from contextlib import contextmanager

import torch

from ring_dilated_attention.simulate.all_ranks import run_in_turn


def test_simulated_ranks_run_on_the_stream_of_the_caller(monkeypatch):
    """Catches threads on the default stream, whose kernels may run before those that make their inputs.

    A thread begins with the first device and its default stream; a stand-in plays CUDA.
    """
    entered = []

    @contextmanager
    def stream(which):
        entered.append((which, threading.get_ident()))
        yield

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: f"stream of {threading.get_ident()}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    threads = run_in_turn(3, lambda rank, link: threading.get_ident())
    assert entered == [(f"stream of {threading.get_ident()}", thread) for thread in threads]
