"""The results of a run: the files that it leaves at its end, and a table of the memory of each rank."""

import json
import statistics
from pathlib import Path
from typing import Any

from .files import mentions, write_whole
from .options import Hyperparameters
from .run import RECORD_FILE


def make_record(folder: Path, state: dict[str, Any], num_parameters: int) -> dict[str, Any]:
    options = Hyperparameters.from_dict(state["hyperparameters"])
    speeds = []
    for step, seconds in enumerate(state["step_seconds"]):
        speeds.append(options.phase_of(step).num_positions / seconds)
    return {
        "run": state["run"],  # first: by it the run knows its file
        "status": "complete" if state["step"] == options.total_steps else "interrupted",
        "run_folder": str(folder),
        **{name: state[name] for name in ("hardware", "versions", "hyperparameters", "document")},
        "num_ranks": len(state["ranks"]),
        "num_parameters": num_parameters,
        "steps_done": state["step"],
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        # These two are known when it is complete.
        "held_out_bits_per_byte": None,
        "gzip_bits_per_byte": None,
        **{name: state[name] for name in ("bits_per_byte", "step_seconds", "ranks")},
    }


def write_report(record: dict[str, Any]) -> None:
    """Write record.json. A ValueError refuses to write over a file that this run did not make."""
    content = (json.dumps(record, indent=1) + "\n").encode()
    path = Path(record["run_folder"]) / RECORD_FILE
    write_whole(path, content, mentions(record["run"]), "this run")


def summary(record: dict[str, Any]) -> str:
    """The memory of every rank, and the losses and the speed of the run."""
    lines = ["rank   positions  peak resident"]
    for row in record["ranks"]:
        peak = f"{row['resident_peak'] / 1e6:,.0f} MB"
        lines.append(f"{row['rank']:>4}  {row['positions']:>10,}  {peak:>13}")
    losses = record["bits_per_byte"]
    if losses:
        lines.append(
            f"bits per byte: {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}"
        )
        speed = f"{record['tokens_per_second']:,.0f} tokens/s by the median step"
        lines.append(f"speed: {speed}; {sum(record['step_seconds']):,.0f} s in steps")
    held_out = record["held_out_bits_per_byte"]
    if held_out is not None:
        lines.append(
            f"held out: {held_out:.3f} bits per byte on {record['document']['num_held_out']:,} bytes"
        )
        lines.append(f"gzip on the same bytes: {record['gzip_bits_per_byte']:.3f}")
    return "\n".join(lines)
