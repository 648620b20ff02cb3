"""The rounds of a handshake, without processes: everybody hears of everybody."""

import pytest

from ring_dilated_attention.plan.rounds import num_rounds, rounds_of


def heard(num_ranks, count=None):
    """Of whom each rank has heard at the end, as bits, if it goes this many rounds (default: all)."""
    rounds = list(zip(*(list(rounds_of(rank, num_ranks)) for rank in range(num_ranks)), strict=True))
    known = [1 << rank for rank in range(num_ranks)]
    for turns in rounds[:count]:
        for rank, turn in enumerate(turns):
            assert turns[turn[0]][1] == rank, "a message that nobody expects"
        known = [known[rank] | known[turn[1]] for rank, turn in enumerate(turns)]
    return known


@pytest.mark.parametrize("num_ranks", [*range(1, 65), 100, 127, 129, 1000, 1024, 4095, 4096])
def test_everybody_hears_of_everybody(num_ranks):
    """Catches a rank that is left out, and a round too few or too many."""
    everybody = (1 << num_ranks) - 1
    assert set(heard(num_ranks)) == {everybody}
    assert num_ranks == 1 or everybody not in heard(num_ranks, num_rounds(num_ranks) - 1)
    assert 2 ** num_rounds(num_ranks) >= num_ranks


def test_messages_are_as_few_as_was_counted():
    for num_ranks, rounds in ((1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (4096, 12)):
        assert len(list(rounds_of(0, num_ranks))) == num_rounds(num_ranks) == rounds
