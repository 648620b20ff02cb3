"""The Triton kernels with all branches at once wherever they can be: the least memory, if not the least work.

One device that holds the whole sequence needs nothing beside query, key, value, out and their gradients then. Where no
fused tile makes sense, and over the hops of a ring, this is `in_place`.
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
