"""The results of a run: the files that it leaves at its end, and a summary."""

import json
from pathlib import Path
from typing import Any

from .files import mentions, write_whole
from .options import Hyperparameters
from .run import RECORD_FILE


def make_record(folder: Path, state: dict[str, Any], num_parameters: int) -> dict[str, Any]:
    options = Hyperparameters.from_dict(state["hyperparameters"])
    status = "complete" if state["step"] == options.total_steps else "interrupted"
    return {
        **state,  # put first, so that `mentions` finds the run's name at the start of the file
        "status": status,
        "run_folder": str(folder),
        "num_ranks": len(state["ranks"]),
        "num_parameters": num_parameters,
        "tokens_per_second": options.positions_before(state["step"]) / state["seconds"],
        # `loop.scored_record` sets these two scores if the run is complete.
        "held_out_bits_per_byte": None,
        "gzip_bits_per_byte": None,
    }


def write_report(record: dict[str, Any]) -> None:
    """Write record.json. Raises ValueError instead of overwriting a file that this run did not make."""
    content = (json.dumps(record, indent=1) + "\n").encode()
    path = Path(record["run_folder"]) / RECORD_FILE
    write_whole(path, content, mentions(record["run"]), "this run")


def summary(record: dict[str, Any]) -> str:
    """A text with the memory, the losses and the speed of the run."""
    peak = max(row["resident_peak"] for row in record["ranks"])
    losses = record["bits_per_byte"]
    lines = [
        f"peak resident memory of a rank: {peak / 1e6:,.0f} MB",
        f"bits per byte: {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}",
        f"speed: {record['tokens_per_second']:,.0f} tokens/s; {record['seconds']:,.0f} s in steps",
    ]
    held_out = record["held_out_bits_per_byte"]
    if held_out is not None:
        lines.append(
            f"held out: {held_out:.3f} bits per byte on {record['document']['num_held_out']:,} bytes"
        )
        lines.append(f"gzip on the same bytes: {record['gzip_bits_per_byte']:.3f}")
    return "\n".join(lines)
