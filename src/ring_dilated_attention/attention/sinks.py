"""Attention sinks. A sink is one more key in the softmax of each query, with a given score and the value 0.

In gpt-oss the score is a learned logit for each head. torchscale pads keys and values with C rows of zeros: C more
keys, of score 0 and value 0. These C keys have the same effect as one sink with the score log C.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def with_sinks(out_BNHD: Tensor, lse_BNH: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of the softmax with one more key, the sink. In exact arithmetic:

        out' = out * exp(lse) / (exp(lse) + exp(sink))
        lse' = log(exp(lse) + exp(sink))

    sinks: the sink's score, of a shape that broadcasts to (B, N, H). A score of -inf changes nothing.
    """
    # Replace scores of -inf by 0: for a query without keys lse is -inf too, and lse - sink would be NaN.
    is_none = sinks == -torch.inf
    sinks = sinks.to(lse_BNH.dtype).masked_fill(is_none, 0)
    # `weight_BNH` is sigmoid(lse - sink), the total weight of all keys except the sink. Compute it as
    # logsigmoid(x).exp(), because the gradient of torch.sigmoid multiplies by 1 - weight. If the sink has hardly any
    # weight, 1 - weight rounds to 0.
    weight_BNH = F.logsigmoid((lse_BNH - sinks).masked_fill(is_none, torch.inf)).exp()
    out = (out_BNHD * weight_BNH.unsqueeze(-1)).to(out_BNHD.dtype)
    return out, torch.where(is_none, lse_BNH, torch.logaddexp(lse_BNH, sinks))


def why_no_sinks(sinks: object, query_BNHD: Tensor) -> str | None:
    """The reason why `sinks` do not fit the query, as a sentence. None if they fit."""
    num_heads = query_BNHD.shape[2]
    if not isinstance(sinks, Tensor):
        return (
            f"sinks must be a tensor of {num_heads} numbers, one for each query head, got {sinks!r}"
        )
    if sinks.shape != (num_heads,) or not sinks.is_floating_point():
        return (
            f"sinks must have one floating-point number for each of the {num_heads} query heads, got {sinks.dtype} of "
            f"shape {tuple(sinks.shape)}"
        )
    if sinks.device != query_BNHD.device:
        return f"sinks are on {sinks.device}, query is on {query_BNHD.device}: move them"
    return None
