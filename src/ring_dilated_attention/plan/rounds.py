"""The rounds in which all ranks of a group learn what each of them says (dissemination), for any number of ranks.

In round k a rank passes what it knows to the rank 2^k further on. By then it knows of 2^k ranks, itself included. At 2,
3, 4, 5 and 8 ranks a rank sends 1, 2, 2, 3 and 3 messages so. If it sent to all others, it would be 1, 2, 3, 4 and 7.
"""

from collections.abc import Iterator


def num_rounds(num_ranks: int) -> int:
    """ceil(log2 p): as many messages as a rank sends."""
    return (num_ranks - 1).bit_length()


def rounds_of(rank: int, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Whom a rank sends to, and from whom it receives, round by round."""
    for number in range(num_rounds(num_ranks)):
        yield (rank + 2**number) % num_ranks, (rank - 2**number) % num_ranks
