"""The rounds of a handshake, without processes: everybody hears of everybody."""

from functools import reduce
from operator import or_

import pytest

from ring_dilated_attention.plan.rounds import num_rounds, rounds_of


def heard(num_ranks, count=None):
    """Of whom each rank has heard at the end, as bits, if it goes this many rounds (default: all)."""
    rounds = list(
        zip(*(list(rounds_of(rank, num_ranks)) for rank in range(num_ranks)), strict=True)
    )
    known = [1 << rank for rank in range(num_ranks)]
    for turns in rounds[:count]:
        for number in range(len(turns[0])):
            for rank, turn in enumerate(turns):
                assert turns[turn[number][0]][number][1] == rank, "a message that nobody expects"
        known = [
            reduce(or_, (known[source] for _, source in turn), known[rank])
            for rank, turn in enumerate(turns)
        ]
    return known


@pytest.mark.parametrize("num_ranks", [*range(1, 65), 100, 127, 129, 1000, 1024, 4095, 4096])
def test_everybody_hears_of_everybody(num_ranks):
    """Catches a rank that is left out, and rounds or messages too few or too many."""
    everybody = (1 << num_ranks) - 1
    assert set(heard(num_ranks)) == {everybody}
    assert num_ranks == 1 or everybody not in heard(num_ranks, num_rounds(num_ranks) - 1)
    # of rounds, and of messages to all others, the fewer; up to 3 ranks they are as many, and go in one round
    turns, fewest = list(rounds_of(0, num_ranks)), (num_ranks - 1).bit_length()
    assert sum(map(len, turns)) == fewest
    assert len(turns) == num_rounds(num_ranks) == (1 if num_ranks == 3 else fewest)
