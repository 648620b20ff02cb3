"""Checks the arguments of an attention call, and of the layers around it, before ranks talk to each other."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ..kernels.choose import check_backend
from ..pattern import is_finite_number, is_integer, why_no_pattern
from ..plan.sharded_call import held_heads
from ..ranks.call import Call, described, validate_cu_seqlens
from ..ranks.named import NamedContext
from ..run.dilated_cache import DilatedCache
from .op import define_op
from .sinks import why_no_sinks

_NONE = "torch's kernels have none"
_SEEN = "the pattern says which keys a query sees, and cu_seqlens separates documents"
# Maps arguments of other attention functions (torch's scaled_dot_product_attention and flex_attention, flash_attn and
# others) to what to do in `dilated_attention` instead.
ARGUMENTS_OF_TORCH = {
    "is_causal": "make the pattern so, DilatedPattern(..., is_causal=True)",
    "causal": "make the pattern so, DilatedPattern(..., is_causal=True)",
    "softmax_scale": "it is scale here",
    "cu_seqlens_q": "it is cu_seqlens here, for queries and keys alike",
    "cu_seqlens_k": "it is cu_seqlens here, for queries and keys alike",
    "max_seqlen_q": "leave it out, cu_seqlens tells the lengths",
    "max_seqlen_k": "leave it out, cu_seqlens tells the lengths",
    "deterministic": "call torch.use_deterministic_algorithms(True)",
    "average_attn_weights": "no weights are returned, layers.attention_weights computes some",
    "attn_mask": f"{_SEEN}; other masks are not supported",
    "block_mask": f"{_SEEN}; other masks are not supported",
    "score_mod": "scores cannot be changed, except by scale",
    "dropout_p": "dropout of attention is not supported, leave it out",
    "softcap": f"scores cannot be capped, {_NONE}",
    "alibi_slopes": f"scores cannot have a bias, {_NONE}",
    "window_size": "make the pattern so, DilatedPattern(..., window=) or DilatedPattern.sliding",
    "num_sink_tokens": "no position is seen by all; sinks= are learned logits",
    "enable_gqa": "leave it out, key and value may have fewer heads than query",
}


def refuse_others(call: str, others: Mapping[str, object]) -> None:
    """Raise TypeError if a caller passed arguments that `call` does not have (`others`). For an argument in
    `ARGUMENTS_OF_TORCH` the error says what to do instead."""
    for name in others:
        remedy = ARGUMENTS_OF_TORCH.get(name)
        raise TypeError(f"{call} has no argument {name!r}" + (f": {remedy}." if remedy else "."))


def on_host(cu_seqlens: Any) -> Any:
    """cu_seqlens on the host. It is read several times, and on a GPU each read would wait for the GPU."""
    is_readable = (
        isinstance(cu_seqlens, Tensor)
        and not cu_seqlens.is_meta
        and not torch.compiler.is_compiling()
    )
    return cu_seqlens.cpu() if is_readable else cu_seqlens


def autocast(x: Any) -> Any:
    """x in the dtype that torch's own attention uses under autocast. float64 and integers are not cast."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    # Skip tensors on the device "meta", for which is_autocast_enabled raises an error. (is_autocast_available
    # would find such devices, but torch 2.11 cannot compile a call of is_autocast_available.)
    device = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError for forward-mode derivatives, which a custom op would drop without an error."""
    if any(x is not None and unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "dilated attention has no forward-mode derivative (torch.func.jvp, jacfwd, torch.autograd.forward_ad): "
            "use backward() or torch.autograd.grad."
        )


def refuse_transforms(error: RuntimeError) -> None:
    """If torch's error is about torch.func, raise a NotImplementedError that says what to call instead."""
    if "functorch transforms" in str(error):
        raise NotImplementedError(
            "dilated attention cannot be differentiated by torch.func (grad, vjp, jacrev): use backward() or "
            "torch.autograd.grad."
        ) from error


def check_objects(pattern: Any, parallel: Any, backend: Any) -> None:
    if failure := why_no_pattern(pattern):
        raise ValueError(f"{failure}.")
    if parallel is not None and not isinstance(parallel, NamedContext):
        raise ValueError(f"parallel must be a ContextParallel or None, got {parallel!r}.")
    check_backend(backend)


