"""Pictures of the study, from its records: recall by distance, bits by seconds, bits around borders."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from ring_dilated_attention.training.files import MADE_BY, folder_made, is_our_picture, write_whole

from .borders import AFTER, BEFORE
from .kept import Row, rows_of
from .recall import point_name
from .text import named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("tab:red", "tab:blue", "tab:green", "tab:orange", "tab:purple")  # dense attention is black
HIGHEST = 3.5  # bits per byte; the first steps are above
MAKER = "python -m benchmarks learn --pictures"


def draw(results: Path, folder: Path) -> list[Path]:
    """Draw what there are records of. Returns the files."""
    from matplotlib.figure import Figure

    drawn = []
    for study, draw_study in (("recall", _recall), ("text", _text), ("borders", _borders)):
        if rows := rows_of(results, study):
            figure, content = Figure(figsize=(8, 3.6), layout="constrained"), BytesIO()
            draw_study(figure, rows)
            figure.savefig(content, format="png", dpi=110, metadata={"Software": MADE_BY})
            drawn.append(folder / f"learning_{study}.png")
            with folder_made(folder):
                write_whole(drawn[-1], content.getvalue(), is_our_picture, MAKER)
    return drawn


def _by_name(rows: Sequence[Row], name_of: Callable[[Row], str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[name_of(row)].append(row)
    return found


def _colours(names: Iterable[str]) -> dict[str, str]:
    """One for each pattern, in all panels."""
    return {"dense": "black"} | dict(zip((name for name in names if name != "dense"), COLOURS, strict=False))


def _recall(figure: "Figure", rows: Sequence[Row]) -> None:
    """Accuracy by distance, over all seeds together, a panel for each length."""
    lengths = sorted({row["stages"][-1]["seq_len"] for row in rows})
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    colours = _colours(_by_name(rows, point_name))
    for axes, seq_len in zip(panels, lengths, strict=True):
        there = _by_name([row for row in rows if row["stages"][-1]["seq_len"] == seq_len], point_name)
        for name, some in there.items():
            counts = [
                [sum(each) for each in zip(*bucket, strict=True)]
                for bucket in zip(*(r["by_distance"] for r in some), strict=True)
            ]
            points = [(2**k * 1.41, (a[1] + a[3]) / (a[0] + a[2])) for k, a in enumerate(counts) if a[0] + a[2]]
            axes.plot(*zip(*points, strict=True), color=colours[name], marker="o", markersize=3, label=name)
        axes.axhline(1 / rows[0]["settings"]["num_values"], color="gray", linestyle=":", label="chance")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.02)
        axes.set_title(f"{seq_len:,} positions", fontsize=10)
    panels[len(panels) // 2].set_xlabel("positions from the fact to its question")
    panels[0].set_ylabel("questions answered right")
    shown = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=6, fontsize=8)


def _text(figure: "Figure", rows: Sequence[Row]) -> None:
    """Held-out bits by steps and by CPU seconds; a line for each run."""
    panels, there = (
        figure.subplots(1, 2, sharey=True),
        _by_name(rows, lambda row: named(row, row["settings"]["seq_len"])),
    )
    colours = _colours(there)
    for axes, column, label in zip(panels, (0, 1), ("steps", "CPU seconds"), strict=True):
        for name, some in there.items():
            for row in some:
                points = [(point[column], point[3]) for point in row["curve"]]
                style = {"color": colours[name], "linewidth": 1.2, "label": name if row is some[0] else None}
                axes.plot(*zip(*points, strict=True), **style)
        axes.set_xlabel(label)
    panels[0].set_ylim(top=max(HIGHEST, *(row["curve"][-1][3] for row in rows)))
    panels[0].set_ylabel("held-out bits per byte")
    panels[1].legend(fontsize=8)


def _borders(figure: "Figure", rows: Sequence[Row]) -> None:
    """Bits of the byte after each position around the borders of the widest segments, the mean of the seeds."""
    axes: Axes = figure.subplots()
    there = _by_name(rows, lambda row: named(row, row["settings"]["seq_len"]))
    for (name, some), colour in zip(there.items(), COLOURS, strict=False):
        bits = [statistics.fmean(each) for each in zip(*(row["around_borders"] for row in some), strict=True)]
        axes.plot(range(-BEFORE, AFTER), bits, color=colour, linewidth=1.2, label=name)
    axes.axvline(0, color="gray", linestyle=":")
    axes.set_xlabel(
        f"place of the byte that predicts, from the start of a segment of {max(rows[0]['segment_lengths'])}"
    )
    axes.set_ylabel("held-out bits per byte")
    axes.legend(fontsize=8)
