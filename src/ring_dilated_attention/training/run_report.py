"""The results of a run: the files that it leaves at its end, and a table of the memory of each rank."""

import json
import shlex
import statistics
from pathlib import Path
from typing import Any

from .files import check_mine, write_whole
from .options import Hyperparameters
from .pictures import draw_losses
from .run import (
    PICTURE_FILE,
    README_FILE,
    README_TITLE,
    RECORD_FILE,
    SAMPLE_FILE,
    SAMPLE_TITLE,
    files_of,
)
from .scoring import HELPS


def make_record(folder: Path, state: dict[str, Any], num_parameters: int) -> dict[str, Any]:
    options = Hyperparameters.from_dict(state["hyperparameters"])
    speeds = []
    for step, seconds in enumerate(state["step_seconds"]):
        speeds.append(options.phase_of(step).num_positions / seconds)
    return {
        "status": "complete" if state["step"] == options.total_steps else "interrupted",
        "run_folder": str(folder),
        **{
            name: state[name]
            for name in ("run", "from", "hardware", "versions", "hyperparameters", "document")
        },
        "num_ranks": len(state["ranks"]),
        "num_parameters": num_parameters,
        "steps_done": state["step"],
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        # These three are known when it is complete.
        "held_out_bits_per_byte": None,
        "bits_by_context": None,
        "baselines": None,
        **{name: state[name] for name in ("bits_per_byte", "held_out", "step_seconds", "ranks")},
    }


def write_report(record: dict[str, Any]) -> None:
    """Write record.json, loss.png and README.txt. A ValueError refuses to write over what this run did not make."""
    folder, run = Path(record["run_folder"]), record["run"]
    steps = Hyperparameters.from_dict(record["hyperparameters"]).steps_again
    readme = README.format(folder=shlex.quote(str(folder)), steps=steps)
    contents = {
        RECORD_FILE: (json.dumps(record, indent=1) + "\n").encode(),
        PICTURE_FILE: draw_losses(record),
        README_FILE: f"{README_TITLE.format(run)}\n{readme}".encode(),
    }
    is_ours = files_of(run)
    for name in contents:  # before any is written
        check_mine(folder / name, is_ours[name], "this run")
    for name, content in contents.items():
        write_whole(folder / name, content, is_ours[name], "this run")


def write_sample(record: dict[str, Any], text: str) -> None:
    """Write sample.txt, with a text that the trained model wrote."""
    run = record["run"]
    content = f"{SAMPLE_TITLE.format(run)}\n\n{text}\n".encode()
    write_whole(
        Path(record["run_folder"]) / SAMPLE_FILE, content, files_of(run)[SAMPLE_FILE], "this run"
    )


README = """
checkpoint-*   parameters, the optimisers' state (safetensors), and the state of
               the run with its hyperparameters (JSON); the newest two
metrics.jsonl  a line for each step; pandas.read_json(..., lines=True) reads it
record.json    hyperparameters, document, machine, losses, memory, final figures
loss.png       the losses
sample.txt     a text of the trained model (not with --fsdp)

rda train --resume {folder}              go on if it was interrupted
rda train --from {folder} --steps {steps:<5}  a run from these parameters
rda generate {folder} --prompt 'def '    let it write
rda evaluate {folder} FILE               bits per byte of a text
In a run from these parameters the learning rate rises to its peak again.

In Python: ring_dilated_attention.models.LongNetLM.from_run(...) is the model.
"""


def summary(record: dict[str, Any]) -> str:
    """The memory of every rank, and the losses and the speed of the run."""
    lines = ["rank   positions  before step 1  peak resident"]
    for row in record["ranks"]:
        before, peak = (
            f"{row[name] / 1e6:,.0f} MB" for name in ("resident_before", "resident_peak")
        )
        lines.append(f"{row['rank']:>4}  {row['positions']:>10,}  {before:>13}  {peak:>13}")
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
        if record["baselines"]:
            others = ", ".join(f"{name} {value:.3f}" for name, value in record["baselines"].items())
            lines.append(f"on the same bytes: {others}")
        lines += by_context(record)
    return "\n".join(lines)


def by_context(record: dict[str, Any]) -> list[str]:
    """The loss with the context cut, and whether more of it helps."""
    scores = record["bits_by_context"]
    if scores is None:
        return []
    cuts, bits = scores["least_context"], scores["bits_per_byte"]
    lines = [f"with the model's context cut, on {scores['num_bytes']:,} of these bytes:"]
    for cut, value in zip(cuts, bits, strict=True):
        words = f"{cut:,} to {2 * cut - 1:,} bytes before"
        lines.append(f"  {words:>32}  {value:.3f}")
    best = min(bits)
    enough = 0
    while bits[enough] - best >= HELPS:
        enough += 1
    if enough < len(cuts) - 1:
        harm = max(bits[enough:]) - best
        said = (
            f"made this model worse, by up to {harm:.3f} bits"
            if harm >= HELPS
            else "did not help this model"
        )
        lines.append(f"Context beyond {2 * cuts[enough]:,} bytes {said}.")
        lines.append(
            f"See docs/learning.md. Another text: rda evaluate {shlex.quote(record['run_folder'])} FILE"
        )
    return lines
