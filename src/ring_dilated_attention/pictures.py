"""Draws a pattern, and which positions mattered. Needs matplotlib, which the extra `train` installs.

Each function returns a `Figure`, which notebooks show, and which `figure.savefig(path)` writes to a file.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .pattern import DilatedPattern

try:
    import numpy
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError as error:
    raise ImportError(
        "pictures need matplotlib: pip install 'ring-dilated-attention[train]'"
    ) from error

# Okabe and Ito's colours, which most colour-blind readers can tell apart.
BRANCH_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
EMPTY = "#F2F2F2"
MOST_HEADS = 4  # `draw_pattern` draws at most this many heads
MOST_COLUMNS = 1000  # `draw_influence` draws at most this many columns


def pairs_by_branch(
    pattern: DilatedPattern, seq_len: int, num_heads: int, head: int
) -> numpy.ndarray:
    """Whether a query attends to a key in a branch: an array of bool (branches, queries, keys) for one head."""
    positions = numpy.arange(seq_len)
    pairs = numpy.zeros((len(pattern.branches), seq_len, seq_len), bool)
    for number, branch in enumerate(pattern.branches):
        phase = pattern.phase_of(number, head, num_heads)
        if phase is None:
            continue
        has_phase = positions % branch.segment_length % branch.dilation_rate == phase
        reach = branch.in_reach(positions[:, None], positions, is_causal=pattern.is_causal)
        pairs[number] = has_phase[:, None] & has_phase & reach
    return pairs


def draw_pattern(pattern: DilatedPattern, seq_len: int, num_heads: int) -> Figure:
    """A figure with one panel for each head. A panel shows the keys (columns) that each query (row) attends to.

    A (query, key) pair has the colour of the first branch in which the query attends to the key.
    """
    num_shown = min(num_heads, MOST_HEADS)
    figure = Figure(figsize=(2.7 * num_shown + 0.5, 3.75), layout="constrained", facecolor="white")
    patches = []
    for branch, (length, rate, is_window) in enumerate(pattern.branches):
        colour = BRANCH_COLOURS[branch % len(BRANCH_COLOURS)]
        label = f"window of {length:,}" if is_window else f"segments of {length:,}, rate {rate:,}"
        patches.append(Patch(color=colour, label=label))
    panels = figure.subplots(1, num_shown, squeeze=False)[0]
    for head, axes in enumerate(panels):
        colours = numpy.full((seq_len, seq_len, 3), to_rgb(EMPTY))
        pairs = pairs_by_branch(pattern, seq_len, num_heads, head)
        for branch in reversed(range(len(patches))):
            colours[pairs[branch]] = patches[branch].get_facecolor()[:3]
        axes.pcolormesh(colours, edgecolors="white", linewidth=0.3)
        axes.invert_yaxis()
        axes.set(title=f"head {head}", xlabel="key", aspect="equal")
    panels[0].set_ylabel("query")
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle("Which keys a query sees", fontsize=11)
    return figure


def draw_influence(influence: Tensor, signal: Tensor | None = None) -> Figure:
    """A figure of the influence (N,) of each position, below the signal (N,) if there is one.

    If several positions share a column of the figure, the column shows the largest influence among them, and both the
    smallest and the largest value of the signal.
    """

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
        lowest = -largest(-signal)
        highest = largest(signal)
        above[0].fill_between(places, lowest, highest, color="tab:blue", linewidth=0.8)
        above[0].set_ylabel("signal")
    return figure
