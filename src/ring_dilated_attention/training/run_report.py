"""The results of a run: record.json, loss.png and a table of the memory of each rank."""

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..forecast.ledger import attention_memory
from ..kernels.traits import TRAITS
from ..plan.job import Job
from ..plan.planner import make_plan
from ..plan.sizes import Sizes
from ..ranks.context import ContextParallel
from .files import check_mine, is_our_picture, write_whole
from .options import Hyperparameters
from .pictures import draw_losses
from .run import PICTURE_FILE, RECORD_FILE, is_record_of


def planned_attention_bytes(options: Hyperparameters, parallel: ContextParallel) -> int:
    """The bytes that one attention call holds on this rank in forward and backward, according to its plan."""
    config = options.model_config()
    shards = parallel.ranks.shards(parallel.ranks.lengths_of(options.seq_len))
    job = Job(config.pattern, shards, config.num_heads, config.num_kv_heads or config.num_heads)
    head_dim = config.embed_dim // config.num_heads
    sizes = Sizes(1, head_dim, torch.float32.itemsize, torch.get_num_threads())
    return attention_memory(make_plan(job, parallel.rank), sizes, TRAITS["cpu"]).forward_backward.num_bytes


def make_record(folder: Path, state: dict[str, Any], num_parameters: int) -> dict[str, Any]:
    options, seconds = state["hyperparameters"], state["step_seconds"]
    return {
        "status": "complete" if state["step"] == options["steps"] else "interrupted",
        "run": state["run"],
        "run_folder": str(folder),
        **{name: state[name] for name in ("hardware", "versions", "hyperparameters", "document")},
        "num_ranks": len(state["ranks"]),
        "num_parameters": num_parameters,
        "steps_done": state["step"],
        "bits_per_byte": state["bits_per_byte"],
        "held_out_bits_per_byte": None,
        "step_seconds": seconds,
        "tokens_per_second": options["seq_len"] / statistics.median(seconds) if seconds else None,
        "ranks": state["ranks"],
        "baselines": None,
    }


def write_report(record: dict[str, Any]) -> None:
    """Write record.json and loss.png. A ValueError refuses to write over a file that this run did not make."""
    folder, run = Path(record["run_folder"]), record["run"]
    picture, is_ours = folder / PICTURE_FILE, partial(is_our_picture, source=f"run {run}")
    check_mine(picture, is_ours, "this run")
    content = (json.dumps(record, indent=1) + "\n").encode()
    write_whole(folder / RECORD_FILE, content, partial(is_record_of, run), "this run")
    write_whole(picture, draw_losses(record), is_ours, "this run")


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
        mean = len(losses) * record["hyperparameters"]["seq_len"] / sum(record["step_seconds"])
        lines.append(f"bits per byte: {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}")
        lines.append(f"speed: {record['tokens_per_second']:,.0f} tokens/s by the median step, {mean:,.0f} in the mean")
    if record["held_out_bits_per_byte"] is not None:
        others = [f"{name} {value:.3f}" for name, value in (record.get("baselines") or {}).items()]
        beside = f" (on the same bytes: {', '.join(others)})" if others else ""
        lines.append(f"held out: {record['held_out_bits_per_byte']:.3f} bits per byte, the mean of all windows{beside}")
    lines.append(f"record and picture: {record['run_folder']}")
    return "\n".join(lines)
