"""Ranks that one process imitates: all of a ring, or one of a job of any size. Measures what they send and hold."""

from .all_ranks import all_ranks
from .measuring import measuring
from .one_rank import OtherRanks, one_rank

__all__ = ["OtherRanks", "all_ranks", "measuring", "one_rank"]
