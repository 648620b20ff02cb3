"""Block sizes, warps and stages by architecture, dtype and head dim, from `configs.json`: no tuning at run time."""

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

PATH = Path(__file__).with_name("configs.json")
KERNELS = ("forward", "forward_half", "query_gradient", "key_gradient")


class Config(NamedTuple):
    """Query rows BM and key rows BN of a block, and how triton compiles the kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@lru_cache(maxsize=1)
def _table() -> dict:
    return json.loads(PATH.read_text())


def padded(head_dim: int) -> int:
    """Columns of a block: the next power of two, at least the 16 that a matrix product needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def has_config(arch: str) -> bool:
    """Whether there is a configuration for an architecture: "cuda:90", "hip:gfx942", "interpreter"."""
    return arch in _table()


def config(kernel: str, head_dim: int, itemsize: int, arch: str) -> Config:
    """The configuration of one of KERNELS. "forward_half" is the fused forward's: half the query rows of "forward"."""
    entry = _table()[arch]
    if isinstance(entry, str):  # the name of an architecture with the same sizes
        entry = _table()[entry]
    by_dim = entry.get("any") or entry[f"{8 * itemsize}-bit"]
    by_kernel = by_dim.get("any") or by_dim[str(padded(head_dim))]
    return Config(*by_kernel[kernel])


@lru_cache
def architecture(device: torch.device) -> str:
    """The name of a device's architecture, like "cuda:90" or "hip:gfx942"."""
    if torch.version.hip:
        return "hip:" + torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda:{10 * major + minor}"
