"""The hyperparameters of a run: everything that decides what it computes. No torch.

They are saved with every checkpoint, and a resumed run must have the same. What may change between the two (the number
of ranks, the exchange, how often to save) is not here.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..models.longnet_config import LongNetConfig

MOST_LAYERS = 10_000  # as modules, which take time and memory of their own
# What 64 bits hold, also as the stride of a tensor; and float32, in which AdamW computes, where it divides by 0.1.
_LARGEST = {int: 2**63 - 1, float: 1e30}
_LARGEST_OF = {"segment_lengths": 2**40, "dilation_rates": 2**40}


def _option(default: Any, text: str, kind: type = int) -> Any:
    return field(default=default, metadata={"help": text, "type": kind})


@dataclass(frozen=True)
class Hyperparameters:
    """What decides the result of a run, to the bit on the same machine and number of ranks."""

    data: tuple[str, ...] = _option((), "files to train on, as one document; default: Python's standard library", str)
    seq_len: int = _option(32_768, "bytes of one sequence, over all ranks")
    steps: int = _option(90, "optimiser steps, one sequence each")
    num_layers: int = _option(2, "transformer blocks")
    embed_dim: int = _option(128, "width of the model")
    num_heads: int = _option(4, "query heads")
    num_kv_heads: int | None = _option(None, "key/value heads (grouped queries); default: as many as query heads")
    segment_lengths: tuple[int, ...] = _option((512, 4_096, 32_768), "segment length of each branch")
    dilation_rates: tuple[int, ...] = _option((1, 4, 16), "dilation rate of each branch")
    learning_rate: float = _option(4e-3, "peak learning rate of AdamW; cosine down to a tenth of it", float)
    warmup_steps: int = _option(10, "steps of linear warm-up")
    weight_decay: float = _option(0.1, "AdamW's, on matrices only", float)
    clip_norm: float = _option(1.0, "largest norm of the gradient", float)
    held_out_windows: int = _option(4, "sequences at the document's end that are kept for the final figure")
    seed: int = _option(0, "seed of the initial weights and of the order of the data")

    def __post_init__(self) -> None:
        for name in ("data", "segment_lengths", "dilation_rates"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for item in fields(self):
            kind = item.metadata["type"]
            value, most = getattr(self, item.name), _LARGEST_OF.get(item.name, _LARGEST.get(kind))
            for entry in value if isinstance(value, tuple) else [value]:
                if most is not None and entry is not None and abs(entry) > most:
                    raise ValueError(f"{flag(item.name)} {in_short(entry)} must be from {-most:,} to {most:,}")
        for name in self.data:
            if "\0" in name:
                raise ValueError(f"--data {in_short(name)!r} has a NUL, which no path can have")
        if self.num_layers > MOST_LAYERS:
            raise ValueError(f"--num-layers {self.num_layers} must be at most {MOST_LAYERS:,}")
        for name in ("steps", "held_out_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} {getattr(self, name)} must be at least 1")
        if self.seq_len < 2:
            raise ValueError(
                f"--seq-len {self.seq_len} must be at least 2: each byte is predicted from those before it"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"--warmup-steps {self.warmup_steps} must not be negative")
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{flag(name)} {getattr(self, name)} must be a positive number")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"--weight-decay {self.weight_decay} must be zero or a positive number")
        if self.learning_rate * self.weight_decay > _LARGEST[float]:
            raise ValueError(
                f"--learning-rate {self.learning_rate} times --weight-decay {self.weight_decay} must be at most "
                f"{_LARGEST[float]:,}"
            )
        self.model_config()  # refuses widths and branches that cannot be

    def model_config(self) -> LongNetConfig:
        return LongNetConfig.of_run(asdict(self))

    def num_training_bytes(self) -> int:
        """Of the parameters, their gradients and AdamW's two moments, in float32; biases and norms left out."""
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        of_attention = 2 * self.embed_dim**2 + 2 * self.embed_dim**2 * num_kv_heads // self.num_heads
        num_parameters = self.num_layers * (of_attention + 8 * self.embed_dim**2) + 2 * 256 * self.embed_dim
        return 4 * 4 * num_parameters

    def to_dict(self) -> dict[str, Any]:
        """As JSON gives it back: lists for tuples."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "Hyperparameters":
        """From what `to_dict` gave.

        Raises:
            ValueError: if a field is missing, foreign or of another type, and for values that cannot be.
        """
        names = {item.name for item in fields(cls)}
        if saved.keys() != names:
            missing, foreign = sorted(names - saved.keys()), sorted(saved.keys() - names)
            raise ValueError(f"hyperparameters lack {missing or 'none'} and have {foreign or 'none'} besides")
        for item in fields(cls):
            value, kind = saved[item.name], item.metadata["type"]
            entries = value if isinstance(item.default, tuple) and isinstance(value, list) else [value]
            is_typed = isinstance(item.default, tuple) == isinstance(value, list)
            if value is None and item.default is None:
                continue
            if not is_typed or any(type(x) not in ((int, float) if kind is float else (kind,)) for x in entries):
                wanted = kind.__name__ if is_typed else "a list" if isinstance(item.default, tuple) else "one value"
                raise ValueError(f"hyperparameter {item.name} is {value!r}, not {wanted}")
        return cls(**saved)


def in_short(number: float | str) -> str:
    """A number in digits, as long as somebody would read them."""
    text = str(number)
    return text if len(text) <= 40 else f"(a number of {len(text)} digits)"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_hyperparameters(parser: argparse._ArgumentGroup, whole: Callable[[str], int]) -> None:
    """One option per field, integers read by `whole`. An option that is not given leaves no attribute, so that
    `resolve` can tell."""
    for item in fields(Hyperparameters):
        many = isinstance(item.default, tuple)
        suffix = "" if item.default in ((), None) else f" (default {_shown(item.default)})"
        parser.add_argument(
            flag(item.name),
            default=argparse.SUPPRESS,
            type=whole if item.metadata["type"] is int else item.metadata["type"],
            nargs="+" if many else None,
            metavar="FILE" if item.name == "data" else "N" if item.metadata["type"] is int else "X",
            help=item.metadata["help"] + suffix,
        )


def resolve(arguments: argparse.Namespace, saved: Hyperparameters | None) -> Hyperparameters:
    """The hyperparameters of a new run, or those of the saved one that is resumed.

    Raises:
        ValueError: for values that cannot be, and for those that differ from the saved run's.
    """
    given = {item.name: getattr(arguments, item.name) for item in fields(Hyperparameters) if item.name in arguments}
    if "data" in given:
        given["data"] = [str(Path(name).resolve()) for name in given["data"]]
    if saved is None:
        return Hyperparameters(**given)
    wanted = replace(saved, **given)
    changed = [
        f"{flag(item.name)} {_shown(getattr(wanted, item.name))} was {_shown(getattr(saved, item.name))}"
        for item in fields(Hyperparameters)
        if getattr(wanted, item.name) != getattr(saved, item.name)
    ]
    if changed:
        raise ValueError(
            f"a resumed run keeps its hyperparameters, but {'; '.join(changed)}. Leave these options out, or start a "
            "new run without --resume"
        )
    return saved


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
