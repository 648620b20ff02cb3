"""The backend "triton-fused": all branches at once on one device, where `fused.choose_pass` allows it.

This takes the least memory, though not always the least work. Elsewhere, and in a ring, it computes as `in_place` does.
"""

from typing import Literal

from ..traits import TRAITS as ALL_TRAITS
from .fused import choose_pass
from .in_place import ONLY_BY_NAME, append_one, delta, forward_into, key_gradient_into, query_gradient_into, why_not

__all__ = ["ONLY_BY_NAME", "append_one", "choose_pass", "delta", "forward_into"]
__all__ += ["key_gradient_into", "query_gradient_into", "why_not"]

NAME = "triton-fused"
IN_PLACE: Literal[True] = True
TRAITS = ALL_TRAITS[NAME]
ops = None
