"""Who sees whom in a branch, as queries times keys under a mask. Pure integers, no torch.

`Branch.in_reach` defines for two positions whether one sees the other. This file says it for sections of positions, as
kernels compute it. Planner, counts and forecast use it. The dilation is left out here: of a section, a head reads every
r-th position (`rows.py`).

A *mask* is one of three. Query i of a section sees

    FULL        all keys
    CAUSAL      keys 0..i, of as many keys as queries
    FROM_END    keys i and later, of as many keys as queries (a kernel computes it as causal, in reverse order)

A segment's mask is full, or causal. A sliding window is cut into blocks. A causal window of w has blocks of w rows:

    query i of a block      sees keys 0..i of its block (CAUSAL)
                            and the keys of the block before that are less than w away (FROM_END, w - 1 of each)

A centred window of w has blocks of h = w // 2 rows:

    query i of a block      sees its block (FULL), keys of the block before (FROM_END) and of the next block (CAUSAL)

A block may begin anywhere, since a window is the same everywhere. So each rank begins at its first row.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ..pattern import Branch

FULL = "full"
CAUSAL = "causal"
FROM_END = "causal from the end"


class Meeting(NamedTuple):
    """Positions of queries times positions of keys, `number` times in all, each time `step` positions further."""

    queries: range
    keys: range
    mask: str
    number: int = 1
    step: int = 0

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs there are for a head that reads every position."""
        return self.number * pairs_under(self.mask, len(self.queries), len(self.keys))


def pairs_under(mask: str, num_queries: int, num_keys: int) -> int:
    """How many (query, key) pairs a mask leaves."""
    if mask == FULL:
        return num_queries * num_keys
    assert num_queries == num_keys
    return num_queries * (num_queries + 1) // 2


def meetings(branch: Branch, length: int, *, is_causal: bool) -> Iterator[Meeting]:
    """Who sees whom among positions 0..length-1, counted from the border of a segment, or from a window's first row.

    The meetings of a section with itself come first: each position is in exactly one of them.
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
    """The length of a segment, or of a block of a window: the sections that meet themselves."""
    if branch.is_window and not is_causal:
        return max(branch.window_reach(is_causal=False), 1)
    return branch.segment_length


def _crossings(size: int, reach: int, length: int, is_causal: bool) -> Iterator[Meeting]:
    """What a window sees across the borders of its blocks."""
    if reach == 0:
        return
    number = (length - reach) // size  # of borders that have `reach` positions after them
    if number:
        before = range(size - reach, size)
        after = range(size, size + reach)
        yield Meeting(after, before, FROM_END, number, size)
        if not is_causal:
            yield Meeting(before, after, CAUSAL, number, size)
    border = (number + 1) * size
    # If the last block is short, with m queries: the m farthest keys under a triangle, and all nearer keys.
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
    """The mask between two sections of one segment, or of a window, that begin at these positions; None if no query
    sees a key.

    Two different sections do not overlap. Sections of a window have been cut apart (`rows.cut_apart`).
    """
    if not branch.is_window:
        if is_causal and key >= query:
            return CAUSAL if key == query else None
        return FULL
    reach = branch.window_reach(is_causal=is_causal)
    if key < query:
        last = key + reach  # the last query that sees the first key
        if last == query:
            return FROM_END
        return FULL if last > query else None
    if is_causal:
        return None
    first = key - reach  # the first query that sees the first key
    if first == query:
        return CAUSAL
    return FULL if first < query else None
