"""The progress bar: loss, speed and memory, on stderr of rank 0."""

import shutil
import sys
from types import TracebackType

from .files import LossyStream
from .metrics import Step
from .options import Hyperparameters
from .run_report import megabytes

BAR_COLUMNS = 45  # percentage, steps, time and speed, and a bar that can be seen


class Progress:
    """One line: bits per byte, tokens per second, resident memory of every rank and the plan's attention figure."""

    def __init__(self, options: Hyperparameters, first_step: int, rank: int, planned_attention: int) -> None:
        from tqdm import tqdm

        self._seq_len = options.seq_len
        self._plan = f"one attention: {megabytes(planned_attention)}"
        self._bar = tqdm(
            total=options.steps,
            initial=first_step,
            unit="step",
            file=LossyStream(sys.stderr),
            disable=rank != 0,
            dynamic_ncols=True,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, step: Step) -> None:
        resident = step.resident_bytes
        shown = (
            "+".join(f"{x / 1e6:.0f}" for x in resident) if len(resident) <= 4 else f"at most {max(resident) / 1e6:.0f}"
        )
        parts = [f"{step.bits_per_byte:.3f} bits/byte", f"{self._seq_len / step.seconds:,.0f} tokens/s", f"{shown} MB"]
        self._bar.set_postfix_str(fitting([*parts, self._plan]), refresh=False)
        self._bar.update()


def fitting(parts: list[str], columns: int | None = None) -> str:
    """As many of the parts as fit beside the bar itself, the first ones first."""
    columns = shutil.get_terminal_size().columns if columns is None else columns
    while len(parts) > 1 and len(", ".join(parts)) > columns - BAR_COLUMNS:
        parts = parts[:-1]
    return ", ".join(parts)
