"""`Call` holds the arguments of an attention call, without its tensors. `ForwardState` holds what the backward of the
call needs from the forward, in addition to tensors."""

from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.choose import BACKENDS, choose
from ..pattern import DilatedPattern
from ..plan.sharding import Borders

LEAST_SCALE = 2.0**-126  # the least normal float32
MOST_SHOWN_BORDERS = 64


@dataclass(frozen=True)
class Call:
    """The arguments of an attention call.

    needs_grad: the first letters of the tensors that need a gradient, such as "qv" for query and value. heads: which of
    the layer's `num_heads` query heads are in `query`. context: the identifier (`key`) of the `ContextParallel`, or ""
    on one device.
    """

    pattern: DilatedPattern
    scale: float
    backend: str
    needs_grad: str
    return_lse: bool
    heads: range
    num_heads: int
    context: str = ""
    # Whether the call has attention sinks. If so, lse has a gradient, because the final out is computed from lse.
    has_sinks: bool = False

    @property
    def text(self) -> str:
        """The call as a string, since custom ops cannot take a `Call`. `from_text` turns it into a `Call` again."""
        # Turn symbols back into numbers: torch.compile may replace integers by symbols, which a text cannot contain.
        start = index(self.heads.start)
        stop = index(self.heads.stop)
        num_heads = index(self.num_heads)
        numbers = f"{self.scale} {start} {stop} {num_heads} {self.return_lse} {self.has_sinks}"
        return f"{self.backend} {self.needs_grad}\n{numbers}\n{self.pattern.text}\n{self.context}"

    @classmethod
    @lru_cache(maxsize=256)
    def from_text(cls, text: str) -> "Call":
        names, numbers, pattern, context = text.split("\n", 3)
        backend, needs_grad = names.split(" ")
        scale, start, stop, num_heads, return_lse, has_sinks = numbers.split(" ")
        return cls(
            DilatedPattern.from_text(pattern),
            float(scale),
            backend,
            needs_grad,
            return_lse == "True",
            range(int(start), int(stop)),
            int(num_heads),
            context,
            has_sinks == "True",
        )

    @property
    def heads_held(self) -> range | None:
        """Which query heads of the layer the tensors hold, or None if the tensors hold all heads."""
        return None if len(self.heads) == self.num_heads else self.heads

    def num_kv_heads(self, num_held: int) -> int:
        """The number of key/value heads of the layer, given the number that the tensors hold."""
        return num_held * self.num_heads // len(self.heads)

    @property
    def kernel_scale(self) -> float:
        """The scale that kernels get, which is always positive. With a scale of 0 or -1 kernels would turn the score
        -inf of a masked key into NaN or +inf."""
        return abs(self.scale) if abs(self.scale) >= LEAST_SCALE else 1.0

    @property
    def factor(self) -> float:
        """scale / kernel_scale, by which query and dq are multiplied. It is 1 or -1, unless the scale is 0 or tiny."""
        return self.scale / self.kernel_scale

    def scaled(self, query: Tensor) -> Tensor:
        return query if self.factor == 1 else query * self.factor


class ForwardState(NamedTuple):
    """What the forward of a call saves for its backward, so that the backward need not choose a kernel or read
    cu_seqlens again.

    number: the number of this forward among all forwards of the `ContextParallel`, counted from 1. Ranks compare this
    number. On one device it is 0.
    kernel: the name of the backend whose kernels run the call. borders: cu_seqlens as numbers, or None.
    """

    number: int
    kernel: str
    borders: tuple[int, ...] | None

    @classmethod
    def of(
        cls, number: int, call: Call, query: Tensor, cu_seqlens: Tensor | None
    ) -> "ForwardState":
        return cls(number, choose(call.backend, query).NAME, borders_of(cu_seqlens))

    @property
    def tensor(self) -> Tensor:
        """This state as an int64 tensor on the CPU, which the forward's custom op can return. `from_tensor` turns it
        into a state again."""
        return torch.tensor(
            [self.number, list(BACKENDS).index(self.kernel), *(self.borders or ())], device="cpu"
        )

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "ForwardState":
        number, kernel, *borders = tensor.tolist()
        return cls(number, list(BACKENDS)[kernel], tuple(borders) or None)


def borders_of(cu_seqlens: Any) -> Borders:
    """The numbers in cu_seqlens. Raises ValueError for a wrong dtype or shape. `documents_of` checks the numbers."""
    if cu_seqlens is None:
        return None
    validate_cu_seqlens(cu_seqlens, 1)
    return tuple(cu_seqlens.tolist())


def borders_field(borders: Borders) -> object:
    """The borders of documents in the form that ranks compare and errors show: the borders themselves if there are at
    most 64, or else their number and a hash."""
    if borders is None or len(borders) <= MOST_SHOWN_BORDERS:
        return borders
    return len(borders), hash(borders)


def described(x: object) -> str:
    """An argument as an error shows it: a tensor by its dtype and shape."""
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


def validate_cu_seqlens(cu_seqlens: Any, batch: int) -> None:
    """Raise ValueError unless cu_seqlens is a dense 1-D int32 tensor with at least two entries, and batch is 1.

    `documents_of` checks the entries.
    """
    if (
        not isinstance(cu_seqlens, Tensor)
        or cu_seqlens.dtype != torch.int32
        or cu_seqlens.dim() != 1
    ):
        raise ValueError(
            f"cu_seqlens must be a 1-D int32 tensor, got {described(cu_seqlens)}. Use torch.tensor(...).int()."
        )
    if cu_seqlens.layout != torch.strided:
        raise ValueError(
            f"cu_seqlens must be a dense tensor, got layout {cu_seqlens.layout}. Call .to_dense()."
        )
    if cu_seqlens.device.type == "meta" or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens must hold the borders (0, ..., N) of one document at least, got {cu_seqlens.numel()} entries "
            f"on {cu_seqlens.device}."
        )
    if batch != 1:
        raise ValueError(
            f"cu_seqlens packs documents into one sequence, so batch must be 1, got {batch}. Flatten it."
        )
