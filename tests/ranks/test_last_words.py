"""What ranks leave in the store, read back without processes: who did not come, and what it said."""

import threading
import time

import pytest
import torch.distributed as dist

from ring_dilated_attention.ranks import last_words
from ring_dilated_attention.ranks.last_words import LastWords, Words

MOMENT = "forward 2, handshake"


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(last_words, "_GRACE_SECONDS", 0.1)
    store = dist.HashStore()
    return [LastWords(store, rank) for rank in range(8)]


def waiting(peer, moment=MOMENT):
    return Words(f"{moment}: waiting for {peer}", "Timed out.", moment, peer)


def test_the_rank_that_left_no_words_did_not_come(ranks):
    """Rank 6 waits for 5, which waits for 3, which does not come: the reason is that of rank 5."""
    ranks[5].leave(waiting(3)._replace(reason="Connection closed."))
    assert ranks[6].who_did_not_come(waiting(5)) == (3, "Connection closed.")
    assert ranks[5].who_did_not_come(waiting(3)) == (3, "Timed out.")


def test_a_rank_in_another_moment_did_not_come(ranks):
    """Catches a chain that goes on through a rank which never was where the others are."""
    ranks[5].leave(waiting(3))
    ranks[3].leave(waiting(1, "forward, hop 1, keys and values"))
    said = "Timed out. Rank 3 said: forward, hop 1, keys and values: waiting for 1"
    assert ranks[6].who_did_not_come(waiting(5)) == (3, said)


def test_a_rank_that_failed_says_why(ranks):
    """And its first words are kept."""
    ranks[3].leave(Words("MemoryError: too much"))
    ranks[3].leave(waiting(0))
    assert ranks[6].who_did_not_come(waiting(3)) == (3, "Timed out. Rank 3 said: MemoryError: too much")


def test_ranks_that_blame_each_other(ranks):
    """Catches a search without end, and a rank that names itself."""
    ranks[3].leave(waiting(6))
    assert ranks[6].who_did_not_come(waiting(3)) == (3, f"Timed out. Rank 3 said: {waiting(6).text}")


class StuckStore:
    def __init__(self):
        self.goes_on = threading.Event()

    def check(self, keys):
        self.goes_on.wait(30)
        raise RuntimeError("the host has gone")

    def set(self, key, value):
        raise RuntimeError("the host has gone")


def test_a_store_that_does_not_answer(monkeypatch):
    """Catches an error of the store in place of the rank's own, and a wait for it without end."""
    monkeypatch.setattr(last_words, "_GRACE_SECONDS", 0.1)
    store, start = StuckStore(), time.monotonic()
    rank = LastWords(store, 6)
    rank.leave(waiting(3))
    assert rank.who_did_not_come(waiting(3)) == (3, "Timed out.")
    assert time.monotonic() - start < 5
    store.goes_on.set()
