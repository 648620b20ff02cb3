"""Draws a pattern: which keys each query attends to."""

import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...pattern import DilatedPattern
from ...training.files import write_whole
from ..arguments import check_installed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind readers can tell apart.
BRANCH_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
EMPTY = "#F2F2F2"
MOST_POSITIONS, MOST_HEADS = 128, 4  # the most positions and heads that a picture can show


def draw(path: Path, pattern: DilatedPattern, seq_len: int, num_heads: int) -> None:
    """Draw the pattern to a new file, and print the file's path on stderr.

    Raises ValueError if the sequence is too long, matplotlib is missing, or the file exists already.
    """
    if seq_len > MOST_POSITIONS:
        raise ValueError(
            f"--picture shows at most {MOST_POSITIONS} positions, and --seq-len is {seq_len:,}: draw a shorter pattern "
            "of the same shape"
        )
    check_installed(["matplotlib"], "train", "--picture ")
    content = BytesIO()
    draw_pattern(pattern, seq_len, num_heads).savefig(content, dpi=160, format="png")
    write_whole(path, content.getvalue(), lambda file: False, "this run of rda plan --picture")
    print(path, file=sys.stderr)


def pairs_by_branch(pattern: DilatedPattern, seq_len: int, num_heads: int, head: int) -> Any:
    """A numpy array of bool (branches, queries, keys) for one head: whether the query attends to the key in the
    branch."""
    import numpy

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


def draw_pattern(pattern: DilatedPattern, seq_len: int, num_heads: int) -> "Figure":
    """A figure with one panel for each head. A panel shows the keys (columns) that each query (row) attends to.

    A (query, key) pair has the colour of the first branch in which the query attends to the key.
    """
    import numpy
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

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
