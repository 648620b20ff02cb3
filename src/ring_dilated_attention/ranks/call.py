"""What a call is beside its tensors."""

from dataclasses import dataclass

from torch import Tensor

from ..pattern import DilatedPattern

LEAST_SCALE = 2.0**-126  # the least normal float32


@dataclass(frozen=True)
class Call:
    """What a call is beside its tensors. heads: those that the tensors hold, of num_heads query heads in all."""

    pattern: DilatedPattern
    scale: float
    backend: str
    needs_grad: str
    return_lse: bool
    heads: range
    num_heads: int

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
