"""The rounds of messages by which every rank gets the data of every other rank (the dissemination algorithm).

In round k = 0, 1, ... rank i of p sends all data that it has to rank (i + 2^k) mod p. Before round k it has the data of
2^k ranks, itself included. So a rank sends one message in each of ceil(log2 p) rounds:

    ranks                               2   3   4   5   8
    messages that a rank sends          1   2   2   3   3
    if it sent to all others directly   1   2   3   4   7

With 2 or 3 ranks, both ways need equally many messages. So each rank sends to all others directly, in a single round.
"""

from collections.abc import Iterator

MOST_AT_ONCE = 3  # with at most this many ranks, each rank sends to all others in a single round


def num_rounds(num_ranks: int) -> int:
    """The number of rounds: ceil(log2 p), or one if each rank sends to all others."""
    return (num_ranks - 1).bit_length() if num_ranks > MOST_AT_ONCE else min(1, num_ranks - 1)


def rounds_of(rank: int, num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """For each round, a list of (rank to send to, rank to receive from): one pair for each message of the rank."""
    steps = [2**number for number in range((num_ranks - 1).bit_length())]
    for some in [steps] if 1 < num_ranks <= MOST_AT_ONCE else [[step] for step in steps]:
        yield [((rank + step) % num_ranks, (rank - step) % num_ranks) for step in some]
