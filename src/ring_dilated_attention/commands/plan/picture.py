"""Draws a pattern: which keys a query sees."""

import sys
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...pattern import DilatedPattern
from ...training.files import MADE_BY, check_mine, is_our_picture, write_whole
from ..arguments import check_installed, check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind readers can tell apart.
BRANCH_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
INK, EMPTY = "#222222", "#F2F2F2"
MOST_POSITIONS, MOST_HEADS = 64, 4  # the most that a picture can show


def check_picture(path: Path) -> None:
    """Raise ValueError if nothing can be drawn, or if this would replace a file that this library did not make."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--picture {path}: pictures are PNG: name one NAME.png")
    check_installed(["matplotlib"], "train", "--picture ")
    check_writable("--picture", path.parent)
    check_mine(path, is_our_picture, "rda plan --picture")


def draw(path: Path, pattern: DilatedPattern, seq_len: int, num_heads: int) -> None:
    """Draw the pattern, and print the path on stderr."""
    save(path, draw_pattern(pattern, seq_len, num_heads))
    print(path, file=sys.stderr)


def save(path: Path, figure: "Figure") -> None:
    content = BytesIO()
    figure.savefig(content, dpi=160, format="png", metadata={"Software": MADE_BY})
    write_whole(path, content.getvalue(), is_our_picture, "rda plan --picture")


def branches_by_pair(
    pattern: DilatedPattern, seq_len: int, num_heads: int, head: int, *, size: int = 1
) -> list[list[list[int]]]:
    """For each query and key of a head, the branches in which the query sees the key.

    A cell stands for `size` queries and `size` keys: it has the branches in which any of these queries sees any of
    these keys.
    """
    num_cells = -(-seq_len // size)
    cells: list[list[list[int]]] = [[[] for _ in range(num_cells)] for _ in range(num_cells)]
    for branch, (length, rate) in enumerate(pattern.branches):
        phase = pattern.phase_of(branch, head, num_heads)
        if phase is None:
            continue
        step = max(rate, size)  # of one segment, a cell has at least one row in each such step
        for start in range(0, seq_len, max(length, size)):
            rows = range(start + phase, min(start + length, seq_len), step)
            for query, key in product(rows, rows):
                branches = cells[query // size][key // size]
                if (not pattern.is_causal or key <= query) and branch not in branches:
                    branches.append(branch)
    return cells


def draw_pattern(pattern: DilatedPattern, seq_len: int, num_heads: int) -> "Figure":
    """One panel for each head: the keys (columns) that a query (row) sees, in the colour of the pair's first branch."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    size = -(-seq_len // MOST_POSITIONS)
    num_shown = min(num_heads, MOST_HEADS)
    figure = Figure(figsize=(2.7 * num_shown + 0.5, 3.75), layout="constrained", facecolor="white")
    panels = figure.subplots(1, num_shown, squeeze=False)[0]
    for head, axes in enumerate(panels):
        _draw_head(axes, pattern, seq_len, num_heads, head, size)
    panels[0].set_ylabel("query")
    entries: list[Any] = [
        Patch(color=BRANCH_COLOURS[i % len(BRANCH_COLOURS)], label=f"segments of {w:,}, rate {r:,}")
        for i, (w, r) in enumerate(pattern.branches)
    ]
    said = "each dot: one more branch has the pair"
    entries.append(Line2D([], [], ls="none", marker="o", ms=4, mec=INK, mfc="white", label=said))
    columns = min(len(entries), num_shown + 1)
    figure.legend(
        handles=entries, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    title = "Which keys a query sees"
    if pattern.is_causal:
        title += ", causal"
    if size > 1:
        title += f"; a cell stands for {size:,} positions"
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_head(
    axes: "Axes", pattern: DilatedPattern, seq_len: int, num_heads: int, head: int, size: int
) -> None:
    from matplotlib.colors import to_rgb

    cells = branches_by_pair(pattern, seq_len, num_heads, head, size=size)
    num_cells = len(cells)

    def colour(i: int, j: int) -> tuple[float, float, float]:
        if cells[i][j]:
            return to_rgb(BRANCH_COLOURS[cells[i][j][0] % len(BRANCH_COLOURS)])
        return to_rgb("white" if pattern.is_causal and j > i else EMPTY)

    colours = [[colour(i, j) for j in range(num_cells)] for i in range(num_cells)]
    axes.imshow(colours, interpolation="nearest")
    dots = []
    for i, j in product(range(num_cells), range(num_cells)):
        more = len(cells[i][j]) - 1
        for k in range(more):
            dots.append((j + 0.24 * (2 * k - (more - 1)), i))  # beside each other, centred
    axes.scatter(
        [x for x, _ in dots],
        [y for _, y in dots],
        s=100 / num_cells,
        c="white",
        linewidths=0,
        zorder=3,
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([x - 0.5 for x in range(1, num_cells)], minor=True)
        places = range(0, num_cells, max(1, num_cells // 4))
        axis.set_ticks(places, [f"{place * size:,}" for place in places])
    axes.grid(which="minor", color="white", linewidth=0.5)
    axes.tick_params(which="both", length=0, labelsize=7)
    axes.spines[:].set_visible(False)
    phases = [pattern.phase_of(i, head, num_heads) for i in range(len(pattern.branches))]
    named = ", ".join("none" if phase is None else str(phase) for phase in phases)
    axes.set_title(f"head {head}: phases {named}", fontsize=9)
    axes.set_xlabel("key")
