"""What torch's CUDA attention ops accept: `Op.why_not` gives the reason why an op cannot run, or None if it can.

Unverified: no GPU has run this file. Its facts come from the schemas, meta kernels and headers of torch 2.13, and from
the sources of neighbouring versions. Names are those of `contract.py`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from ..plan.step import ROW_BLOCK
from .traits import MOST_PADDED, padded_head_dim


class TileFacts(NamedTuple):
    """The facts about a tile that decide which op computes it."""

    dtype: torch.dtype
    capability: tuple[int, int]  # the GPU's compute capability
    batch: int  # the number of batch entries; each segment counts as a batch entry
    num_heads: int
    num_rows: int
    num_keys: int
    head_dim: int
    is_backward: bool = False


class Op(NamedTuple):
    """One attention op of torch, `aten._scaled_dot_product_<name>_attention`. The fields say which tiles the op and its
    backward op can compute, and which arguments the two ops get."""

    is_enabled: Callable[[], bool]  # Whether the op is switched on in torch.
    # The dtypes that the op takes, each with the least compute capability that it needs.
    capabilities: dict[torch.dtype, tuple[int, int]]
    max_head_dim: float
    # Returns the arguments that follow `value` in a call of the backward op.
    backward_arguments: Callable[[Tensor, Tensor, int, bool], tuple[Any, ...]]
    # The arguments between `value` and the dropout in a call of the forward op: None for no bias, True to get lse.
    forward_arguments: tuple[Any, ...] = (None, True)
    # Returns the reason why the op cannot compute a tile, or None. Checks only limits that are peculiar to this op.
    refuses: Callable[[TileFacts], str | None] = lambda tile: None
    # The largest number of batch entries in a call. A CUDA grid has at most 65,535 blocks along its second and third
    # dimension.
    max_batch: float = 65_535
    takes_groups: bool = False  # Whether the op takes fewer key/value heads than query heads.
    takes_strides: bool = False  # Whether the op takes out and dout with any strides.

    def why_not(self, tile: TileFacts) -> str | None:
        """The reason why the op cannot compute the tile, or None."""
        if not self.is_enabled():
            return "is switched off (torch.nn.attention.sdpa_kernel, torch.backends.cuda)"
        if tile.dtype not in self.capabilities:
            return f"serves {', '.join(map(str, self.capabilities))}, got {tile.dtype}"
        least = self.capabilities[tile.dtype]
        if tile.capability < least:
            return f"serves {tile.dtype} from compute capability {_dotted(least)} on, got {_dotted(tile.capability)}"
        if tile.head_dim > self.max_head_dim:
            return f"takes head dims up to {self.max_head_dim}, got {tile.head_dim}"
        if tile.batch > self.max_batch:
            return f"takes up to {self.max_batch} segments at a time, got {tile.batch}"
        return self.refuses(tile)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


# The major compute capabilities on which torch runs the forward and backward of FlashAttention 3 and 4. Like torch's
# own flash, FlashAttention 3 and 4 take only float16 and bfloat16.
_MAJORS = {"FA3": (9,), "FA4": (9, 10)}


def _flash_refuses(tile: TileFacts) -> str | None:
    capability = tile.capability
    if active := current_flash_attention_impl():
        majors = _MAJORS.get(active, capability[:1])
        if capability[0] in majors:
            return None
        runs_on = " and ".join(f"{major}.x" for major in majors)
        return f"is {active} now, which runs on compute capability {runs_on}, got {_dotted(capability)}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "is not part of this build of torch"
    if 192 < tile.head_dim <= 224 and ((8, 6) <= capability <= (8, 9) or capability[0] == 12):
        dims = "head dims 193 to 224"
        return f"has no backward for {dims} on compute capability {_dotted(capability)}, got {tile.head_dim}"
    num_rows = tile.num_rows + -tile.num_rows % ROW_BLOCK
    size = tile.batch * tile.num_heads * num_rows * padded_head_dim(tile.head_dim)
    if tile.is_backward and size > MOST_PADDED:
        return f"takes up to 2^31 padded elements at a time in a backward, got {size}"
    return None


def _cudnn_refuses(tile: TileFacts) -> str | None:
    if torch.version.hip:
        return "is not part of ROCm"
    version = torch.backends.cudnn.version() or 0
    # Older versions of cuDNN went out of bounds if the number of rows was not a multiple of 128 (pytorch#169849).
    if version < 91501:
        return f"needs cuDNN 9.15.1 (91501) or later, got {version}"
    # Refuse a single key, which torch never gives to cuDNN, and a single row, for which cuDNN returned NaN
    # (cudnn-frontend#1072).
    if 1 in (tile.num_rows, tile.num_keys):
        return f"takes two or more rows and keys, got {tile.num_rows} and {tile.num_keys}"
    if (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        return "is not deterministic, and torch.use_deterministic_algorithms(True) was called"
    return None


def _flash_arguments(
    out_BHMD: Tensor, lse_BHM: Tensor, num_keys: int, is_causal: bool
) -> tuple[Any, ...]:
    # The two None mean that there are no borders of packed documents.
    return (
        out_BHMD,
        lse_BHM,
        None,
        None,
        out_BHMD.shape[2],
        num_keys,
        0.0,
        is_causal,
        *_seeds(lse_BHM),
    )


def _efficient_arguments(
    out_BHMD: Tensor, lse_BHM: Tensor, num_keys: int, is_causal: bool
) -> tuple[Any, ...]:
    wanted = [True, True, True, False]
    return None, out_BHMD, lse_BHM, *_seeds(lse_BHM), 0.0, wanted, is_causal


def _cudnn_arguments(
    out_BHMD: Tensor, lse_BHM: Tensor, num_keys: int, is_causal: bool
) -> tuple[Any, ...]:
    return (
        out_BHMD,
        lse_BHM.unsqueeze(-1),
        *_seeds(lse_BHM),
        *(None, None, None),  # The op gets no bias and no borders of packed documents.
        out_BHMD.shape[2],
        num_keys,
        0.0,
        is_causal,
    )


def _seeds(like: Tensor) -> list[Tensor]:
    # Return a seed and an offset of dropout, because the op requires both arguments. Without dropout it does not read
    # them.
    return [like.new_empty((), dtype=torch.int64)] * 2


_SM80 = dict.fromkeys((torch.bfloat16, torch.float16), (8, 0))

OPS = {
    "flash": Op(
        torch.backends.cuda.flash_sdp_enabled,
        _SM80,
        max_head_dim=256,
        backward_arguments=_flash_arguments,
        forward_arguments=(),
        refuses=_flash_refuses,
        takes_groups=True,
        takes_strides=True,
    ),
    # `takes_strides` is False, because the op's backward assumes that out has the row stride H * D.
    "efficient": Op(
        torch.backends.cuda.mem_efficient_sdp_enabled,
        {torch.float32: (5, 0), torch.float16: (5, 0), torch.bfloat16: (8, 0)},
        max_head_dim=math.inf,
        backward_arguments=_efficient_arguments,
        max_batch=math.inf,  # no limit, because the op itself splits a larger batch
    ),
    # `takes_strides` is False, because the op's backward asserts that out and dout have equal strides (pytorch#176915).
    "cudnn": Op(
        torch.backends.cuda.cudnn_sdp_enabled,
        _SM80,
        # On some GPUs some versions of cuDNN take larger head dims in forward, but not always in backward.
        max_head_dim=128,
        backward_arguments=_cudnn_arguments,
        refuses=_cudnn_refuses,
        takes_groups=True,
    ),
}


def lse_multiple(name: str | None) -> int:
    """Return a number m: the backward of the named op needs an lse whose number of rows is a multiple of m. The caller
    appends rows of inf, for which the weights exp(score - lse) are 0."""
    return 32 if name == "efficient" and not torch.version.hip else 1


# On these major compute capabilities torch tries cuDNN before flash. `in_order` does the same (docs/decisions.md).
_CUDNN_FIRST = (9, 10)


def in_order(tile: TileFacts) -> tuple[str, ...]:
    """The names of OPS, in the order in which they are tried. The first op that can compute the tile is used."""
    # Try cuDNN last while tokens are generated, because the number of keys then grows with every token, and cuDNN makes
    # a new plan for each number of keys.
    is_of_token = tile.num_rows < 128 and tile.num_keys != tile.num_rows
    if tile.capability[0] in _CUDNN_FIRST and not is_of_token:
        return "cudnn", "flash", "efficient"
    return "flash", "efficient", "cudnn"
