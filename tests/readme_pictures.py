"""Draws the pictures of the README and docs/idea.md: python tests/readme_pictures.py. `test_readme.py` compares."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.commands.plan.picture import (
    BRANCH_COLOURS,
    EMPTY,
    draw_pattern,
    pairs_by_branch,
    png,
)

INK = "#222222"


def draw_readme(folder: Path) -> list[Path]:
    """A causal pattern, and a query off a phase."""
    shown = DilatedPattern((8, 16, 32), (1, 2, 4), is_causal=True)
    pictures = {"pattern.png": draw_pattern(shown, 32, 4), "off_phase.png": draw_off_phase()}
    for name, figure in pictures.items():
        (folder / name).write_bytes(png(figure))
    return [folder / name for name in pictures]


def draw_off_phase() -> Figure:
    """What two neighbouring queries of one head see in each branch."""
    pattern, seq_len, num_heads, head = DilatedPattern((4, 16), (1, 4)), 16, 4, 1
    pairs = pairs_by_branch(pattern, seq_len, num_heads, head)
    figure = Figure(figsize=(7.5, 2.6), layout="constrained", facecolor="white")
    for axes, query, phase in zip(figure.subplots(2, 1), (9, 10), ("on", "off"), strict=True):
        for branch, (w, r, _) in enumerate(pattern.branches):
            seen = [key for key in range(seq_len) if pairs[branch, query, key]]
            _draw_strip(axes, -1.25 * branch, w, seen, query, BRANCH_COLOURS[branch])
            axes.text(
                -0.7,
                -1.25 * branch,
                f"segments of {w}, rate {r}",
                ha="right",
                va="center",
                fontsize=9,
                color=INK,
            )
            what = f"sees {len(seen)} keys" if seen else "sees nothing"
            axes.text(seq_len - 0.3, -1.25 * branch, what, va="center", fontsize=9, color=INK)
        axes.set_title(f"Query {query} is {phase} the phase of head {head} at rate 4", fontsize=10)
        axes.set(xlim=(-5.6, seq_len + 2.6), ylim=(-1.8, 0.55), aspect="equal")
        axes.axis("off")
    return figure


def _draw_strip(
    axes: Axes, y: float, segment_length: int, seen: list[int], query: int, colour: str
) -> None:
    for key in range(16):
        is_seen, x = key in seen, key - 0.43
        box = Rectangle((x, y - 0.46), 0.86, 0.92, facecolor=colour if is_seen else EMPTY)
        box.set(edgecolor=INK if key == query else "white", linewidth=2 if key == query else 0.5)
        axes.add_patch(box)
        if key and key % segment_length == 0:
            axes.plot([key - 0.5] * 2, [y - 0.55, y + 0.55], color=INK, linewidth=1)
        axes.text(
            key,
            y,
            str(key),
            ha="center",
            va="center",
            fontsize=8,
            color="white" if is_seen else INK,
        )


if __name__ == "__main__":
    print(*draw_readme(Path(__file__).parents[1] / "docs"), sep="\n")
