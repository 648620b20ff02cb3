"""What ring-flash-attn takes of flash_attn, in plain torch. The last query of a causal call sees the last key.

Fixed lengths: q (B, M, H, D), k and v (B, N, G, D), lse (B, H, M). Packed: q (M, H, D), k and v (N, G, D), lse (H, M).
"""

from itertools import pairwise

import torch
from torch import Tensor


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (x.float() for x in (q, k, v))
    score = _score(q, k, scale, causal)
    lse = score.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", (score - lse[..., None]).exp(), _repeated(v, q)), lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """By the given out and lse, which are those of all keys: these may be a part of them."""
    dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    p = (_score(q, k, scale, causal) - lse[..., None]).exp()
    delta = torch.einsum("bihd,bihd->bhi", dout, out)
    ds = scale * p * (torch.einsum("bihd,bjhd->bhij", dout, _repeated(v, q)) - delta[..., None])
    dq = torch.einsum("bhij,bjhd->bihd", ds, _repeated(k, q))
    dk, dv = torch.einsum("bhij,bihd->bjhd", ds, q), torch.einsum("bhij,bihd->bjhd", p, dout)
    return dq, *(x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))


def _score(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    score = torch.einsum("bihd,bjhd->bhij", q, _repeated(k, q)) * scale
    if causal:
        hidden = torch.ones(score.shape[-2:], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
        score = score.masked_fill(hidden, -torch.inf)
    return score


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[2] // x.shape[2], 2)


def _check(*unused: object) -> None:
    """Refuse what is not done here, rather than to compute something else."""
    assert unused == (0.0, -1, -1, 0.0, None), f"the stand-in has no {unused}"


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
    alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    _check(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    out, lse = _forward(q, k, v, softmax_scale, causal)
    return out.to(q.dtype), lse, None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
):  # fmt: skip
    """Writes dq, dk and dv."""
    _check(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    found = _backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
    # Buffers may be longer than the rows at hand.
    for to, grad in zip((dq, dk, dv), found, strict=True):
        to[:, : grad.shape[1]].copy_(grad)


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    _check(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    found = [
        _forward(
            *(x[None, rows] for x, rows in ((q, mine), (k, seen), (v, seen))), softmax_scale, causal
        )
        for mine, seen in _documents(cu_seqlens_q, cu_seqlens_k)
    ]
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs, 1)[0].to(q.dtype), torch.cat(lses, 2)[0], None, None


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    deterministic=False, rng_state=None,
):  # fmt: skip
    """Writes dq, dk and dv."""
    _check(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    for mine, seen in _documents(cu_seqlens_q, cu_seqlens_k):
        rows = ((dout, mine), (q, mine), (k, seen), (v, seen), (out, mine))
        lse = softmax_lse[None, :, mine]
        found = _backward(*(x[None, these] for x, these in rows), lse, softmax_scale, causal)
        for to, these, grad in zip((dq, dk, dv), (mine, seen, seen), found, strict=True):
            to[these].copy_(grad[0])


def _documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """The rows of each document among the queries, and among the keys."""
    borders = (pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
    return [(slice(*mine), slice(*seen)) for mine, seen in zip(*borders, strict=True)]
