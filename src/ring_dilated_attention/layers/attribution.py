"""Which positions mattered: the attention weights of some queries, and the influence of positions on an output.

B batch, N positions, Q queries, H query heads, D head dim.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..attention import dilated_attention
from ..attention.validate import is_integral
from .multihead import MultiheadDilatedAttention
from .padded import ValidRows
from .rotary import RotaryTable, check_positions


def attention_weights(
    attention: MultiheadDilatedAttention,
    x: Tensor,
    queries: Tensor | Sequence[int],
    *,
    key_padding_mask: Tensor | None = None,
    positions: Tensor | RotaryTable | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The attention weights (B, Q, H, N) that some queries of a layer give to all positions of the layer's input
    x (B, N, E).

    out[i] = sum_j weight[i, j] value[j], where out is the result of the attention before `sub_layernorm` and
    `out_proj`. So weight[i, j] is the derivative of an entry of out[i] with respect to the same entry of value[j].
    The weights of a query at padding are 0.

    The weights of a single layer can mislead, because earlier layers have already mixed the positions. `influence`
    looks through all layers.

    Args:
        x: the input of the attention itself, on one device. (In a layer with norm_first it is the output of the norm.)
        queries: (Q,) integers, the positions of the queries. One backward computes the weights of D queries, so the
            time grows with Q / D.
        key_padding_mask, positions, cu_seqlens: the arguments with which the layer is called on x.
    """
    if not isinstance(attention, MultiheadDilatedAttention):
        raise ValueError(
            f"attention_weights takes a MultiheadDilatedAttention, got {type(attention).__name__}: after "
            "replace_attention pass layer.self_attn. For LongNetEncoder and other models take layers.influence"
        )
    if attention.parallel is not None:
        raise ValueError(
            "attention_weights is for one device: use a module with parallel=None and the same parameters"
        )
    if isinstance(queries, (list, range)):
        queries = torch.tensor(queries)
    if (
        not isinstance(queries, Tensor)
        or queries.dim() != 1
        or not is_integral(queries)
        or ((queries < 0) | (queries >= x.shape[1])).any()
    ):
        raise ValueError(
            f"queries must be integers below {x.shape[1]} and at least 0, the positions of x, in a list, a range or a "
            f"tensor of one dimension, got {queries!r}"
        )
    attention._check_documents(x, key_padding_mask, cu_seqlens, None, None)
    check_positions(positions, x, attention.head_dim, attention.rotary_base, False)
    with torch.no_grad():
        table = attention._table(x, positions, cu_seqlens, None)
        query, key, _ = attention._heads(x, x, x, table)
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    value = torch.zeros_like(key, requires_grad=True)
    with torch.enable_grad():
        packed_value = value
        if key_padding_mask is not None:
            rows = ValidRows(key_padding_mask, x)
            query, key, packed_value = map(rows.pack, (query, key, value))
            cu_seqlens = rows.cu_seqlens
        out = dilated_attention(
            query,
            key,
            packed_value,
            attention.pattern,
            cu_seqlens=cu_seqlens,
            heads_held=attention.heads_held,
            num_heads=attention.num_heads,
        )
        if key_padding_mask is not None:
            out = rows.unpack(out.flatten(2)).view_as(value)
    weights = []
    # One backward computes the weights of up to D queries. For the k-th of these queries the gradient of out is 1 in
    # head dim k, and 0 elsewhere. So head dim k of the values' gradient holds the weights of the k-th query.
    for some in queries.long().split(query.shape[3]):
        dims = torch.arange(len(some), device=out.device)
        dout = torch.zeros_like(out)
        dout[:, some, :, dims] = 1
        (gradient,) = torch.autograd.grad(out, value, dout, retain_graph=True)
        weights.append(gradient[..., : len(some)].permute(0, 3, 2, 1))
    return torch.cat(weights, dim=1)


def influence(output: Callable[[Tensor], Tensor], x: Tensor, *, num_steps: int = 16) -> Tensor:
    """How much each position of x changes an output, through all layers: (B, N), computed by integrated gradients
    (arXiv 1703.01365).

        influence(lambda x: model(x)[:, label], recordings)

    The gradients at several points between zeros and x are averaged. With enough points the influences add up to
    output(x) - output(zeros). If their sum is wrong by more than a tenth, a warning says so. The gradient at x alone
    would mislead: it is small wherever the output is saturated, even at positions that matter.

    Args:
        output: a function from x to one number for each batch entry. If it returns several numbers for an entry, their
            sum is used.
        x: floating, (B, N) or (B, N, channels).
        num_steps: the number of points between zeros and x. Each point takes one forward and one backward.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1")
    total = torch.zeros_like(x)
    for step in range(num_steps):
        scaled = (x * (step + 0.5) / num_steps).detach().requires_grad_()
        with torch.enable_grad():
            total += torch.autograd.grad(output(scaled).sum(), scaled)[0]
    moved = (total * x.detach() / num_steps).reshape(*x.shape[:2], -1).sum(dim=2)
    with torch.no_grad():
        change = output(x) - output(torch.zeros_like(x))
    gap = (moved.sum() - change.sum()).abs()
    size = change.abs().sum()
    if gap > 0.1 * size:
        warnings.warn(
            f"the influences are {gap:.2g} off the output's change from zeros to x, which is {size:.2g}: take "
            f"more steps than num_steps={num_steps}; or, as where LayerNorm reads x itself, start from a baseline that "
            "is not zeros: influence(lambda d: output(baseline + d), x - baseline)",
            stacklevel=2,
        )
    return moved
