"""The threads that watch messages."""

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from ring_dilated_attention.ranks.watching import Sentinel


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
        Sentinel(posted)
    assert not [event.name for event in seen.events() if "sentinel" in event.name]
