"""The progress of a run: metrics.jsonl with a `Step` on each line, the progress bar, and TensorBoard on request."""

import json
import shutil
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .files import MOST_BYTES, check_mine, json_object, write_whole

METRICS_FILE, TENSORBOARD_FOLDER = "metrics.jsonl", "tensorboard"
BAR_COLUMNS = 45  # for the bar with its percentage, steps, time and speed


class Step(NamedTuple):
    """One step. The two lists have an entry for each rank."""

    run: str  # the name of the run, by which it knows its file
    step: int  # from 1
    loss: float  # nats per byte
    bits_per_byte: float
    held_out_bits_per_byte: float | None  # every --eval-every steps
    seconds: float
    tokens_per_second: float
    waited_seconds: list[float]  # for messages of the attention and its handshakes, not for DDP's sum of gradients
    resident_bytes: list[int]


class Metrics(AbstractContextManager["Metrics"]):
    """The metrics of a run, written by the first rank alone. A ValueError refuses a file that another run made, unless
    `run`, this run's name, is None."""

    def __init__(self, folder: Path, run: str | None, step: int, rank: int, *, tensorboard: bool = False) -> None:
        self._file, self._writer = None, None
        self._folder, self._has_steps = folder, False
        if rank != 0:
            return
        path = folder / METRICS_FILE
        check_mine(path, partial(is_of, run=run), "this run")
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        kept = [line for line in lines if json_object(line).get("step") in range(1, step + 1)]  # whole ones
        write_whole(path, "".join(f"{line}\n" for line in kept).encode(), partial(is_of, run=run), "this run")
        self._file, self._has_steps = path.open("a"), bool(kept)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=step + 1)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._file is not None:
            with suppress(OSError) if error is not None else nullcontext():  # `error` already reports a full disk
                self._file.close()
            # A run that is refused (the disk is full, say) leaves no file. A run that fails leaves its metrics.
            is_refused = isinstance(error, (ValueError, OSError)) or not self._has_steps
            if error is not None and is_refused and not any(self._folder.glob("checkpoint-*")):
                (self._folder / METRICS_FILE).unlink(missing_ok=True)
        if self._writer is not None:
            self._writer.close()

    def add(self, step: Step) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(step._asdict()) + "\n")
        self._file.flush()
        self._has_steps = True
        if self._writer is not None:
            for name in ("bits_per_byte", "loss", "tokens_per_second", "held_out_bits_per_byte"):
                if (value := getattr(step, name)) is not None:
                    self._writer.add_scalar(name, value, step.step)
            self._writer.add_scalar("waited_seconds/most", max(step.waited_seconds), step.step)
            self._writer.add_scalar("resident_bytes/most", max(step.resident_bytes), step.step)


def is_of(file: BinaryIO, run: str | None) -> bool:
    """Whether these are the metrics of this run. If it is None, any run's will do, or an empty file."""
    line = file.readline(MOST_BYTES)
    first = json_object(line)
    return (run is None and not line) or ("bits_per_byte" in first and run in (None, first.get("run")))


def beside_the_bar(step: Step, planned_attention: int) -> str:
    each = [f"{x / 1e6:.0f}" for x in step.resident_bytes]
    resident = "+".join(each) if len(each) <= 4 else f"at most {max(step.resident_bytes) / 1e6:.0f}"
    figures = [f"{step.bits_per_byte:.3f} bits/byte", f"{step.tokens_per_second:,.0f} tokens/s", f"{resident} MB"]
    figures.append(f"one attention: {planned_attention / 1e6:,.0f} MB")
    while len(figures) > 1 and len(", ".join(figures)) > shutil.get_terminal_size().columns - BAR_COLUMNS:
        figures.pop()
    return ", ".join(figures)
