"""`rda train --fsdp` on 1, 2 and 4 ranks: memory of parameters, gradients and optimiser state, and its checkpoints.

The bytes are those of the storages that a rank holds; "made" is the most that torch's allocator gave out while the
model was made. A checkpoint that p ranks wrote is read at other numbers of ranks, and every tensor is compared to the
bit, before a row counts. A pause is what a step waits for: `overlapped` if the write goes on beside the next steps, as
in a run, `waiting` if the step waits until the checkpoint has its name. One rank has the plain model and writes it
whole.
"""

import hashlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.forecast.training_cost import Mesh, model_memory
from ring_dilated_attention.models.longnet import LongNetLM, NextTokenLoss
from ring_dilated_attention.models.saved_run import find_checkpoint
from ring_dilated_attention.ranks.context import ContextParallel
from ring_dilated_attention.training.agreement import values_of_all
from ring_dilated_attention.training.checkpoint import load_checkpoint, local_of, save_checkpoint, tensors_of
from ring_dilated_attention.training.loop import make_optimizers, shard
from ring_dilated_attention.training.options import Hyperparameters
from ring_dilated_attention.training.sharded import ShardWriter, sharded_model

from .gate import GateError, gate
from .measure import Sizes, allocated, quantiles
from .model_memory import job_of
from .record import markdown, seconds

SUMMARY = "memory and checkpoints of rda train --fsdp"
PARTS = ("parameters", "gradients", "optimiser")


class Settings(NamedTuple):
    hyperparameters: Hyperparameters
    ranks: tuple[int, ...] = (1, 2, 4)
    readers: tuple[int, ...] = (1, 3)
    repeats: int = 3
    seconds: float = 600


FULL = Settings(
    Hyperparameters(
        seq_len=128, segment_lengths=(32, 128), dilation_rates=(1, 4), embed_dim=512, num_heads=8, num_layers=8,
        optimizer="adamw",
    )
)  # fmt: skip
QUICK = Settings(
    Hyperparameters(seq_len=64, segment_lengths=(16, 64), dilation_rates=(1, 4), embed_dim=32, optimizer="adamw"),
    ranks=(1, 2),
    readers=(1,),
    repeats=1,
)


class Found(NamedTuple):
    """One rank's part. digests: of every tensor, whole."""

    measured: dict[str, int]
    made: int
    copied: int
    file_bytes: int
    overlapped: list[float]
    waiting: list[float]
    steps: list[int]
    digests: dict[str, str]


