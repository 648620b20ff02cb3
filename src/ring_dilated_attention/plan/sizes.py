"""The sizes of a call's tensors, and the traits of a kernel on which programs and memory depend. No torch."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .step import Packing


class Sizes(NamedTuple):
    """itemsize: bytes of an element of query, key and value. num_threads: CPU kernel threads, each with scratch."""

    batch: int
    head_dim: int
    itemsize: int
    num_threads: int = 1

    @property
    def sum_itemsize(self) -> int:
        """Bytes of an element of an accumulator."""
        return max(self.itemsize, 4)

    @property
    def unit(self) -> int:
        """Elements of one unit of a plan's sizes."""
        return self.batch * self.head_dim


class Traits(NamedTuple):
    """The traits of a kernel on which programs and memory depend."""

    # (query, key, dout or None, threads) -> bytes that a kernel's call takes and frees beside its results.
    scratch: Callable[[Any, Any, Any, int], int]
    packing: Packing | None = (
        None  # the tiles whose rows are first copied side by side; None if no tile's are
    )
