"""What ranks leave in the store, read back without processes: who did not come, and what it said."""

import threading
import time

import pytest
import torch.distributed as dist

from ring_dilated_attention.plan.rounds import rounds_of
from ring_dilated_attention.ranks import last_words
from ring_dilated_attention.ranks.last_words import LastWords, Words

MOMENT = "forward 2, handshake"


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(last_words, "_GRACE_SECONDS", 0.1)
    group = Group(dist.HashStore())
    return [LastWords(group, rank) for rank in range(8)]


class Group:
    def __init__(self, store):
        self.store = store

    def get_group_store(self):
        return self.store


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


def stuck(num_ranks, absent):
    """For whom each rank waits at the end, if one rank does not come. None: for nobody."""
    turns = [list(rounds_of(rank, num_ranks)) for rank in range(num_ranks)]
    passed = [0] * num_ranks  # rounds that each rank has ended; it sends in the next one too
    for _ in range(num_ranks):  # more than enough
        for rank in set(range(num_ranks)) - {absent}:
            while passed[rank] < len(turns[rank]):
                if any(x == absent or passed[x] < passed[rank] for _, x in turns[rank][passed[rank]]):
                    break
                passed[rank] += 1

    def late(turn: list[list[tuple[int, int]]], done: int) -> int | None:
        sources = [source for _, source in turn[done]] if done < len(turn) else []
        return next((x for x in sources if x == absent or passed[x] < done), None)

    found = [late(turn, done) for turn, done in zip(turns, passed, strict=True)]
    return [None if rank == absent else peer for rank, peer in enumerate(found)]


@pytest.mark.parametrize("num_ranks", [*range(2, 18), 31, 64])
def test_whoever_waits_in_rounds_finds_who_did_not_come(num_ranks, monkeypatch):
    """Also where the two exchange no message. Catches a search that ends at a rank which waits itself."""
    monkeypatch.setattr(last_words, "_GRACE_SECONDS", 0.0)
    indirect = 0
    for absent in {0, 1, num_ranks // 2, num_ranks - 1}:
        waits, group = stuck(num_ranks, absent), Group(dist.HashStore())
        words = [
            None if peer is None else waiting(peer)._replace(reason=f"from {rank}") for rank, peer in enumerate(waits)
        ]
        found = [LastWords(group, rank) for rank in range(num_ranks)]
        monkeypatch.setattr(LastWords, "of", lambda self, rank, words=words: words[rank])
        for rank, own in enumerate(words):
            if own is not None:
                who, reason = found[rank].who_did_not_come(own)
                assert who == absent
                assert waits[int(reason.removeprefix("from "))] == absent
                indirect += own.peer != absent
    assert (indirect > 0) == (num_ranks > 3)


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
    rank = LastWords(Group(store), 6)
    rank.leave(waiting(3))
    assert rank.who_did_not_come(waiting(3)) == (3, "Timed out.")
    assert time.monotonic() - start < 5
    store.goes_on.set()