def num_steps(settings: Settings) -> int:
    return len(settings.ranks) * (1 + len(settings.readers))


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    options = settings.hyperparameters
    config = options.model_config()
    sizes = Sizes(options.seq_len, config.num_heads, config.embed_dim // config.num_heads)
    passed, rows = gate(sizes, config.pattern), list[dict[str, Any]]()
    for num_ranks in settings.ranks:
        with tempfile.TemporaryDirectory() as folder:
            step(f"{num_ranks} ranks write")
            launch = Launch(num_ranks, seconds=settings.seconds)
            found: list[Found] = run_ranks(launch, _measure, options, Path(folder), settings.repeats)
            for readers in settings.readers:
                step(f"{readers} ranks read")
                for digests in run_ranks(launch._replace(world_size=readers), _read, options, Path(folder)):
                    if digests != found[0].digests:
                        raise GateError(f"{readers} ranks read other tensors than {num_ranks} ranks wrote")
        planned = model_memory(job_of(options, Mesh(1, num_ranks, num_ranks)), "kept", None)._asdict()
        rows.append(
            {
                "ranks": num_ranks,
                "segment_lengths": config.pattern.segment_lengths,
                "dilation_rates": config.pattern.dilation_rates,
                **sizes.as_json(),
                "hyperparameters": options.to_dict(),
                "measured": {name: max(rank.measured[name] for rank in found) for name in PARTS},
                "planned": {name: planned[name] for name in PARTS},
                **{name: max(getattr(rank, name) for rank in found) for name in ("made", "copied", "file_bytes")},
                **{
                    name: quantiles(max(rank) for rank in _by_repeat(found, name)) for name in ("overlapped", "waiting")
                },
                "steps_meanwhile": found[0].steps,
                "read_to_the_bit_on": settings.readers,
                "gate": passed,
            }
        )
    return rows


def _by_repeat(found: list[Found], name: str) -> list[tuple[float, ...]]:
    return list(zip(*(getattr(rank, name) for rank in found), strict=True))


def _make(options: Hyperparameters) -> tuple[LongNetLM, list[Optimizer]]:
    torch.manual_seed(options.seed)
    parallel = ContextParallel()
    make: Callable[..., LongNetLM] = sharded_model if parallel.world_size > 1 else LongNetLM
    model = make(options.model_config(), parallel=parallel, activation_checkpointing=False)
    return model, make_optimizers(model, options)


def _measure(worker: Worker, options: Hyperparameters, folder: Path, repeats: int) -> Found:
    made: list[tuple[LongNetLM, list[Optimizer]]] = []
    made_peak = allocated(lambda: made.append(_make(options))).peak_bytes
    [(model, optimizers)] = made
    assert model.parallel is not None
    parallel, loss_of, tokens = model.parallel, NextTokenLoss(model), shard(bytearray(options.seq_len), model.parallel)
    taken = count(1)

    def take_step() -> int:
        loss_of(tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return next(taken)

    take_step()
    loss_of(tokens).backward()
    measured = {
        "parameters": _held(model.parameters()),
        "gradients": _held(x.grad for x in model.parameters() if x.grad is not None),
        "optimiser": _held(x for each in optimizers[0].state.values() for x in each.values() if x.dim() > 0),
    }
    model.zero_grad()
    writer = ShardWriter(folder, parallel) if parallel.world_size > 1 else None
    overlapped, waiting, steps, copied = list[float](), list[float](), list[int](), 0
    for repeat in range(repeats):
        state = {"run": "a benchmark", "step": take_step()}
        began = time.perf_counter()
        if writer is None:
            save_checkpoint(folder, state, model, optimizers)
            overlapped.append(time.perf_counter() - began)
            waiting.append(time.perf_counter() - began)
            steps.append(0)
            continue
        if repeat == 0:
            copied = allocated(partial(writer.start, state, model, optimizers)).peak_bytes
        else:
            writer.start(state, model, optimizers)
        overlapped.append(time.perf_counter() - began)
        steps.append(0)
        while not all(values_of_all(parallel, writer.is_written)):
            take_step()
            steps[-1] += 1
        began = time.perf_counter()
        writer.finish()
        overlapped[-1] += time.perf_counter() - began
        state = {"run": "a benchmark", "step": take_step()}
        began = time.perf_counter()
        writer.start(state, model, optimizers)
        writer.finish()
        waiting.append(time.perf_counter() - began)
    newest = find_checkpoint(folder)
    assert newest is not None
    num_bytes = sum(path.stat().st_size for path in newest.glob("*.safetensors")) // parallel.world_size
    digests = _digests(model, optimizers)
    return Found(measured, made_peak, copied, num_bytes, overlapped, waiting, steps, digests)


def _held(tensors: Any) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in map(local_of, tensors)}
    return sum(storages.values())


def _read(worker: Worker, options: Hyperparameters, folder: Path) -> dict[str, str]:
    model, optimizers = _make(options)
    newest = find_checkpoint(folder)
    assert newest is not None
    load_checkpoint(newest, model, optimizers)
    return _digests(model, optimizers)


def _digests(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, str]:
    tensors = tensors_of(model, optimizers)
    whole = ((name, x.full_tensor() if hasattr(x, "full_tensor") else x) for name, x in tensors.items())
    return {name: hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest() for name, x in whole}


def table(rows: list[dict[str, Any]]) -> str:
    alone = sum(rows[0]["measured"].values())
    lines = []
    for row in rows:
        held = sum(row["measured"].values())
        lines.append(
            (
                str(row["ranks"]),
                *(f"{row['measured'][name] / 1e6:.1f} / {row['planned'][name] / 1e6:.1f}" for name in PARTS),
                f"{row['ranks'] * held / alone:.3f}",
                f"{row['made'] / 1e6:.1f}",
                f"{row['file_bytes'] / 1e6:.1f}",
                f"{row['copied'] / 1e6:.1f}",
                seconds(row["overlapped"]),
                seconds(row["waiting"]),
                ", ".join(map(str, row["steps_meanwhile"])),
            )
        )
    headers = (
        "ranks",
        *(f"{name}, MB" for name in PARTS),
        "p x all / one rank's",
        "made, MB",
        "written by a rank, MB",
        "copied for it, MB",
        "pause overlapped, s",
        "pause waiting, s",
        "steps meanwhile",
    )
    options = rows[0]["hyperparameters"]
    readers = " and ".join(map(str, rows[0]["read_to_the_bit_on"]))
    return (
        f"{options['num_layers']} layers of {options['embed_dim']}, float32, AdamW; measured / planned, of the rank "
        f"that holds most. Each checkpoint was read to the bit on {readers} ranks. Seconds are of a shared machine: "
        f"median (smallest to largest).\n\n{markdown(headers, lines)}"
    )
