"""Which positions mattered: the attention weights of some queries, and the influence of positions on an output.

B batch, N positions, Q queries, H query heads, D head dim.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import dilated_attention
from .multihead import MultiheadDilatedAttention

MOST_COLUMNS = 1000  # of a picture


def attention_weights(
    attention: MultiheadDilatedAttention,
    x: Tensor,
    queries: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The weights (B, Q, H, N) of all positions of x (B, N, E) in the softmax of some queries of a layer.

    out[i] = sum_j weight[i, j] value[j]: the derivative of a number of out[i] with respect to value[j] is the weight.
    One layer's weights alone can mislead, for other layers have mixed positions before: see `influence` too.

    Args:
        x: the layer's input, on one device.
        queries: (Q,) integers, their positions. The memory is that of a call for each D of them.
        cu_seqlens: as for `dilated_attention`.
    """
    if attention.parallel is not None:
        raise ValueError(
            "attention_weights is for one device: use a module with parallel=None and the same parameters"
        )
    with torch.no_grad():
        table = attention._table(x, None, cu_seqlens, None)
        query, key, _ = attention._heads(x, x, x, table)
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    value = torch.zeros_like(key, requires_grad=True)
    with torch.enable_grad():
        out = dilated_attention(
            *(query, key, value, attention.pattern),
            cu_seqlens=cu_seqlens,
            heads_held=attention.heads_held,
            num_heads=attention.num_heads,
        )
    weights = []
    for some in queries.split(query.shape[3]):  # each in a dim of its own, all in one backward
        dims = torch.arange(len(some), device=out.device)
        dout = torch.zeros_like(out)
        dout[:, some, :, dims] = 1
        (gradient,) = torch.autograd.grad(out, value, dout, retain_graph=True)
        weights.append(gradient[..., : len(some)].permute(0, 3, 2, 1))
    return torch.cat(weights, dim=1)


def influence(output: Callable[[Tensor], Tensor], x: Tensor, *, num_steps: int = 16) -> Tensor:
    """How much each position of x moves an output through all layers, (B, N): integrated gradients
    (arXiv 1703.01365). They add up to output(x) - output(zeros), the better the more steps.

        influence(lambda x: model(x)[:, label], recordings)

    The gradient at x alone would be small wherever an output is saturated, however much a position did for it.

    Args:
        output: from x to one number for each batch entry.
        x: floating, (B, N) or (B, N, channels).
        num_steps: of the way from zeros to x; each runs forward and backward once.
    """
    total = torch.zeros_like(x)
    for step in range(num_steps):
        scaled = (x * (step + 0.5) / num_steps).detach().requires_grad_()
        with torch.enable_grad():
            total += torch.autograd.grad(output(scaled).sum(), scaled)[0]
    return (total * x.detach() / num_steps).reshape(*x.shape[:2], -1).sum(dim=2)


def draw_influence(path: Path | str, influence: Tensor, signal: Tensor | None = None) -> None:
    """Write a picture of how large the influence (N,) of positions is, below the signal (N,). It needs matplotlib.

    Positions that share a column are drawn by their largest value (a signal also by its smallest).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "pictures need matplotlib: pip install 'ring-dilated-attention[train]'"
        ) from error

    def largest(x: Tensor) -> Tensor:
        num_columns = min(len(x), MOST_COLUMNS)
        return F.adaptive_max_pool1d(x.detach().float().cpu()[None], num_columns)[0]

    figure = Figure(figsize=(8, 3 if signal is None else 4.5), layout="constrained")
    *above, below = figure.subplots(1 if signal is None else 2, 1, sharex=True, squeeze=False)[:, 0]
    heights = largest(influence.abs())
    places = torch.linspace(0, len(influence) - 1, len(heights))
    below.fill_between(places, heights, step="mid", color="tab:red", linewidth=0.8)
    below.set(xlabel="position", ylabel="influence", xlim=(0, len(influence)))
    if signal is not None:
        lowest, highest = -largest(-signal), largest(signal)
        above[0].fill_between(places, lowest, highest, color="tab:blue", linewidth=0.8)
        above[0].set_ylabel("signal")
    figure.savefig(path, dpi=120)
