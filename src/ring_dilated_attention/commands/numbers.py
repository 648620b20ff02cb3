"""Other names of `arguments.py` and `console.py`, until `rda plan`, `rda suggest` and `rda train` import from there."""

from .arguments import BINARY as BINARY
from .arguments import DECIMAL as DECIMAL
from .arguments import LARGEST as LARGEST
from .arguments import MOST_BATCH as MOST_BATCH
from .arguments import MOST_HEADS as MOST_HEADS
from .arguments import MOST_RANKS as MOST_RANKS
from .arguments import amount as amount
from .arguments import check_at_least as check_at_least
from .arguments import check_given as check_given
from .arguments import check_memory as check_memory
from .arguments import check_ranks_fit as check_ranks_fit
from .arguments import check_seconds as check_seconds
from .arguments import count as count
from .console import counted as counted
from .console import scaled as scaled
from .console import size_text as size_text
