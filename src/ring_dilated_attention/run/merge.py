"""Merges partials (out, lse): a monoid with the identity (0, -inf). Kernels that add in place merge elsewhere."""

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor) -> None:
    """Merge a partial into (out, lse), in place. Shapes (..., D) and (...); `out` is in the accumulator's dtype.

    Each merge rounds lse, and the errors add up in p = exp(score - lse). For many merges pass lse in float64, whatever
    the dtype of the partial.

    Two partials over disjoint multisets of keys, naively:

        lse' = log(exp(lse) + exp(partial_lse))
        out' = out * exp(lse - lse') + partial_out * exp(partial_lse - lse')

    The two weights add up to 1, so out' is a linear interpolation by sigmoid(partial_lse - lse): one pass over out.
    """
    # (-inf) - (-inf) is NaN; an empty partial has no weight.
    weight = torch.sigmoid(partial_lse - lse).masked_fill_(partial_lse == -torch.inf, 0)
    out.lerp_(partial_out.to(out.dtype), weight.to(out.dtype).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, partial_lse.to(lse.dtype)))


def merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Partials (P, ..., D) and (P, ...) merged at once: out (..., D) and lse (...)."""
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp_().masked_fill_(lses == -torch.inf, 0)  # (-inf) - (-inf) is NaN
    return (weights.to(outs.dtype).unsqueeze(-1) * outs).sum(0), lse
