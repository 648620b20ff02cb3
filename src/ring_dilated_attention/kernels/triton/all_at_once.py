"""The Triton kernels with all branches at once wherever they can be: the least memory, if not the least work.

One device that holds the whole sequence needs nothing beside query, key, value, out and their gradients then. Where no
fused tile makes sense, and over the hops of a ring, this is `in_place`.
"""

from typing import Literal

from torch import Tensor

from ...pattern import DilatedPattern
from ..contract import WholePasses
from ..traits import TRAITS as ALL_TRAITS
from .fused import whole_passes
from .in_place import (
    ONLY_BY_NAME,
    append_one,
    delta,
    forward_into,
    key_gradient_into,
    ops,
    query_gradient_into,
    why_not,
)

__all__ = (
    "ONLY_BY_NAME",
    "append_one",
    "choose_pass",
    "delta",
    "forward_into",
    "key_gradient_into",
    "ops",
    "query_gradient_into",
    "why_not",
)

NAME = "triton-fused"
IN_PLACE: Literal[True] = True
TRAITS = ALL_TRAITS[NAME]


def choose_pass(
    pattern: DilatedPattern, borders: tuple[int, ...], query_BNHD: Tensor, num_kv_heads: int, backward: bool
) -> WholePasses:
    """As `in_place.choose_pass`, but the best of the fused tiles, if there is one."""
    return whole_passes(pattern, borders, query_BNHD, num_kv_heads, backward, prefers_fused=True)
