"""Trains a small LongNetLM, with the optimisers of `rda train`, and times its steps on one thread."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ring_dilated_attention.models.longnet import LongNetLM
from ring_dilated_attention.models.longnet_config import LongNetConfig
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.training.loop import make_optimizers
from ring_dilated_attention.training.options import Hyperparameters

WARMUP_STEPS = 20
TIMED = "CPU seconds are those of the process, on one thread; others used the machine too."


@dataclass(frozen=True)
class Shape:
    """A model's size. Its optimisers are those of `rda train` at these peak rates; a rate is constant after warm-up, so
    that the loss after any step can be compared with that after any other."""

    num_layers: int = 2
    embed_dim: int = 64
    num_heads: int = 4
    learning_rate: float = 4e-3
    muon_learning_rate: float = 0.015

    def config(self, pattern: DilatedPattern, vocab_size: int) -> LongNetConfig:
        rules = {name: value for name, value in pattern.as_dict().items() if name != "is_causal"}
        return LongNetConfig(
            **rules,
            vocab_size=vocab_size,
            num_layers=self.num_layers,
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
        )


class Training:
    """A model and the CPU seconds that its steps took: forward, backward and optimisers, without the making of data."""

    def __init__(self, shape: Shape, pattern: DilatedPattern, vocab_size: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = LongNetLM(shape.config(pattern, vocab_size))
        rates = {
            "learning_rate": shape.learning_rate,
            "muon_learning_rate": shape.muon_learning_rate,
        }
        sizes = {
            "embed_dim": shape.embed_dim,
            "num_heads": shape.num_heads,
            "num_layers": shape.num_layers,
        }
        self.optimizers = make_optimizers(self.model, Hyperparameters(**rates, **sizes))  # type: ignore[arg-type]
        self.clip_norm, self.num_steps, self.seconds = Hyperparameters.clip_norm, 0, 0.0

    def step(self, tokens_BN: Tensor) -> float:
        """Change the parameters by one step. Returns the loss before it."""
        began = time.process_time()
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak"] * min(1, (self.num_steps + 1) / WARMUP_STEPS)
        loss = self.model.loss(tokens_BN)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.seconds += time.process_time() - began
        self.num_steps += 1
        return loss.item()


@contextmanager
def one_thread() -> Iterator[None]:
    """Several threads that wait for each other take time of the processor, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def branches_of(pattern: DilatedPattern) -> dict[str, Any]:
    names = ["segment_lengths", "dilation_rates"]
    if pattern.window is not None:  # rows of patterns without a window are older than windows
        names.append("window")
    return {name: getattr(pattern, name) for name in names}
