"""Stand-ins on a CPU for packages that peers import and that need a GPU. Most of them call torch's CPU attention op.

A stand-in exists only in the peer's process. The peer's row says that it was used.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    bias: None,
    scale: float | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """out (B, M, H, D) and lse (B, H, M), in the form in which torchscale expects them from flash_attn."""
    suffix = "_for_cpu" if query.device.type == "cpu" else ""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{suffix}")
    rows = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *_ = op(*rows, dropout, is_causal, scale=scale)
    return out.transpose(1, 2), lse


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """out (B, M, H, D) and lse (B, H, M). Each key/value head is repeated for its group of query heads."""
    _check(q, k, causal, dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    groups = q.shape[2] // k.shape[2]
    keys = _repeated(k, groups)
    values = _repeated(v, groups)
    out, lse = flash(q, keys, values, 0.0, None, softmax_scale, causal)
    return out, lse, None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    rng_state: None = None,
) -> None:
    """Compute the gradients, and write them into dq, dk and dv."""
    _check(q, k, causal, dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    groups = q.shape[2] // k.shape[2]
    keys = _repeated(k, groups)
    values = _repeated(v, groups)
    rows = [x.transpose(1, 2) for x in (dout, q, keys, values, out)]
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = op(*rows, softmax_lse.contiguous(), 0.0, causal, scale=softmax_scale)
    for to, grad in zip((dq, dk, dv), found, strict=True):
        of_groups = grad.transpose(1, 2).unflatten(2, (to.shape[2], -1))
        to.copy_(of_groups.sum(3))


def _repeated(x: Tensor, groups: int) -> Tensor:
    """Keys or values (B, N, G, D) with each head repeated for its group of query heads: (B, N, H, D)."""
    if groups == 1:
        return x
    return x.repeat_interleave(groups, dim=2)


def _check(q: Tensor, k: Tensor, causal: bool, *unused: Any) -> None:
    """Fail for options that torch's op does not have: otherwise it would compute something else."""
    assert unused in ((0, -1, -1, 0.0, None), (0, -1, -1, None, None)), (
        f"the stand-in has no {unused}"
    )
    assert not causal or q.shape[1] == k.shape[1], (
        "the stand-in takes causal calls of equal lengths"
    )


class _FlashAttention(torch.autograd.Function):
    """Joins forward and backward for `_flash_attn_func`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool
    ) -> Tensor:
        ctx.scale = q.shape[-1] ** -0.5 if scale is None else scale
        ctx.causal = causal
        out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, ctx.scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        _flash_attn_backward(grads[0], q, k, v, out, lse, dq, dk, dv, 0.0, ctx.scale, ctx.causal)
        return dq, dk, dv, None, None


def _flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """flash_attn's function for users: out (B, M, H, D), with its gradient."""
    _check(q, k, causal, dropout_p, *window_size, softcap, alibi_slopes)
    assert not return_attn_probs
    return _FlashAttention.apply(q, k, v, softmax_scale, causal)


def _varlen(*_: object) -> None:
    """In place of the functions for packed documents."""
    raise NotImplementedError("the stand-in of flash_attn has no packed documents")


def flash_attn() -> None:
    """Install a module flash_attn, with those functions of version 2.8 that ring-flash-attn and yunchang use."""
    interface = {
        "_flash_attn_forward": _flash_attn_forward,
        "_flash_attn_backward": _flash_attn_backward,
    }
    interface |= {f"_flash_attn_varlen_{stage}": _varlen for stage in ("forward", "backward")}
    _module("flash_attn", __version__="2.8.3", flash_attn_func=_flash_attn_func)
    _module("flash_attn.flash_attn_interface", **interface)


def xformers() -> None:
    """Install a module xformers.ops with memory-efficient attention, for which xformers has no CPU operator."""

    def attention(query: Tensor, key: Tensor, value: Tensor, op: None, attn_bias: object) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=attn_bias is not None)
        return out.transpose(1, 2)

    _module("xformers")
    _module(
        "xformers.ops",
        AttentionOp=object,
        LowerTriangularMask=type("LowerTriangularMask", (), {}),
        memory_efficient_attention=attention,
    )


def packages(*names: str) -> None:
    """Make empty modules of installed packages, without running their __init__.

    A module in a package can then be imported without everything that the package's __init__ imports.
    """
    for name in names:
        # To find "a.b" this imports "a", which is an empty module by now.
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"{name} is not installed"
        _module(name, __path__=list(spec.submodule_search_locations or ()))


def _module(name: str, **members: object) -> None:
    """Make a module with these members, and let imports find it."""
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(members)
    module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
