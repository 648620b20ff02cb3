"""The pictures of docs/evidence.html, each from one record. They are narrow: a phone shows them at full size.

In the SVG a colour is replaced by a variable of the page's style sheet (`COLOURS`). In dark mode the variable has
another value.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from itertools import groupby
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from ..record import branches, tensors

# Each colour as it is drawn, and the variable of the style sheet that replaces it.
COLOURS = {
    "#1f2328": "--ink",
    "#8a9099": "--faint",
    "#fefefe": "--paper",
    "#0072b2": "--first",
    "#d55e00": "--second",
    "#00795a": "--third",
    "#8c5bb0": "--fourth",
}
INK, FAINT, PAPER, *SERIES = COLOURS
WIDTH = 3.9  # in inches: on a phone 390 pixels wide, text of 9 points is 11 pixels high
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "benchmarks",
    "figure.constrained_layout.w_pad": 0.08,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.3,
}


class Drawn(NamedTuple):
    """A picture, its caption of a sentence or two, and an alternative text for readers who cannot see it."""

    figure: Figure
    caption: str
    alternative: str


Rows = Sequence[dict[str, Any]]


def svg(name: str, draw: Callable[[], Drawn]) -> tuple[str, Drawn]:
    """A picture as SVG for use within a page, with colours of the page's style sheet. Returns it with what was drawn.

    All ids in the SVG begin with `name`, so that those of two pictures differ.
    """
    content = StringIO()
    with matplotlib.rc_context(STYLE):
        drawn = draw()
        drawn.figure.savefig(
            content, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = content.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", text)
    view = re.search(r'viewBox="[^"]+"', text)
    assert view is not None
    title = f'<title id="{name}-said">{escape(drawn.alternative)}</title>'
    text = f'<svg {view[0]} role="img" aria-labelledby="{name}-said">{title}{text[text.index(">") + 1 :]}'
    for colour, variable in COLOURS.items():
        text = text.replace(colour, f"var({variable})")
    return text, drawn


def memory(rows: Rows) -> Drawn:
    """The largest peak memory of a rank against the number of ranks p. A line shows 1/p of one rank's peak."""
    figure, axes = _axes(3.4, "ranks p", "peak memory per rank, MB")
    groups = []
    for _, of_call in groupby(rows, lambda row: (branches(row), row["seq_len"])):
        groups.append(list(of_call))
    dashes: dict[str, Any] = {
        "linewidth": 0.8,
        "linestyle": (0, (4, 3)),
    }
    for group, colour, marker in zip(groups, SERIES, "osD^", strict=False):
        p = [row["ranks"] for row in group]
        peaks = [row["forward_backward_bytes"] / 1e6 for row in group]
        shares = [peaks[0] / k for k in p]
        axes.plot(p, shares, color=colour, **dashes)
        label = f"{branches(group[0])}, {group[0]['seq_len']:,} positions"
        axes.plot(
            p,
            peaks,
            color=colour,
            linewidth=0,
            marker=marker,
            markersize=5,
            fillstyle="none",
            label=label,
        )
    _log_ticks(axes, sorted({row["ranks"] for row in rows}), [200, 500, 1000, 2000])
    line = Line2D([], [], color=INK, label="1/p of one rank's peak", **dashes)
    handles, _ = axes.get_legend_handles_labels()
    _legend(figure, [*handles, line], 1)
    most = groups[0][-1]["ranks"]
    times = listed(f"{group[-1]['of_one_rank']:.2f}" for group in groups)
    alternatives = []
    for group in groups:
        points = []
        for row in group:
            points.append(f"{row['forward_backward_bytes'] / 1e6:,.0f} MB on {row['ranks']}")
        alternatives.append(f"{branches(group[0])}: {listed(points)} ranks.")
    return Drawn(
        figure,
        f"Peak memory of the rank that holds most, forward and backward, inputs included, {tensors(rows[0])}. On "
        f"{most} ranks the points are at {times} times their lines, in the order of the legend: where rows travel, "
        "chunks of other ranks take room beside the rank's own.",
        " ".join(alternatives),
    )


