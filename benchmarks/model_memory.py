"""Memory of training by part, on 1, 2 and 4 ranks, beside what `rda plan model` says of it.

The model, its optimiser and its step are those of `rda train`. Parameters, gradients and optimiser state are the bytes
of their tensors; activations are what torch's allocator holds when the forward is done, and working what it holds at
the peak of the step beyond that. Offloaded activations lie in memory of numpy, which stands for a host's beside a GPU:
torch's allocator does not count it. On a CPU none is copied back, so the part of one block is added to the activations.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch

from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.forecast.training_cost import Mesh, ModelJob, Shape, model_memory
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.models.longnet import LongNetLM, NextTokenLoss
from ring_dilated_attention.models.longnet_config import LongNetConfig
from ring_dilated_attention.models.recompute import Checkpointing
from ring_dilated_attention.ranks.context import ContextParallel
from ring_dilated_attention.training.loop import average_gradients, make_optimizers, shard
from ring_dilated_attention.training.options import Hyperparameters

from .gate import gate
from .measure import Sizes, held_and_peak
from .record import markdown

SUMMARY = "memory of training by part, measured and planned"
KINDS = ("parameters", "gradients", "optimiser", "activations", "working")
TARGET = 0.05


class Settings(NamedTuple):
    hyperparameters: Hyperparameters
    ranks: tuple[int, ...] = (1, 2, 4)
    activations: tuple[str, ...] = ("kept", "checkpointed")
    seconds: float = 300


# The plan counts the two moments of AdamW for every parameter.
FULL = Settings(
    Hyperparameters(
        segment_lengths=(512, 4096, 32_768), dilation_rates=(1, 4, 16), embed_dim=256, num_layers=4, optimizer="adamw"
    )
)
QUICK = Settings(
    Hyperparameters(seq_len=256, segment_lengths=(64, 256), dilation_rates=(1, 4), embed_dim=32, optimizer="adamw"),
    ranks=(1, 2),
)


def num_steps(settings: Settings) -> int:
    return len(settings.activations) * len(settings.ranks)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    options = settings.hyperparameters
    config = options.model_config()
    sizes = Sizes(options.seq_len, config.num_heads, config.embed_dim // config.num_heads)
    passed = gate(sizes, config.pattern)
    for num_ranks in settings.ranks:
        for how in settings.activations:
            step(f"{num_ranks} ranks, activations {how}")
            launch = Launch(num_ranks, seconds=settings.seconds)
            found = run_ranks(launch, _measure, options, how)
            planned = model_memory(job_of(options, Mesh(1, num_ranks)), how, TRAITS["cpu"])._asdict()
            measured = {name: max(rank[name] for rank in found) for name in (*KINDS, "host")}
            rows.append(
                {
                    "ranks": num_ranks,
                    "activations_are": how,
                    "segment_lengths": config.pattern.segment_lengths,
                    "dilation_rates": config.pattern.dilation_rates,
                    **sizes.as_json(),
                    "hyperparameters": options.to_dict(),
                    "measured": measured,
                    "planned": {name: planned[name] for name in (*KINDS, "host")},
                    "target": TARGET,
                    "gate": passed,
                }
            )
    return rows


def job_of(options: Hyperparameters, mesh: Mesh) -> ModelJob:
    config: LongNetConfig = options.model_config()
    shape = Shape(
        config.num_layers,
        config.embed_dim,
        config.ffn_dim or 4 * config.embed_dim,
        config.vocab_size,
        config.num_heads,
        config.num_kv_heads or config.num_heads,
    )
    return ModelJob(shape, config.pattern, options.seq_len, 1, mesh)


def _measure(worker: Worker, options: Hyperparameters, how: str) -> dict[str, int]:
    parallel = ContextParallel()
    checkpointing: Checkpointing = "offload" if how == "offloaded" else how == "checkpointed"
    model = LongNetLM(options.model_config(), parallel=parallel, activation_checkpointing=checkpointing)
    [optimizer] = make_optimizers(model, options)
    loss_of = average_gradients(NextTokenLoss(model), parallel)
    window = bytearray(os.urandom(options.seq_len))
    tokens = shard(window, parallel)
    loss_of(tokens).backward()
    optimizer.step()
    gradients = sum(x.grad.nbytes for x in model.parameters() if x.grad is not None)
    state = sum(
        x.nbytes for entry in optimizer.state.values() for x in entry.values() if torch.is_tensor(x) and x.dim() > 0
    )
    optimizer.zero_grad(set_to_none=False)  # or the step makes them again, and they count as working
    on_host: list[int] = []

    def to_host(x: torch.Tensor) -> torch.Tensor:
        on_host.append(x.nbytes)
        return torch.from_numpy(x.detach().numpy().copy())

    with mock.patch.object(torch.Tensor, "cpu", to_host) if how == "offloaded" else nullcontext():
        held, peak = held_and_peak(lambda: loss_of(tokens))
    return {
        "parameters": sum(x.nbytes for x in model.parameters()),
        "gradients": gradients,
        "optimiser": state,
        "activations": held + sum(on_host) // options.num_layers,
        "working": peak - held,
        "host": sum(on_host),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        found, planned = row["measured"], row["planned"]
        cells = [_beside(found[name], planned[name]) for name in KINDS]
        cells.append(_beside(*(sum(each[name] for name in KINDS) for each in (found, planned))))
        cells.append(_beside(found["host"], planned["host"]) if planned.get("host") else "")
        lines.append((str(row["ranks"]), row["activations_are"], *cells))
    options = rows[0]["hyperparameters"]
    return (
        f"{options['num_layers']} layers of {options['embed_dim']}, {options['seq_len']:,} positions over all ranks, "
        "float32; measured / planned, MB, of the rank that holds most.\n\n"
        + markdown(("ranks", "activations", *KINDS, "in all", "on the host"), lines)
    )


def _beside(measured: int, planned: int) -> str:
    return f"{measured / 1e6:.1f} / {planned / 1e6:.1f} ({measured / planned - 1:+.1%})"
