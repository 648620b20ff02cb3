"""What every launch of a kernel needs: block sizes, constants, strides, the device. Imports no triton."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .block_sizes import Config, architecture, config, padded


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def config_for(kernel: str, x: Tensor) -> Config:
    return config(kernel, x.shape[-1], x.element_size(), "interpreter" if is_interpreted() else architecture(x.device))


def on_device(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def precision() -> str:
    """The precision of float32 products, the same as that of torch's own products."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def constants(blocks: Config, head_dim: int, heads: int) -> dict[str, Any]:
    """The sizes that are compiled in. heads: query heads of a bundle."""
    sizes = {"D": head_dim, "BD": padded(head_dim), "HEADS": heads, "BM": blocks.block_m, "BN": blocks.block_n}
    return {"PRECISION": precision(), **sizes, "num_warps": blocks.num_warps, "num_stages": blocks.num_stages}


def strides(*tensors: Tensor) -> Iterator[int]:
    """The strides of each tensor without the last, which is 1."""
    return (stride for x in tensors for stride in x.stride()[:3])


def check(*rows: Tensor) -> None:
    for x in rows:
        assert x.stride(-1) == 1, f"a row must be consecutive numbers, got strides {x.stride()}"
        assert x.numel(), f"a kernel needs rows, got {tuple(x.shape)}"


_captured: list[object] = []


def keep_for_graphs(tables: object, query: Tensor) -> None:
    """Keep the tables for good if a CUDA graph is being captured, since each replay will read them."""
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.append(tables)
