"""The rounds of messages in which all ranks learn what each rank says.

They are the rounds of the dissemination algorithm, which serves any number of ranks.

In round k = 0, 1, ... a rank passes what it knows to the rank 2^k further on. Before round k it knows what 2^k ranks
say, itself included. So each of 2, 3, 4, 5 and 8 ranks sends 1, 2, 2, 3 and 3 messages. If each sent to all others, it
would send 1, 2, 3, 4 and 7. With 2 or 3 ranks these numbers are the same. Then each rank sends to all others, in one
round.
"""

from collections.abc import Iterator

MOST_AT_ONCE = 3  # the most ranks of which each sends to all others in one round


def num_rounds(num_ranks: int) -> int:
    """The number of rounds: ceil(log2 p), or one if each rank sends to all others."""
    return (num_ranks - 1).bit_length() if num_ranks > MOST_AT_ONCE else min(1, num_ranks - 1)


def rounds_of(rank: int, num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Whom a rank sends to, and from whom it receives, in each message of each round."""
    steps = [2**number for number in range((num_ranks - 1).bit_length())]
    for some in [steps] if 1 < num_ranks <= MOST_AT_ONCE else [[step] for step in steps]:
        yield [((rank + step) % num_ranks, (rank - step) % num_ranks) for step in some]
