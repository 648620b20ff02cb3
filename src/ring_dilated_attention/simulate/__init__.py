"""Imitates ranks in one process: all ranks of a sequence, or one rank of any job. Measures what ranks send and hold."""

from .all_ranks import all_ranks
from .measuring import measuring
from .one_rank import OtherRanks, one_rank

__all__ = ["OtherRanks", "all_ranks", "measuring", "one_rank"]
