"""What each branch of a job is to its ranks: who shares its segments, and what it sends. Pure integers, no torch."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from .job import Job
from .plan import Plan
from .planner import chunk_finder


class BranchShare(NamedTuple):
    """A branch over all ranks.

    num_sharing: the most ranks that exchange rows of one segment; 1 where all stay at home.
    num_rows: rows of phase 0 in its longest segment, of the num_positions there.
    sent: what all ranks together send of it in a forward, in units of B * D elements.
    """

    segment_length: int
    dilation_rate: int
    num_sharing: int
    num_rows: int
    num_positions: int
    sent: int

    @property
    def travels(self) -> bool:
        return self.num_sharing > 1


def branch_shares(job: Job, plans: Iterable[Plan]) -> list[BranchShare]:
    """One for each branch, from the messages of the plans. A message carries rows of one branch and segment."""
    sizes = [0] * len(job.pattern.branches)
    sharers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for plan in (plan for plan in plans if plan.hops):
        find = chunk_finder(job, plan.rank)
        places: dict[int, tuple[int, int]] = {}  # by offset, where all chunks of one ring lie
        for message in (message for hop in plan.hops for message in hop.sends):
            if message.offset not in places:
                chunk = find(message)
                places[message.offset] = chunk.branch, chunk.origin
            sizes[places[message.offset][0]] += message.size
            sharers[places[message.offset]] |= {message.owner, message.peer}
    longest = max(b - a for a, b in pairwise(job.borders))
    return [
        BranchShare(
            w,
            r,
            num_sharing=max((len(ranks) for (b, _), ranks in sharers.items() if b == branch), default=1),
            num_rows=-(-min(w, longest) // r),
            num_positions=min(w, longest),
            sent=sizes[branch],
        )
        for branch, (w, r) in enumerate(job.pattern.branches)
    ]
