"""The configuration of a LongNetLM.

This module does not import torch, so that a launcher can check a configuration without importing torch.
"""

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from ..pattern import DilatedPattern, is_finite_number, is_integer

# The fields of `LongNetConfig` that are also hyperparameters of `rda train`.
OF_A_RUN = (
    "segment_lengths",
    "dilation_rates",
    "window",
    "num_layers",
    "embed_dim",
    "num_heads",
    "num_kv_heads",
)


@dataclass(frozen=True)
class LongNetConfig:
    """The settings that decide the parameters and the function of a `LongNetLM`.

    `dataclasses.asdict(config)` can be saved as JSON.

    Args:
        segment_lengths, dilation_rates, window, phase, heads: as in `DilatedPattern`; a language model's pattern is
            causal.
        num_kv_heads: the number of key/value heads (grouped-query attention); None means num_heads.
        ffn_dim: width of the feed-forward layer; None means 4 * embed_dim.
        rotary_base: base of the rotary embeddings.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    _: KW_ONLY
    vocab_size: int = 256
    num_layers: int = 2
    embed_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int | None = None
    ffn_dim: int | None = None
    rotary_base: float = 10_000.0
    window: int | None = None
    phase: str = "modulo"
    heads: str = "all"

    def __post_init__(self) -> None:
        # Making the pattern raises ValueError for bad branches. The pattern has tuples where JSON has lists.
        pattern = self.pattern
        object.__setattr__(self, "segment_lengths", pattern.segment_lengths)
        object.__setattr__(self, "dilation_rates", pattern.dilation_rates)
        with_defaults = ("num_kv_heads", "ffn_dim")  # fields that may be None
        for name in ("vocab_size", "num_layers", "embed_dim", "num_heads", *with_defaults):
            number = getattr(self, name)
            if number is None and name in with_defaults:
                continue
            if not is_integer(number) or number < 1:
                raise ValueError(f"{name}={number!r} must be an integer of at least 1.")
        if self.embed_dim % self.num_heads or (self.embed_dim // self.num_heads) % 2:
            raise ValueError(
                f"embed_dim={self.embed_dim} over num_heads={self.num_heads} is a head dim of "
                f"{self.embed_dim / self.num_heads:g}: it must be an even integer (rotary embeddings rotate pairs)."
            )
        if not is_finite_number(self.rotary_base) or self.rotary_base <= 1:
            raise ValueError(
                f"rotary_base={self.rotary_base!r} must be a finite number greater than 1."
            )
        pattern.check_heads(self.num_heads, self.num_kv_heads or self.num_heads)

    @property
    def pattern(self) -> DilatedPattern:
        names = [item.name for item in fields(DilatedPattern) if item.name != "is_causal"]
        rules = {name: getattr(self, name) for name in names}
        return DilatedPattern(**rules, is_causal=True)

    @classmethod
    def of_run(cls, hyperparameters: dict[str, Any]) -> "LongNetConfig":
        """The config of a run of `rda train`, from its hyperparameters."""
        return cls(**{name: hyperparameters[name] for name in OF_A_RUN})
