"""The results of a run: the files that it leaves at its end, and a table of the memory of each rank."""

import json
import shlex
import statistics
from pathlib import Path
from typing import Any

import torch

from ..forecast.ledger import attention_memory
from ..kernels.traits import TRAITS
from ..plan.job import Job
from ..plan.planner import make_plan
from ..plan.sizes import Sizes
from ..ranks.context import ContextParallel
from .files import check_mine, write_whole
from .options import Hyperparameters
from .pictures import draw_losses
from .run import PICTURE_FILE, README_FILE, README_TITLE, RECORD_FILE, SAMPLE_FILE, SAMPLE_TITLE, files_of
from .scoring import HELPS


def planned_attention_bytes(options: Hyperparameters, parallel: ContextParallel) -> int:
    """The bytes that one attention call holds on this rank in forward and backward, according to its plan."""
    config = options.model_config()
    length, number, _ = options.schedule[-1]
    shards = parallel.ranks.shards(parallel.ranks.lengths_of(length * number))
    borders = tuple(range(0, length * number + 1, length))
    job = Job(config.pattern, shards, config.num_heads, config.num_kv_heads or config.num_heads, borders)
    head_dim = config.embed_dim // config.num_heads
    sizes = Sizes(1, head_dim, torch.float32.itemsize, torch.get_num_threads())
    return attention_memory(make_plan(job, parallel.rank), sizes, TRAITS["cpu"]).forward_backward.num_bytes


def make_record(folder: Path, state: dict[str, Any], num_parameters: int) -> dict[str, Any]:
    options = Hyperparameters.from_dict(state["hyperparameters"])
    speeds = [options.phase_of(step).num_positions / each for step, each in enumerate(state["step_seconds"])]
    return {
        "status": "complete" if state["step"] == options.total_steps else "interrupted",
        "run_folder": str(folder),
        **{name: state[name] for name in ("run", "from", "hardware", "versions", "hyperparameters", "document")},
        "num_ranks": len(state["ranks"]),
        "num_parameters": num_parameters,
        "steps_done": state["step"],
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        **dict.fromkeys(("held_out_bits_per_byte", "bits_by_context", "baselines")),  # known when it is complete
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
    write_whole(Path(record["run_folder"]) / SAMPLE_FILE, content, files_of(run)[SAMPLE_FILE], "this run")


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
    """The memory of every rank beside the plan's figure, and the losses and the speed of the run."""
    memory = ("resident_before", "resident_peak", "planned_attention")
    rows: list[tuple[str, ...]] = [("rank", "positions", "before step 1", "peak resident", "attention, planned")]
    for row in record["ranks"]:
        rows.append((str(row["rank"]), f"{row['positions']:,}", *(f"{row[name] / 1e6:,.0f} MB" for name in memory)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    losses = record["bits_per_byte"]
    if losses:
        lines.append(f"bits per byte: {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}")
        speed = f"{record['tokens_per_second']:,.0f} tokens/s by the median step"
        lines.append(f"speed: {speed}; {sum(record['step_seconds']):,.0f} s in steps")
    if record["held_out_bits_per_byte"] is not None:
        num_bytes = record["document"]["num_held_out"]
        lines.append(f"held out: {record['held_out_bits_per_byte']:.3f} bits per byte on {num_bytes:,} bytes")
        others = [f"{name} {value:.3f}" for name, value in (record.get("baselines") or {}).items()]
        lines += [f"on the same bytes: {', '.join(others)}"] * bool(others) + by_context(record)
    return "\n".join(lines)


def by_context(record: dict[str, Any]) -> list[str]:
    if (found := record["bits_by_context"]) is None:
        return []
    cuts, bits = found["least_context"], found["bits_per_byte"]
    lines = [f"with the model's context cut, on {found['num_bytes']:,} of these bytes:"]
    for c, value in zip(cuts, bits, strict=True):
        lines.append(f"  {f'{c:,} to {2 * c - 1:,} bytes before':>32}  {value:.3f}")
    best = min(bits)
    i = next(i for i, value in enumerate(bits) if value - best < HELPS)
    if i < len(cuts) - 1:
        harm = max(bits[i:]) - best
        said = f"made this model worse, by up to {harm:.3f} bits" if harm >= HELPS else "did not help this model"
        lines.append(f"Context beyond {2 * cuts[i]:,} bytes {said}.")
        lines.append(f"See docs/learning.md. Another text: rda evaluate {shlex.quote(record['run_folder'])} FILE")
    return lines
