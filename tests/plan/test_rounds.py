"""The rounds of a handshake, without processes: everybody hears of everybody, and who did not come is found."""

import pytest

from ring_dilated_attention.plan.rounds import chain, goes_in_rounds, num_latencies, num_rounds, rounds_of


def heard(num_ranks, count=None):
    """Of whom each rank has heard at the end, as bits, if it goes this many rounds (default: all)."""
    rounds = list(zip(*(list(rounds_of(rank, num_ranks)) for rank in range(num_ranks)), strict=True))
    known = [1 << rank for rank in range(num_ranks)]
    for turns in rounds[:count]:
        for rank, turn in enumerate(turns):
            assert turns[turn.to].source == rank, "a message that nobody expects"
        known = [known[rank] | known[turn.source] for rank, turn in enumerate(turns)]
    return known


@pytest.mark.parametrize("num_ranks", [*range(1, 65), 100, 127, 129, 1000, 1024, 4095, 4096])
def test_everybody_hears_of_everybody(num_ranks):
    """Catches a rank that is left out, and a round too few or too many."""
    everybody = (1 << num_ranks) - 1
    assert set(heard(num_ranks)) == {everybody}
    assert num_ranks == 1 or everybody not in heard(num_ranks, num_rounds(num_ranks) - 1)
    assert 2 ** num_rounds(num_ranks) >= num_ranks


def test_messages_are_as_few_as_was_counted():
    """The counts that the rule states, and that it follows from them."""
    for num_ranks, rounds, others in (
        (1, 0, 0),
        (2, 1, 1),
        (3, 2, 2),
        (4, 2, 3),
        (5, 3, 4),
        (8, 3, 7),
        (4096, 12, 4095),
    ):
        assert len(list(rounds_of(0, num_ranks))) == num_rounds(num_ranks) == rounds
        assert goes_in_rounds(num_ranks) == (rounds < others)
        assert num_latencies(num_ranks) == (rounds if rounds < others else min(others, 1))


def stuck(num_ranks, absent):
    """For whom each rank waits at the end, if one rank does not come. None: for nobody."""
    done = [0] * num_ranks  # rounds that each rank has sent
    while True:
        before = list(done)
        for rank in set(range(num_ranks)) - {absent}:
            turns = list(rounds_of(rank, num_ranks))
            # It sends round k after it has received those before.
            while done[rank] < len(turns) and (done[rank] == 0 or done[turns[done[rank] - 1].source] > done[rank] - 1):
                done[rank] += 1
        if done == before:
            break
    waits = {}
    for rank in range(num_ranks):
        late = [turn.source for number, turn in enumerate(rounds_of(rank, num_ranks)) if done[turn.source] <= number]
        waits[rank] = late[0] if late and rank != absent else None
    return waits


@pytest.mark.parametrize("num_ranks", [*range(2, 18), 31, 64])
def test_whoever_waits_finds_who_did_not_come(num_ranks):
    """Also where the two exchange no message. Catches a chain that ends at a rank which waits itself."""
    indirect = 0
    for absent in range(num_ranks):
        waits = stuck(num_ranks, absent)
        assert any(peer is not None for peer in waits.values())
        for rank, peer in waits.items():
            if peer is not None:
                found = chain(rank, peer, waits.get)
                assert found[-1] == absent
                assert len(found) <= num_rounds(num_ranks)
                indirect += len(found) > 1
    assert (indirect > 0) == (num_ranks > 3)


def test_a_chain_ends_where_ranks_wait_for_each_other():
    """Catches a loop without end: a rank that comes too late finds the others gone, which waited for it."""
    assert chain(0, 1, {1: 2, 2: 1}.get) == [1, 2]
    assert chain(0, 1, {1: 0}.get) == [1]
