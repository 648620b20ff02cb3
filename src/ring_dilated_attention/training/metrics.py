"""The progress of a run: metrics.jsonl, with a `Step` on each line."""

import json
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .files import MOST_BYTES, check_mine, json_object, mentions, named_in_errors, write_whole

METRICS_FILE = "metrics.jsonl"


class Step(NamedTuple):
    """The figures of one training step."""

    run: str  # the name of the run, by which the run recognises its metrics
    step: int  # the number of the step, from 1
    bits_per_byte: float  # the training loss of the step
    held_out_bits_per_byte: float | None  # None: no evaluation followed the step
    seconds: float
    tokens_per_second: float
    resident_bytes: list[int]  # the bytes of memory that each rank has after the step

    def __str__(self) -> str:
        memory = f"{max(self.resident_bytes) / 1e6:,.0f} MB"
        return (
            f"{self.bits_per_byte:.3f} bits/byte, {self.tokens_per_second:,.0f} tokens/s, {memory}"
        )


class Metrics(AbstractContextManager["Metrics"]):
    """Appends steps to the metrics of a run. Only the first rank writes.

    step: the step from which the run resumes. Lines of later steps are dropped.

    run: the name of this run, or None to replace the metrics of any run. Raises ValueError if another run made the
    file.
    """

    def __init__(self, folder: Path, run: str | None, step: int, rank: int) -> None:
        self.folder, self.file = folder, None
        if rank != 0:
            return
        path, is_ours = folder / METRICS_FILE, partial(is_of, run=run)
        check_mine(path, is_ours, "this run")
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        # Keep the complete lines of steps 1 to `step`, because the run repeats all later steps.
        kept = [
            f"{line}\n" for line in lines if json_object(line).get("step") in range(1, step + 1)
        ]
        write_whole(path, "".join(kept).encode(), is_ours, "this run")
        self.file = path.open("a")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.file is None:
            return
        with suppress(OSError):  # ignore the error of a full disk, which `add` has raised already
            self.file.close()
        # Delete the metrics of a run that fails before its first checkpoint, because that run cannot be resumed.
        # Otherwise the file would be in the way of the next run.
        if error is not None and not any(self.folder.glob("checkpoint-*")):
            (self.folder / METRICS_FILE).unlink(missing_ok=True)

    def add(self, step: Step) -> None:
        if self.file is not None:
            with named_in_errors(self.folder / METRICS_FILE):
                self.file.write(json.dumps(step._asdict()) + "\n")
                self.file.flush()


def is_of(file: BinaryIO, run: str | None) -> bool:
    """Whether an open file has the metrics of the run with the name `run`.

    If `run` is None: whether the file has the metrics of any run, or is empty.
    """
    if run is not None:
        return mentions(run)(file)
    line = file.readline(MOST_BYTES)
    return not line or "bits_per_byte" in json_object(line)
