"""Memory of a transformers model's loss: with all logits, and in chunks as under `context_parallel`, beside the plan.

The model is a Llama of one narrow layer with a large vocabulary, so that the loss is the peak. Working memory is what
torch's allocator holds at the peak beyond what it held when the forward was done, as in `model_memory`; of the ranks
the one that holds most.
"""

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.forecast.training_cost import Mesh, ModelJob, Shape, model_memory
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.ranks.context import ContextParallel

from .gate import GateError, gate
from .measure import Sizes, held_and_peak
from .record import markdown

SUMMARY = "memory of a transformers model's loss, whole and in chunks"
TARGET = 0.05
TOLERANCE = 1e-5  # of the loss in chunks, relative to the whole


class Settings(NamedTuple):
    sizes: Sizes = Sizes(16_384, 4, 32)
    vocab_size: int = 32_768
    pattern: DilatedPattern = DilatedPattern((512, 16_384), (1, 32), is_causal=True)
    seconds: float = 600


FULL = Settings()
QUICK = Settings(Sizes(4096, 2, 16), 512, DilatedPattern((256, 4096), (1, 16), is_causal=True))
WAYS = (("all logits", 1), ("chunks", 1), ("chunks", 2))


def why_not() -> str | None:
    """The reason why it cannot run here, or None."""
    return None if find_spec("transformers") else "needs transformers: pip install -e '.[hf]'"


def num_steps(settings: Settings) -> int:
    return len(WAYS)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    sizes, pattern = settings.sizes, settings.pattern
    passed = gate(sizes, pattern)
    for how, num_ranks in WAYS:
        step(f"{how}, {num_ranks} ranks")
        found = run_ranks(Launch(num_ranks, seconds=settings.seconds), _measure, settings, how == "chunks")
        job = ModelJob(_shape(settings), pattern, sizes.seq_len, 1, Mesh(1, num_ranks))
        loss = found[0]["loss"]
        if rows and not abs(loss - rows[0]["loss"]) <= TOLERANCE * abs(loss):
            raise GateError(f"the loss in chunks is {loss}, and of all logits {rows[0]['loss']}")
        rows.append(
            {
                "logits": how,
                "ranks": num_ranks,
                "segment_lengths": pattern.segment_lengths,
                "dilation_rates": pattern.dilation_rates,
                "vocab_size": settings.vocab_size,
                "transformers": version("transformers"),
                **sizes.as_json(),
                "loss": loss,
                "working_bytes": max(rank["working"] for rank in found),
                "peak_bytes": max(rank["peak"] for rank in found),
                "planned_working_bytes": model_memory(job, "kept", TRAITS["cpu"]).working,
                "target": TARGET,
                "gate": passed,
            }
        )
    return rows


def _shape(settings: Settings) -> Shape:
    width, heads = settings.sizes.num_heads * settings.sizes.head_dim, settings.sizes.num_heads
    return Shape(1, width, width, settings.vocab_size, heads, heads)


def _measure(worker: Worker, settings: Settings, in_chunks: bool) -> dict[str, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from ring_dilated_attention.integrations.transformers import context_parallel, register

    register()
    shape, pattern = _shape(settings), settings.pattern
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.embed_dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=1,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=settings.sizes.seq_len,
        dilated_attention={"segment_lengths": pattern.segment_lengths, "dilation_rates": pattern.dilation_rates},
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    tokens = torch.randint(shape.vocab_size, (1, settings.sizes.seq_len))
    if in_chunks:
        context_parallel(model, ContextParallel())
    few = tokens[:, : 2 * pattern.segment_lengths[0]]
    model(few, labels=few).loss.backward()
    model.zero_grad(set_to_none=False)  # gradients exist before a step, as in accumulation
    losses: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        losses.append(model(tokens, labels=tokens).loss)
        return losses[0]

    held, peak = held_and_peak(forward)
    return {"loss": losses[0].item(), "working": peak - held, "peak": peak}


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        logits = row["seq_len"] // row["ranks"] * row["vocab_size"]
        planned, working = row["planned_working_bytes"], row["working_bytes"]
        is_planned = row["logits"] == "chunks"
        lines.append(
            (
                row["logits"],
                str(row["ranks"]),
                f"{row['peak_bytes'] / 1e6:,.0f}",
                f"{row['peak_bytes'] / logits:.1f}",
                f"{working / 1e6:,.0f}",
                f"{planned / 1e6:,.0f} ({working / planned - 1:+.1%})" if is_planned else "",
            )
        )
    first = rows[0]
    return (
        f"{first['seq_len']:,} positions over all ranks, a vocabulary of {first['vocab_size']:,}, float32; MB of the "
        "rank that holds most.\n\n"
        + markdown(("logits", "ranks", "step's peak", "bytes per logit", "working", "working, planned"), lines)
    )
