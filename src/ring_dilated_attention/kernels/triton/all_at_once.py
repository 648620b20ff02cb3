"""The Triton kernels with all branches at once wherever they can be: the least memory, if not the least work.

One device that holds the whole sequence needs nothing beside query, key, value, out and their gradients then. Where no
fused tile makes sense, and over the hops of a ring, this is `in_place`.
"""

from torch import Tensor

from ...pattern import DilatedPattern
from .fused import Whole, choose
from .in_place import (
    ONLY_BY_NAME,
    append_one,
    delta,
    forward_into,
    key_gradient_into,
    query_gradient_into,
    why_not,
)

__all__ = (
    "ONLY_BY_NAME",
    "append_one",
    "delta",
    "forward_into",
    "key_gradient_into",
    "query_gradient_into",
    "whole",
    "why_not",
)


def whole(
    pattern: DilatedPattern, borders: tuple[int, ...], query_BNHD: Tensor, num_kv_heads: int, *, backward: bool
) -> Whole:
    """As `in_place.whole`, but the best of the fused tiles, if there is one."""
    choice = choose(pattern, borders, query_BNHD, num_kv_heads, backward=backward, prefers_fused=True)
    return Whole(pattern, borders, choice)
