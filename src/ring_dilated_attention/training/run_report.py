"""What a run leaves behind: record.json, loss.png and a table of memory per rank."""

import json
import os
import platform
import statistics
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ..forecast.ledger import attention_memory
from ..kernels.traits import TRAITS
from ..plan.job import Job
from ..plan.planner import make_plan
from ..plan.sharding import make_shards, split_lengths
from ..plan.sizes import Sizes
from ..ranks.context import ContextParallel
from .baselines import smoothed
from .files import MADE_BY, check_mine, is_our_picture, write_whole
from .options import Hyperparameters
from .run import PICTURE_FILE, RECORD_FILE, is_record_of

PACKAGES = ("torch", "triton", "numpy", "safetensors", "ring-dilated-attention")


def planned_attention_bytes(options: Hyperparameters, parallel: ContextParallel) -> int:
    """What the plan says one attention call holds on this rank, forward and backward."""
    config = options.model_config()
    shards = make_shards(parallel.sharding, split_lengths(options.seq_len, parallel.world_size))
    num_kv_heads = config.num_heads if config.num_kv_heads is None else config.num_kv_heads
    plan = make_plan(Job(config.pattern, shards, config.num_heads, num_kv_heads), parallel.rank)
    head_dim = config.embed_dim // config.num_heads
    sizes = Sizes(1, head_dim, torch.float32.itemsize, torch.get_num_threads())
    memory = attention_memory(plan, sizes, TRAITS["cpu"])
    return memory.forward_backward.num_bytes


def make_record(folder: Path, state: dict[str, Any], held_out: float | None, num_parameters: int) -> dict[str, Any]:
    options = state["hyperparameters"]
    seconds = state["step_seconds"]
    return {
        "status": "complete" if state["step"] == options["steps"] else "interrupted",
        "run": state["run"],
        "run_folder": str(folder),
        **{name: state[name] for name in ("hardware", "versions", "hyperparameters", "document")},
        "num_ranks": len(state["ranks"]),
        "num_parameters": num_parameters,
        "steps_done": state["step"],
        "bits_per_byte": state["bits_per_byte"],
        "held_out_bits_per_byte": held_out,
        "step_seconds": seconds,
        "tokens_per_second": options["seq_len"] / statistics.median(seconds) if seconds else None,
        "ranks": state["ranks"],
    }


def write_report(record: dict[str, Any]) -> None:
    """record.json and loss.png in the run's folder.

    Raises:
        ValueError: if a file of such a name is there that this run did not make.
        OSError: if they cannot be written.
    """
    folder, run = Path(record["run_folder"]), record["run"]
    picture, is_ours = folder / PICTURE_FILE, partial(is_our_picture, source=f"run {run}")
    check_mine(picture, is_ours, "this run")
    write_whole(folder / RECORD_FILE, as_bytes(record), partial(is_record_of, run), "this run")
    write_whole(picture, draw_losses(record), is_ours, "this run")


def as_bytes(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()


def draw_losses(record: dict[str, Any]) -> bytes:
    """The picture, a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    losses = record["bits_per_byte"]
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1)
    axes.plot(steps, smoothed(losses), color="tab:blue", label="training, smoothed")
    for (name, value), colour in zip((record.get("baselines") or {}).items(), ("tab:green", "tab:gray"), strict=False):
        axes.axhline(value, color=colour, linestyle=":", label=f"{name} on the held-out bytes: {value:.3f}")
    if record["held_out_bits_per_byte"] is not None:
        label = f"held out: {record['held_out_bits_per_byte']:.3f}"
        axes.axhline(record["held_out_bits_per_byte"], color="tab:orange", linestyle="--", label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    p = record["num_ranks"]
    axes.set_title(f"{record['hyperparameters']['seq_len']:,} tokens over {p} rank{'s' * (p > 1)}")
    axes.set_ylim(bottom=0)
    axes.legend()
    picture = BytesIO()
    figure.savefig(picture, dpi=120, format="png", metadata={"Software": MADE_BY, "Source": f"run {record['run']}"})
    return picture.getvalue()


def summary(record: dict[str, Any]) -> str:
    """What the run came to, and the memory of every rank beside the plan's figure."""
    headers = ("rank", "positions", "before step 1", "peak resident", "attention, planned")
    rows = [headers] + [
        (
            str(row["rank"]),
            f"{row['positions']:,}",
            megabytes(row["resident_before"]),
            megabytes(row["resident_peak"]),
            megabytes(row["planned_attention"]),
        )
        for row in record["ranks"]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(headers))]
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


def hardware() -> dict[str, Any]:
    return {
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
