"""The threads that watch messages."""

from threading import Thread
from weakref import WeakSet

import pytest
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from ring_dilated_attention.ranks import watching


class Ended:
    def wait(self, timeout):
        pass


def posted():
    with record_function("a message of a sentinel"):
        return Ended()


def test_no_profiler_sees_what_sentinels_post():
    """Catches an event of a message that ends after the profiler stopped, and writes to memory that it has freed."""
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads) as seen:
        watching.Sentinel(posted)
    assert not [event.name for event in seen.events() if "sentinel" in event.name]


def test_a_thread_that_does_not_start_is_not_waited_for(monkeypatch):
    """Catches an error when Python ends, which would hide why the thread did not start."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(watching, "with_threads", WeakSet())  # those of others go on
    monkeypatch.setattr(watching, "_threads", WeakSet())
    monkeypatch.setattr(Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start") as error:
        watching.start_thread(print)
    watching.end_all_threads()
    assert error  # whose traceback has kept the thread
