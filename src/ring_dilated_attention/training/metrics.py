"""metrics.jsonl: a line for each step, written as the run goes; and for TensorBoard, if it is asked for.

    {"run": "<its name>"}
    {"step": 1, "loss": 5.54, "bits_per_byte": 8.0, "seconds": 0.9, "tokens_per_second": 36408.9,
     "waited_seconds": [0.01, 0.02], "resident_bytes": [412000000, 411000000]}

The two lists have an entry for each rank. Waited is the time in which a rank did nothing but wait for messages of the
attention and its handshakes; the sum of gradients, which torch does by itself, is not in it.
"""

import json
import math
from contextlib import nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from .files import MOST_BYTES, check_mine, json_object, write_whole

METRICS_FILE, TENSORBOARD_FOLDER = "metrics.jsonl", "tensorboard"


class Step(NamedTuple):
    """One step, as all ranks saw it."""

    step: int
    bits_per_byte: float
    seconds: float
    tokens: int
    waited_seconds: list[float]
    resident_bytes: list[int]

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": self.bits_per_byte * math.log(2),
            "bits_per_byte": self.bits_per_byte,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "waited_seconds": self.waited_seconds,
            "resident_bytes": self.resident_bytes,
        }


class Metrics:
    """Of one run; nothing on other ranks than the first.

    Raises:
        ValueError: if a file of another run, or of somebody else, is in the way.
    """

    def __init__(self, folder: Path, run: str, step: int, rank: int, *, tensorboard: bool = False) -> None:
        self._file, self._writer = None, None
        self._folder, self._has_steps = folder, False
        if rank != 0:
            return
        path = folder / METRICS_FILE
        kept = lines_before(path, run, step) if path.exists() else [json.dumps({"run": run})]
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{line}\n" for line in kept).encode(), partial(is_of, run=run), "this run")
        self._file, self._has_steps = path.open("a"), len(kept) > 1
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=step + 1)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError) if error is not None else nullcontext():  # a full disk has been said already
                self._file.close()
            # A run that is refused (a full disk, say) leaves no trace; one that fails leaves what it had come to.
            is_trace = isinstance(error, (ValueError, OSError)) or not self._has_steps
            if error is not None and is_trace and not any(self._folder.glob("checkpoint-*")):
                (self._folder / METRICS_FILE).unlink(missing_ok=True)
        if self._writer is not None:
            self._writer.close()

    def add(self, step: Step) -> None:
        if self._file is None:
            return
        row = step.as_json()
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._has_steps = True
        if self._writer is not None:
            for name in ("bits_per_byte", "loss", "tokens_per_second"):
                self._writer.add_scalar(name, row[name], step.step)
            self._writer.add_scalar("waited_seconds/most", max(step.waited_seconds), step.step)
            self._writer.add_scalar("resident_bytes/most", max(step.resident_bytes), step.step)


def is_of(file: BinaryIO, run: str) -> bool:
    """Whether a file is that of a run."""
    return json_object(file.readline(MOST_BYTES)) == {"run": run}


def lines_before(path: Path, run: str, step: int) -> list[str]:
    """The lines of a run up to a step, from which it goes on; a line that was cut off by the end of a run is none."""
    check_mine(path, partial(is_of, run=run), "this run")
    lines = path.read_text(errors="replace").splitlines()
    return lines[:1] + [line for line in lines[1:] if 1 <= json_object(line).get("step", 0) <= step]


def check_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs its package: pip install tensorboard. Without it there is metrics.jsonl")