def call_of(
    tensors: tuple[Any, Any, Any],
    pattern: Any,
    parallel: Any,
    cu_seqlens: Any,
    scale: Any,
    backend: Any,
    return_lse: Any,
    heads_held: Any,
    num_heads: Any,
    sinks: Any = None,
) -> Call:
    """Check the arguments of an attention call and return its `Call`. Checks that need other ranks come later.

    tensors: query, key and value.
    """
    _check_tensors(dict(zip(("query", "key", "value"), tensors, strict=True)))
    refuse_tangents(*tensors)
    check_objects(pattern, parallel, backend)
    query, key, _ = tensors
    (batch, seq_len, num_held, head_dim), num_kv_held = query.shape, key.shape[2]
    heads = held_heads(num_held, max(num_held // max(num_kv_held, 1), 1), heads_held, num_heads)
    num_heads = num_held if num_heads is None else num_heads
    pattern.check_heads(num_heads, num_kv_held * num_heads // num_held)
    _check_scale(scale, torch.float64 if query.dtype == torch.float64 else torch.float32)
    if cu_seqlens is not None:
        validate_cu_seqlens(cu_seqlens, batch)
    if not isinstance(return_lse, bool):
        raise ValueError(f"return_lse must be True or False, got {return_lse!r}.")
    has_sinks = sinks is not None
    if has_sinks and (failure := why_no_sinks(sinks, query)):
        raise ValueError(f"{failure}.")
    # Do not warn under `parallel`, because a shard may have fewer positions than heads.
    if parallel is None and num_held > 256 and num_held > seq_len:
        warnings.warn(
            f"query has {num_held} heads and {seq_len} positions: (batch, heads, seq, head_dim) was probably meant. "
            "The layout is (batch, seq, heads, head_dim).",
            stacklevel=3,
        )
    scale = head_dim**-0.5 if scale is None else float(scale)
    wanted = zip("qkv", tensors, strict=True) if torch.is_grad_enabled() else ()
    needs_grad = "".join(name for name, x in wanted if x.requires_grad)
    context = "" if parallel is None else parallel.key
    return Call(
        pattern, scale, backend, needs_grad, return_lse, heads, num_heads, context, has_sinks
    )


def why_no_rows(name: str, x: Any) -> str | None:
    """Why x is not a tensor of four dimensions, as a sentence, or None if x is such a tensor."""
    layout = "(batch, seq, heads, head_dim)"
    if not isinstance(x, Tensor):
        return (
            f"{name} must be a tensor {layout}, got {type(x).__name__}: torch.as_tensor makes one"
        )
    if x.dim() == 4:
        return None
    return (
        f"{name} must be {layout}, got {x.dim()} dimensions: {tuple(x.shape)}; unsqueeze(0) adds a batch, and "
        "unflatten(-1, (heads, head_dim)) makes heads"
    )


def _check_tensors(tensors: Mapping[str, Any]) -> None:
    """Raise ValueError unless query, key and value fit each other."""
    for name, x in tensors.items():
        if failure := why_no_rows(name, x):
            raise ValueError(f"{failure}.")
        if x.layout != torch.strided:
            raise ValueError(
                f"{name} must be a dense tensor, got layout {x.layout}. Convert it with .to_dense()."
            )
    for name in ("dtype", "device"):
        values = {n: getattr(x, name) for n, x in tensors.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{n} has {v}" for n, v in values.items())
            raise ValueError(
                f"query, key and value must share one {name}: {listed}. Convert them with .to()."
            )
    query, key, value = (tuple(x.shape) for x in tensors.values())
    if key != value:
        raise ValueError(f"key {key} and value {value} must have the same shape.")
    if key[:2] != query[:2] or key[3] != query[3]:
        raise ValueError(
            f"query {query} and key {key} must agree in batch, seq and head_dim; only the number of heads may differ "
            "(this is self-attention)."
        )
    if not (query[0] and query[2] and query[3]):
        raise ValueError(f"query {query} has an empty batch, heads or head_dim.")


def _check_scale(scale: Any, dtype: torch.dtype) -> None:
    if scale is None:
        return
    if not is_finite_number(scale):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}.")
    if abs(float(scale)) > (largest := torch.finfo(dtype).max):
        raise ValueError(
            f"scale={float(scale):g} is beyond {largest:.1e}, the largest number of {dtype}, the dtype of the scores. "
            "Pass float64 tensors, or a smaller scale."
        )


def check_cache(
    cache: Any, call: Call, query: Tensor, key: Tensor, parallel: Any, cu_seqlens: Any, lengths: Any
) -> None:
    """Raise ValueError unless the call can use this cache. Without a cache (None), `lengths` must be None too."""
    if cache is None:
        if lengths is not None:
            raise ValueError(
                "lengths say how many rows go into a cache, but no cache was passed: pass cache. For packed "
                "documents pass cu_seqlens."
            )
        return
    if not isinstance(cache, DilatedCache):
        raise ValueError(f"cache must be a DilatedCache or None, got {cache!r}.")
    for name, x in (("parallel", parallel), ("cu_seqlens", cu_seqlens)):
        if x is not None:
            raise ValueError(
                f"cache and {name} cannot go together: a cache holds one whole sequence for each batch entry. Leave "
                f"out {name}, or fill the cache from ranks with DilatedCache.gather."
            )
    # Compare patterns as texts, because torch.compile cannot compare the windows in patterns.
    if call.pattern.text != cache.pattern.text:
        raise ValueError(
            f"the cache was made for {cache.pattern}, and the call has {call.pattern}. Make a cache for each pattern."
        )
    pairs: dict[str, tuple[object, object]] = {
        "batch": (cache.batch, query.shape[0]),
        "heads": (cache.plan.num_heads, call.num_heads),
        # Compare the first and the last head, because torch.compile cannot compare ranges.
        "first head held": (cache.plan.heads.start, call.heads.start),
        "last head held": (cache.plan.heads.stop - 1, call.heads.stop - 1),
        "key/value heads": (cache.plan.num_kv_held, key.shape[2]),
        "head dim": (cache.head_dim, query.shape[3]),
        "dtype": (cache.dtype, query.dtype),
        "device": (cache.device, query.device),
    }
    for name, (own, given) in pairs.items():
        if own != given:
            raise ValueError(
                f"the cache was made for {name} {own}, and the call has {given}. Make a cache for these tensors, or "
                "convert them."
            )
    if call.needs_grad:
        raise ValueError(
            "a call with a cache has no gradient: call it under torch.no_grad(), or detach the inputs."
        )
    if lengths is not None and not (
        isinstance(lengths, Tensor) and lengths.shape == query.shape[:1] and is_integral(lengths)
    ):
        raise ValueError(
            f"lengths must be an integer tensor ({cache.batch},), one for each batch entry, got {described(lengths)}."
        )


# The checks below are for the layers (layers/).


def is_integral(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int) -> None:
    for name, number in (
        ("embed_dim", embed_dim),
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
    ):
        if not is_integer(number):
            raise ValueError(f"{name} must be an integer, got {number!r}")
    if num_heads < 1 or embed_dim < 1:
        raise ValueError(f"embed_dim={embed_dim} and num_heads={num_heads} must be at least 1")
    if embed_dim % num_heads:
        raise ValueError(
            f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads} (remainder {embed_dim % num_heads}): "
            "choose a number of heads that divides it"
        )


def valid_lengths(mask_BN: Tensor, batch: int, num_positions: int) -> Tensor:
    """Count the valid positions in each row of a mask: (B,) int64. mask_BN: (B, N), True at padding.

    Raises:
        ValueError: for a mask that does not fit, or with padding before a valid position.
    """
    if mask_BN.shape != (batch, num_positions):
        raise ValueError(
            f"key_padding_mask has shape {tuple(mask_BN.shape)}, the inputs need ({batch}, {num_positions})"
        )
    if mask_BN.is_floating_point():
        # Accept a mask of 0 and -inf, into which nn.TransformerEncoderLayer turns its bool mask.
        if not ((mask_BN == 0) | (mask_BN == -math.inf)).all():
            raise ValueError(
                "key_padding_mask is a float mask with values other than 0 and -inf: pass a bool mask"
            )
        mask_BN = mask_BN != 0
    if mask_BN.dtype != torch.bool:
        raise ValueError(
            f"key_padding_mask has dtype {mask_BN.dtype}: pass a bool mask, True at padding"
        )
    lengths_B = (~mask_BN).sum(1)
    if mask_BN.numel() and mask_BN.all():
        raise ValueError(
            "key_padding_mask is True everywhere, and no position is valid. True means padding: pass ~mask if yours is "
            "True at valid positions"
        )
    expected_BN = torch.arange(num_positions, device=mask_BN.device) >= lengths_B[:, None]
    wrong = (mask_BN != expected_BN).nonzero()
    if len(wrong):
        row, first = wrong[0].tolist()
        raise ValueError(
            f"key_padding_mask row {row} has padding at position {first} and valid positions after it "
            f"({int(lengths_B[row])} valid in all): padding must be on the right. Move it there, or pack the documents "
            "into one row and pass cu_seqlens. True means padding: pass ~mask if yours is True at valid positions"
        )
    return lengths_B


def _fake_valid_lengths(mask_BN: Tensor, batch: int, num_positions: int) -> Tensor:
    return mask_BN.new_empty(batch, dtype=torch.int64)


# `valid_lengths` as an op for compiled code, because torch.compile cannot trace checks of the mask's values.
valid_lengths_op = define_op("valid_lengths", valid_lengths, _fake_valid_lengths)
