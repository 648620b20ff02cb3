"""The hyperparameters of a run: everything that decides what it computes. The file imports no torch.

Every checkpoint holds them, and a resumed run must have the same. The number of ranks, the exchange and the interval
between checkpoints are not among them, since a resumed run may have others.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..models.longnet_config import LongNetConfig

MOST_LAYERS = 10_000  # each layer is a module, which takes time and memory
MOST_POSITIONS = 2**40  # the longest segment, and the largest dilation rate
LARGEST = 2**63 - 1  # the largest integer of 64 bits, also of a tensor's stride
LARGEST_FLOAT, SMALLEST_FLOAT = 1e30, 1e-30  # AdamW computes in float32, and divides by 0.1


def _option(default: Any, text: str, least: float = 1, most: float = LARGEST, kind: type = int, **more: Any) -> Any:
    """A field with its --help. Its numbers are from `least` to `most`. `more` goes to argparse."""
    metadata = {"help": text, "least": least, "most": most, "kind": kind, "more": more}
    return field(default=default, metadata=metadata)


def _real(default: float, text: str, least: float = SMALLEST_FLOAT) -> Any:
    return _option(default, text, least, LARGEST_FLOAT, float)


@dataclass(frozen=True)
class Hyperparameters:
    """On the same machine with the same number of ranks, equal hyperparameters give the same result to the bit."""

    data: tuple[str, ...] = _option((), "files that make one document; default: Python's standard library", kind=str)
    fasta_case: str = _option(
        "keep", "letters of FASTA: as they are, or in upper case", kind=str, choices=("keep", "upper")
    )
    fasta_records: str = _option(
        "join", "records of FASTA: end to end, or each with a newline at its end", kind=str, choices=("join", "newline")
    )
    seq_len: int = _option(32_768, "bytes of one sequence, over all ranks; each is predicted from those before it", 2)
    steps: int = _option(90, "optimiser steps, one sequence each")
    num_layers: int = _option(2, "transformer blocks", most=MOST_LAYERS)
    embed_dim: int = _option(128, "width of the model")
    num_heads: int = _option(4, "query heads")
    num_kv_heads: int | None = _option(None, "key/value heads (grouped queries); default: as many as query heads")
    segment_lengths: tuple[int, ...] = _option((512, 4_096, 32_768), "segment length of each branch", 1, MOST_POSITIONS)
    dilation_rates: tuple[int, ...] = _option((1, 4, 16), "dilation rate of each branch", 1, MOST_POSITIONS)
    learning_rate: float = _real(4e-3, "peak learning rate of AdamW; cosine down to a tenth of it")
    warmup_steps: int = _option(10, "steps of linear warm-up", 0)
    weight_decay: float = _real(0.1, "AdamW's, on matrices only", 0)
    clip_norm: float = _real(1.0, "largest norm of the gradient")
    held_out_windows: int = _option(4, "sequences at the document's end that are kept for the final figure")
    seed: int = _option(0, "seed of the initial weights and of the order of the data", -LARGEST)

    def __post_init__(self) -> None:
        for item in fields(self):
            least, most = item.metadata["least"], item.metadata["most"]
            entries = entries_of(getattr(self, item.name))
            if isinstance(item.default, tuple):
                object.__setattr__(self, item.name, entries)
            for entry in entries:
                if isinstance(entry, str):
                    if "\0" in entry:
                        raise ValueError(f"{flag(item.name)} {in_short(entry)!r} has a NUL, which no path can have")
                elif entry is not None and not least <= entry <= most:
                    raise ValueError(f"{flag(item.name)} {in_short(entry)} must be from {least:,} to {most:,}")
            if (choices := item.metadata["more"].get("choices")) and entries[0] not in choices:
                raise ValueError(f"{flag(item.name)} {in_short(entries[0])!r} must be {' or '.join(choices)}")
        if self.learning_rate * self.weight_decay > LARGEST_FLOAT:
            product = f"--learning-rate {self.learning_rate} times --weight-decay {self.weight_decay}"
            raise ValueError(f"{product} must be at most {LARGEST_FLOAT:,}")
        self.model_config()  # refuses bad widths and branches

    def model_config(self) -> LongNetConfig:
        return LongNetConfig.of_run(asdict(self))

    def num_training_bytes(self) -> int:
        """The bytes of parameters, gradients and AdamW's two moments in float32, without biases and norms."""
        num_kv_heads = self.num_kv_heads or self.num_heads
        of_attention = 2 * self.embed_dim**2 + 2 * self.embed_dim**2 * num_kv_heads // self.num_heads
        num_parameters = self.num_layers * (of_attention + 8 * self.embed_dim**2) + 2 * 256 * self.embed_dim
        return 4 * 4 * num_parameters

    def to_dict(self) -> dict[str, Any]:
        """A dict that JSON gives back as it was: with lists for tuples."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "Hyperparameters":
        """The inverse of `to_dict`. A ValueError refuses missing and foreign fields, other types and bad values."""
        names = {item.name for item in fields(cls)}
        if saved.keys() != names:
            missing, foreign = sorted(names - saved.keys()), sorted(saved.keys() - names)
            raise ValueError(f"hyperparameters lack {missing or 'none'} and have {foreign or 'none'} besides")
        for item in fields(cls):
            value, kind, is_list = saved[item.name], item.metadata["kind"], isinstance(item.default, tuple)
            if is_list and not isinstance(value, list):
                raise ValueError(f"hyperparameter {item.name} is {value!r}, not a list")
            kinds = (int, float) if kind is float else (kind, type(item.default))
            if any(type(entry) not in kinds for entry in (value if is_list else [value])):
                raise ValueError(f"hyperparameter {item.name} is {value!r}, not {kind.__name__}")
        return cls(**saved)


def in_short(number: float | str) -> str:
    """A number or a text. If it has more than 40 letters: the count of the number's digits, or the text's beginning."""
    text = str(number)
    long = f"(a number of {len(text)} digits)" if text.lstrip("-").isdecimal() else f"{text[:37]}..."
    return text if len(text) <= 40 else long


def entries_of(value: Any) -> tuple[Any, ...]:
    """The values of an option that takes one or many."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_hyperparameters(parser: argparse._ArgumentGroup, whole: Callable[[str], int]) -> None:
    """Add an option for each field. Integers are read by `whole`. An option that is not given leaves no attribute."""
    for item in fields(Hyperparameters):
        kind, more = item.metadata["kind"], item.metadata["more"]
        metavar = {} if "choices" in more else {"metavar": {str: "FILE", int: "N", float: "X"}[kind]}
        parser.add_argument(
            flag(item.name),
            default=argparse.SUPPRESS,
            type=whole if kind is int else kind,
            nargs="+" if isinstance(item.default, tuple) else None,
            help=item.metadata["help"] + ("" if item.default in ((), None) else f" (default {_shown(item.default)})"),
            **metavar | more,
        )


def resolve(arguments: argparse.Namespace, saved: Hyperparameters | None) -> Hyperparameters:
    """The hyperparameters of a new or a saved run. A ValueError refuses bad values, and changes to a saved run."""
    given = {item.name: getattr(arguments, item.name) for item in fields(Hyperparameters) if item.name in arguments}
    if "data" in given:
        given["data"] = [str(Path(name).resolve()) for name in given["data"]]
    if saved is None:
        return Hyperparameters(**given)
    wanted = replace(saved, **given)
    pairs = [(name, value, getattr(saved, name)) for name, value in vars(wanted).items()]
    changed = "; ".join(f"{flag(name)} {_shown(new)} was {_shown(old)}" for name, new, old in pairs if new != old)
    if changed:
        remedy = "Leave these options out, or start a new run without --resume"
        raise ValueError(f"a resumed run keeps its hyperparameters, but {changed}. {remedy}")
    return saved


def _shown(value: Any) -> str:
    return " ".join(map(str, entries_of(value)))
