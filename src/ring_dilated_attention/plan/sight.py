"""Which queries attend to which keys in a branch, as ranges and masks. Pure integers, no torch.

`Branch.in_reach` says whether a query at one position attends to a key at another position. This file compares
*sections*, which are ranges of positions. For a section of queries and a section of keys, it finds a mask that kernels
can compute. Masks ignore the dilation: in `rows.py` a head reads only every r-th position of a section.

There are three *masks*. CAUSAL and FROM_END need equally many queries and keys. Query i attends to

    FULL        all keys
    CAUSAL      keys 0..i
    FROM_END    keys i and later (a kernel reverses the rows and computes CAUSAL)

In a segment the mask is FULL or CAUSAL. For a sliding window the positions are cut into blocks. A causal window of w
positions has blocks of w positions. A query attends to

    its own block       CAUSAL
    the block before    FROM_END: the first w - 1 queries of a block times the last w - 1 keys of the block before

A window that is not causal has blocks of w // 2 positions. A query attends to

    its own block       FULL
    the block before    FROM_END
    the next block      CAUSAL

Blocks may begin at any position, because a window has the same shape at every position. So each rank's blocks begin at
its first row.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ..pattern import Branch

FULL = "full"
CAUSAL = "causal"
FROM_END = "causal from the end"


class Meeting(NamedTuple):
    """A range of queries times a range of keys, under a mask.

    There are `number` such pairs of ranges, each `step` positions after the previous pair.
    """

    queries: range
    keys: range
    mask: str
    number: int = 1
    step: int = 0


def pairs_under(mask: str, num_queries: int, num_keys: int) -> int:
    """The number of (query, key) pairs in which the query attends to the key under a mask."""
    if mask == FULL:
        return num_queries * num_keys
    assert num_queries == num_keys
    return num_queries * (num_queries + 1) // 2


def meetings(branch: Branch, length: int, *, is_causal: bool) -> Iterator[Meeting]:
    """Yield which queries attend to which keys among positions 0..length-1 of a branch, as meetings.

    A segment, or a block of a window, begins at position 0. First come the meetings of each segment or block with
    itself: each position is in exactly one of these. For a window, the meetings of neighbouring blocks come after them.
    """
    size = block_length(branch, is_causal=is_causal)
    number, rest = divmod(length, size)
    mask = CAUSAL if is_causal else FULL
    if number:
        yield Meeting(range(size), range(size), mask, number, size)
    if rest:
        last = range(number * size, length)
        yield Meeting(last, last, mask)
    if branch.is_window and length > size:
        yield from _crossings(size, branch.window_reach(is_causal=is_causal), length, is_causal)


def block_length(branch: Branch, *, is_causal: bool) -> int:
    """The length of a segment, or of a window's block."""
    if branch.is_window and not is_causal:
        return max(branch.window_reach(is_causal=False), 1)
    return branch.segment_length


def _crossings(size: int, reach: int, length: int, is_causal: bool) -> Iterator[Meeting]:
    """Yield the meetings of a window's neighbouring blocks: queries of one block, and keys of the previous or next
    block.

    size: the length of a block. reach: how many positions back a query attends (and forward, if not causal).
    """
    if reach == 0:
        return
    # `number`: how many borders between blocks are followed by at least `reach` positions.
    number = (length - reach) // size
    if number:
        before = range(size - reach, size)
        after = range(size, size + reach)
        yield Meeting(after, before, FROM_END, number, size)
        if not is_causal:
            yield Meeting(before, after, CAUSAL, number, size)
    border = (number + 1) * size
    # The last block may be short. Let it have m queries. For the m farthest of the `reach` keys before the block, the
    # mask is a triangle. All m queries attend to the rest of the `reach` keys.
    if border < length:
        before = range(border - reach, border)
        after = range(border, length)
        far, near = before[: len(after)], before[len(after) :]
        yield Meeting(after, far, FROM_END)
        yield Meeting(after, near, FULL)
        if not is_causal:
            yield Meeting(far, after, CAUSAL)
            yield Meeting(near, after, FULL)


def mask_between(branch: Branch, query: int, key: int, *, is_causal: bool) -> str | None:
    """The mask for a section of queries and a section of keys. None if no query attends to any key.

    query, key: where the sections begin. Both sections lie in one segment or, for a window, in one document. The two
    sections are the same, or do not overlap. Sections of a window have been cut so that a pair has one mask
    (`rows.cut_apart`).
    """
    if not branch.is_window:
        if is_causal and key >= query:
            return CAUSAL if key == query else None
        return FULL
    reach = branch.window_reach(is_causal=is_causal)
    if key < query:
        last = key + reach  # the last query that attends to the first key
        if last == query:
            return FROM_END
        return FULL if last > query else None
    if is_causal:
        return None
    first = key - reach  # the first query that attends to the first key
    if first == query:
        return CAUSAL
    return FULL if first < query else None
