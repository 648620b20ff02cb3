"""The progress bar: loss, speed and memory, on stderr of rank 0."""

import sys
from types import TracebackType

from .files import LossyStream
from .options import Hyperparameters
from .report import megabytes


class Progress:
    """One line: bits per byte, tokens per second, resident memory of every rank and the plan's attention figure."""

    def __init__(self, options: Hyperparameters, first_step: int, rank: int, planned_attention: int) -> None:
        from tqdm import tqdm

        self._seq_len = options.seq_len
        self._plan = f" (one attention: {megabytes(planned_attention)})"
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

    def update(self, bits_per_byte: float, seconds: float, resident: list[int]) -> None:
        shown = (
            "+".join(f"{x / 1e6:.0f}" for x in resident) if len(resident) <= 4 else f"at most {max(resident) / 1e6:.0f}"
        )
        self._bar.set_postfix_str(
            f"{bits_per_byte:.3f} bits/byte, {self._seq_len / seconds:,.0f} tokens/s, {shown} MB{self._plan}",
            refresh=False,
        )
        self._bar.update()
