"""The picture of `rda train`: bits per byte, as a PNG that holds the run's name."""

from io import BytesIO
from itertools import accumulate
from typing import Any

from .files import MADE_BY


def draw_losses(record: dict[str, Any]) -> bytes:
    """The losses of a run by time, since a step of a long sequence takes many times that of a short one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    seconds = list(accumulate(record["step_seconds"], initial=0.0))
    axes.plot(seconds[1:], record["bits_per_byte"], linewidth=0.5, label="training")
    if record["held_out"]:
        points = [(seconds[each["step"]], each["bits_per_byte"]) for each in record["held_out"]]
        axes.plot(*zip(*points, strict=True), marker="o", label="held out")
    if record["gzip_bits_per_byte"] is not None:
        axes.axhline(
            record["gzip_bits_per_byte"], linestyle=":", label="gzip on the held-out bytes"
        )
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("bits per byte")
    axes.set_ylim(bottom=0)
    axes.legend()
    content = BytesIO()
    texts = {"Software": MADE_BY, "Source": f"run {record['run']}"}
    figure.savefig(content, format="png", dpi=120, metadata=texts)
    return content.getvalue()
