"""Tensors of any length whose every row is a function of its place: nothing is stored, any row can be made at any time.

The counter-based generator is splitmix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014),
whose i-th output is mix(start + i * golden): a row's start is mixed from seed, tensor, head and position. D head dim.
"""

import math

import torch
from torch import Tensor

TENSORS = ("query", "key", "value", "dout")

_GOLDEN = 0x9E3779B97F4A7C15
# Rows made at a time: the integers stay in a core's cache, and torch does not wake its threads for so little.
_BLOCK = 256


class CounterTensors:
    """query, key, value and the gradient of out of a sequence that is never there as a whole.

    Elements are float32, uniform with mean 0 and variance 1, and multiples of 2^-23 times sqrt(3): exact in that dtype.
    """

    def __init__(self, head_dim: int, seed: int = 0) -> None:
        self.head_dim, self.seed = head_dim, seed

    def rows(self, tensor: str, positions: Tensor, heads: Tensor) -> Tensor:
        """Rows (..., D) of a tensor at global positions of heads, two int64 tensors that broadcast to (...)."""
        which = torch.tensor(self.seed * len(TENSORS) + TENSORS.index(tensor))
        start = _mix(_mix(_mix(which) + heads) + positions)
        made = [self._make(some) for some in start.flatten().split(_BLOCK)]
        return torch.cat(made or [torch.empty(0, self.head_dim)]).view(*start.shape, self.head_dim)

    def local(self, tensor: str, positions_N: Tensor, num_heads: int) -> Tensor:
        """A (1, N, num_heads, D) tensor of all heads at global positions."""
        return self.rows(tensor, positions_N.unsqueeze(1), torch.arange(num_heads)).unsqueeze(0)

    def _make(self, start_R: Tensor) -> Tensor:
        """Rows (R, D): each 64-bit number gives two elements."""
        steps = torch.arange(1, -(-self.head_dim // 2) + 1) * _signed(_GOLDEN)
        halves = _mix(start_R.unsqueeze(1) + steps).view(torch.int32)[:, : self.head_dim]
        return (halves >> 8).to(torch.float32).mul_(math.sqrt(3) / 2**23)


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser on int64. The shifts of signed numbers are made logical by masks."""
    z = z ^ ((z >> 30) & (2**34 - 1))
    z *= _signed(0xBF58476D1CE4E5B9)
    z ^= (z >> 27) & (2**37 - 1)
    z *= _signed(0x94D049BB133111EB)
    z ^= (z >> 31) & (2**33 - 1)
    return z


def _signed(number: int) -> int:
    """The int64 with the bits of a 64-bit number."""
    return number - 2**64 if number >= 2**63 else number