def time(rows: Rows) -> Drawn:
    """Seconds against length on logarithmic axes, with a line of the fitted exponent."""
    figure, axes = _axes(3.2, "positions n", "seconds")
    n = [row["seq_len"] for row in rows]
    for key, label, colour, marker in (
        ("seconds", "forward and backward", SERIES[0], "o"),
        ("forward_seconds", "forward alone", SERIES[1], "s"),
    ):
        found = [row[key] for row in rows]
        middle = [x["median"] for x in found]
        below = [x["median"] - x["min"] for x in found]
        above = [x["max"] - x["median"] for x in found]
        # bars without a line between them
        style: dict[str, Any] = {
            "linestyle": "none",
            "marker": marker,
            "markersize": 4,
            "capsize": 2,
            "linewidth": 1,
        }
        axes.errorbar(n, middle, [below, above], color=colour, label=label, **style)
    # a line through the middle point, with the fitted slope
    exponent = rows[0]["exponent"]
    ends = (n[0], n[-1])
    centre = rows[len(rows) // 2]
    fitted = [centre["seconds"]["median"] * (x / centre["seq_len"]) ** exponent for x in ends]
    label = f"n to the power of {exponent:.3f}"
    axes.plot(ends, fitted, color=SERIES[0], linewidth=0.8, label=label)
    _log_ticks(axes, n, [0.5, 1, 2, 5, 10, 20])
    handles, _ = axes.get_legend_handles_labels()
    _legend(figure, handles, 2)
    first = rows[0]
    return Drawn(
        figure,
        f"Time of one call at a fixed pattern, {branches(first)}, {tensors(first)}: median of "
        f"{first['seconds']['repeats']} interleaved repeats, bars from the fastest to the slowest. Forward and "
        f"backward grow with length to the power of {exponent:.3f}; 1 would be exactly linear.",
        "Points on a straight line: "
        + listed(f"{row['seconds']['median']:.3g} seconds at {row['seq_len']:,}" for row in rows)
        + " positions.",
    )


def peers(rows: Rows) -> Drawn:
    """CPU seconds of other libraries, divided by ours. A cross marks a library that is wrong for some input."""
    timed = [row for row in rows if "ratio" in row and row["version"]]  # our rows have no version
    figure = _figure(0.24 * len(timed) + 1.1)
    axes = figure.add_subplot(xlabel="CPU seconds, theirs over ours", xscale="log")
    axes.axvline(1, color=INK, linewidth=0.8)
    for y, row in enumerate(timed):
        ratio = row["ratio"]
        colour, marker = SERIES[0], "o"
        if _wrong(row):
            colour, marker = SERIES[1], "X"
        axes.plot([ratio["min"], ratio["max"]], [y, y], color=colour, linewidth=1)
        axes.plot(ratio["median"], y, color=colour, marker=marker, markersize=5)
    axes.set(
        yticks=range(len(timed)),
        yticklabels=[row["peer"] for row in timed],
        ylim=(len(timed) - 0.5, -0.5),
    )
    ticks = [0.2, 0.5, 1, 2, 5, 10]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    kinds = (
        ("o", SERIES[0], "wrong for no input that was tried"),
        ("X", SERIES[1], "wrong for some input, without a word"),
    )
    handles = []
    for marker, colour, label in kinds:
        handle = Line2D([], [], linestyle="none", marker=marker, color=colour, label=label)
        handles.append(handle)
    _legend(figure, handles, 1)
    left_out = sum("ratio" not in row for row in rows)
    reasons = ""
    if left_out:
        reasons = f", also why {left_out} could not be measured"
    return Drawn(
        figure,
        "CPU seconds of other implementations over those of this library, by turns in the same processes; lines go "
        "from the least to the most. Left of 1 the other one is cheaper. Dense attention is another function, and a "
        f"wrong result has a cost too: the table says more{reasons}.",
        " ".join(map(_ratio_text, timed)),
    )


def _ratio_text(row: Mapping[str, Any]) -> str:
    """A peer's row in words, for the alternative text."""
    text = f"{row['peer']}: {row['ratio']['median']:.2f} times"
    wrong = _wrong(row)
    if wrong:
        text += f", wrong for {', '.join(wrong)}"
    return f"{text}."


def _wrong(row: Mapping[str, Any]) -> list[str]:
    """The kinds of input for which another library gives a wrong result without an error."""
    return [name for name, found in row["inputs"].items() if found["verdict"] == "wrong"]


def text(rows: Rows) -> Drawn:
    """Held-out bits per byte of a language model against the CPU seconds of its training."""
    length = rows[0]["settings"]["seq_len"]
    found = []
    for row in rows:
        name = branches(row)
        if list(row["segment_lengths"]) == [length]:
            name = "dense"
        found.append((name, row["curve"]))
    return Drawn(
        _curves({f"{length:,} bytes of context": found}, 3, "held-out bits per byte"),
        "Held-out bits per byte of Python's standard library against the processor's seconds of training, by pattern; "
        "a line for each seed, and lower is better. The models are small and were trained for minutes.",
        _ends({length: found}, 3, "bits per byte"),
    )


def _curves(
    panels: Mapping[str, Sequence[tuple[str, Sequence[Sequence[float]]]]], column: int, label: str
) -> Figure:
    """A figure with a panel for each entry of `panels`, in which lines show a column of curves against CPU seconds.

    Lines of the same name have the same colour. Dense attention has the colour of text.
    """
    figure = _figure(2.2 * len(panels) + 0.9)
    names = ["dense"]
    for lines in panels.values():
        for name, _ in lines:
            if name not in names:
                names.append(name)
    looks: list[tuple[str, Any]] = []
    for dashes in ("-", (0, (4, 2))):
        for colour in (INK, *SERIES):
            looks.append((colour, dashes))
    style = dict(zip(names, looks, strict=False))
    line = {
        "linewidth": 1,
        "marker": ".",
        "markersize": 2.5,
    }
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        for name, curve in lines:
            colour, dashes = style[name]
            x = [point[1] for point in curve]
            y = [point[column] for point in curve]
            axes.plot(x, y, color=colour, linestyle=dashes, **line)
        axes.set_title(title, loc="left")
        axes.set(ylabel=label)
        axes.grid()
    axes.set(xlabel="CPU seconds of training")
    handles = []
    for name, (colour, dashes) in style.items():
        handles.append(Line2D([], [], color=colour, linestyle=dashes, label=name))
    _legend(figure, handles, 2)
    return figure


def _ends(
    groups: Mapping[int, Sequence[tuple[str, Sequence[Sequence[float]]]]], column: int, of: str
) -> str:
    """The last point of each curve in words, for the alternative text. of: the unit of the column."""
    sentences = []
    for n, lines in groups.items():
        for name, curve in lines:
            value = curve[-1][column]
            seconds = curve[-1][1]
            sentences.append(f"{name} at {n:,}: {value:.2f} {of} after {seconds:.0f} seconds.")
    return " ".join(sentences)


def _figure(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), layout="constrained")


def _axes(height: float, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = _figure(height)
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    axes.grid()
    return figure, axes


def _log_ticks(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    """Make both axes logarithmic, with plain numbers such as 1,000 at the ticks."""
    axes.set(xscale="log", yscale="log")
    for axis, ticks in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.set_major_locator(FixedLocator(list(ticks)))
        axis.set_major_formatter(FixedFormatter([f"{tick:,}" for tick in ticks]))
        axis.set_minor_locator(NullLocator())


def _legend(figure: Figure, handles: Sequence[Any], columns: int) -> None:
    figure.legend(
        handles=list(handles),
        loc="outside lower left",
        ncols=columns,
        borderpad=0.2,
        handlelength=1.6,
    )


def listed(words: Iterable[str]) -> str:
    """Words as in a sentence: "1, 2 and 3"."""
    *others, last = words
    if not others:
        return last
    return f"{', '.join(others)} and {last}"
