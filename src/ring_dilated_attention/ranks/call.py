"""What a call is beside its tensors."""

from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.choose import BACKENDS, choose
from ..pattern import DilatedPattern

LEAST_SCALE = 2.0**-126  # the least normal float32


@dataclass(frozen=True)
class Call:
    """What a call is beside its tensors.

    heads: those that the tensors hold, of num_heads query heads in all. context: the key of its ContextParallel.
    """

    pattern: DilatedPattern
    scale: float
    backend: str
    needs_grad: str
    return_lse: bool
    heads: range
    num_heads: int
    context: str = ""

    @property
    def text(self) -> str:
        """The call as a custom op takes it; see `from_text`."""
        # torch.compile may take integers for symbols, which no text can hold: `index` makes them numbers again.
        start, stop, num_heads = index(self.heads.start), index(self.heads.stop), index(self.num_heads)
        numbers = f"{self.scale!r} {start} {stop} {num_heads} {self.return_lse}"
        return f"{self.backend} {self.needs_grad}\n{numbers}\n{self.pattern.text}\n{self.context}"

    @classmethod
    @lru_cache(maxsize=256)
    def from_text(cls, text: str) -> "Call":
        names, numbers, pattern, context = text.split("\n", 3)
        backend, needs_grad = names.split(" ")
        scale, *heads, num_heads, return_lse = numbers.split(" ")
        held = range(*map(int, heads)), int(num_heads)
        return cls(
            DilatedPattern.from_text(pattern), float(scale), backend, needs_grad, return_lse == "True", *held, context
        )

    @property
    def held(self) -> range | None:
        """The heads, if they are not all."""
        return None if len(self.heads) == self.num_heads else self.heads

    def num_kv_heads(self, num_held: int) -> int:
        """Key/value heads in all, given those that the tensors hold."""
        return num_held * self.num_heads // len(self.heads)

    @property
    def kernel_scale(self) -> float:
        """Kernels put -inf at masked scores and scale afterwards: NaN for what float32 takes for 0, +inf below 0."""
        return abs(self.scale) if abs(self.scale) >= LEAST_SCALE else 1.0

    @property
    def factor(self) -> float:
        """What `kernel_scale` leaves out, of query and of dq: mostly 1."""
        return self.scale / self.kernel_scale

    def scaled(self, query: Tensor) -> Tensor:
        return query if self.factor == 1 else query * self.factor


class Begun(NamedTuple):
    """What the backward of a call takes from its forward, where it was chosen and read from the device.

    number: of the call, by which its backward is recognised. kernel: its name. borders: of packed documents.
    """

    number: int
    kernel: str
    borders: tuple[int, ...] | None

    @classmethod
    def now(cls, number: int, call: Call, query: Tensor, cu_seqlens: Tensor | None) -> "Begun":
        """Choose the kernel and read the borders."""
        borders = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
        return cls(number, choose(call.backend, query).NAME, borders)

    @property
    def tensor(self) -> Tensor:
        """As the forward's op returns it; see `from_tensor`."""
        return torch.tensor([self.number, list(BACKENDS).index(self.kernel), *(self.borders or ())], device="cpu")

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "Begun":
        number, kernel, *borders = tensor.tolist()
        return cls(number, list(BACKENDS)[kernel], tuple(borders) or None)
