"""The picture of `rda train`: bits per byte, as a PNG that `files.is_our_picture` recognises."""

import statistics
from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .files import MADE_BY
from .options import Hyperparameters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_losses(record: dict[str, Any]) -> bytes:
    """The losses of a run by time, since a step of a long sequence takes many times that of a short one."""
    (figure, axes), losses = _axes("seconds of training"), record["bits_per_byte"]
    seconds = list(accumulate(record["step_seconds"], initial=0.0))
    axes.plot(seconds[1:], losses, color="tab:blue", alpha=0.3, linewidth=1)
    axes.plot(seconds[1:], smoothed(losses), color="tab:blue", label="training, smoothed")
    options, first = Hyperparameters.from_dict(record["hyperparameters"]), 0
    for phase in options.schedule:
        if first < len(losses):
            axes.axvline(seconds[first], color="lightgray", linewidth=1, zorder=0)
            words = f"{phase.batch_size} x {phase.length:,}"
            axes.annotate(
                words,
                (seconds[first], 0.02),
                xycoords=("data", "axes fraction"),
                rotation=90,
                fontsize=7,
            )
        first += phase.steps
    colours = ("tab:green", "tab:gray", "tab:purple")
    for (name, value), colour in zip(
        (record.get("baselines") or {}).items(), colours, strict=False
    ):
        axes.axhline(
            value, color=colour, linestyle=":", label=f"{name} on the held-out bytes: {value:.3f}"
        )
    held_out, p = record["held_out_bits_per_byte"], record["num_ranks"]
    points = [(seconds[entry["step"]], entry["bits_per_byte"]) for entry in record["held_out"]]
    if points:
        label = "held out" if held_out is None else f"held out: {held_out:.3f} at the end"
        axes.plot(*zip(*points, strict=True), color="tab:orange", marker="o", label=label)
    axes.set_ylim(bottom=0)
    ranks = "1 rank" if p == 1 else f"{p} ranks"
    title = f"{options.schedule[-1].num_positions:,} tokens over {ranks}"
    return _as_png(figure, axes, title, {"Source": f"run {record['run']}"})


def smoothed(values: list[float]) -> list[float]:
    """For each value the mean of the values around it: a tenth of all, at most 51, and fewer at the ends."""
    half, last = min(len(values) // 20, 25), len(values) - 1
    reaches = [min(half, i, last - i) for i in range(len(values))]
    return [statistics.fmean(values[i - reach : i + reach + 1]) for i, reach in enumerate(reaches)]


def _axes(x_label: str) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel("bits per byte")
    return figure, axes


def _as_png(figure: "Figure", axes: "Axes", title: str, texts: dict[str, str]) -> bytes:
    axes.set_title(title)
    axes.legend()
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120, metadata={"Software": MADE_BY} | texts)
    return content.getvalue()
