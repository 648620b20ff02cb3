"""Imitates ranks in one process, either all ranks of a job or one of them. Measures what each rank sends and holds."""

from .all_ranks import all_ranks
from .measuring import measuring
from .one_rank import OtherRanks, one_rank

__all__ = ["OtherRanks", "all_ranks", "measuring", "one_rank"]
