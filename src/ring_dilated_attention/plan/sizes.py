"""How large the tensors of a call are, and what its program needs to know of a kernel. No torch."""

from collections.abc import Callable
from typing import NamedTuple

from .step import Compute, Packing


class Sizes(NamedTuple):
    """The sizes of a call's tensors.

    itemsize: bytes of an element of query, key and value. Accumulators have at least 4.
    num_threads: of the CPU kernel; each has scratch of a fixed size.
    """

    batch: int
    head_dim: int
    itemsize: int
    num_threads: int = 1

    @property
    def sum_itemsize(self) -> int:
        return max(self.itemsize, 4)

    @property
    def unit(self) -> int:
        """Elements of one unit of a plan's sizes."""
        return self.batch * self.head_dim


class Traits(NamedTuple):
    """What programs and memory need to know of a kernel.

    in_place: it merges and adds by itself, instead of giving the results of one tile.
    is_whole: it makes the whole pass by itself on one device.
    scratch: bytes that it takes and frees inside one call, given the number of query heads of all tiles together.
    packing: when rows are copied side by side for it.
    """

    in_place: bool
    is_whole: bool
    scratch: Callable[[Compute, Sizes, int], int]
    packing: Packing | None = None
