"""The hyperparameters of a run. They stay the same when the run is resumed. Imports no torch."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..models.longnet_config import LongNetConfig
from .machine import multiplies_bfloat16

MOST_SEQUENCES = 2**20  # the most sequences of one step; joining more would take too long
MOST_LAYERS = 10_000  # the most layers; more would take too much time and memory
LONGEST = 2**40  # the longest segment, and the largest dilation rate
MAX_INT64 = 2**63 - 1  # the largest integer of 64 bits, and the largest size or stride of a tensor
# The range of learning rates. In its first step AdamW divides the rate by 1 - 0.9, and the quotient must fit float32.
RANGE_OF_RATES = (1e-30, 1e30)
# By default most steps read short sequences, because in the same time the model learns more from short sequences than
# from long ones.
DEFAULT_STEPS, DEFAULT_PHASES = 7, ("512:2:1080", "1024:2:300", "4096:2:36")
DEFAULT_WINDOW = 128  # the width of the sliding window that is added to the default segments


class Phase(NamedTuple):
    """Steps that read `batch_size` sequences of `length` bytes each, joined as packed documents."""

    length: int
    batch_size: int
    steps: int

    @property
    def num_positions(self) -> int:
        return self.length * self.batch_size


def _option(
    default: Any,
    text: str,
    least: float = 1,
    most: float = MAX_INT64,
    kind: type = int,
    metavar: str = "",
) -> Any:
    """A dataclass field with the text of its --help, and with the range of its numbers, from `least` to `most`."""
    metadata = {"help": text, "least": least, "most": most, "kind": kind, "metavar": metavar}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Hyperparameters:
    """What decides the result of a run. On the same machine, with the same number of ranks, equal hyperparameters give
    the same result to the bit."""

    data: tuple[str, ...] = _option(
        (),
        "files whose bytes are one document; default: Python's library",
        kind=str,
    )
    seq_len: int = _option(
        32_768, "bytes of one sequence, over all ranks; each is predicted from those before it", 2
    )
    batch_size: int = _option(1, "sequences of --seq-len in one step", most=MOST_SEQUENCES)
    steps: int = _option(
        DEFAULT_STEPS, "optimiser steps with sequences of --seq-len, after those of --phases"
    )
    phases: tuple[str, ...] = _option(
        (),
        "shorter sequences that are read first, as LENGTH:BATCH:STEPS, or none (default: those of "
        f"{' '.join(DEFAULT_PHASES)} that are shorter than --seq-len; none if --steps is given)",
        kind=str,
        metavar="PHASE",
    )
    num_layers: int = _option(2, "transformer blocks", most=MOST_LAYERS)
    embed_dim: int = _option(128, "width of the model")
    num_heads: int = _option(4, "query heads")
    num_kv_heads: int | None = _option(
        None, "key/value heads (grouped queries); default: as many as query heads"
    )
    segment_lengths: tuple[int, ...] = _option(
        (2_048, 32_768), "segment length of each branch", 1, LONGEST
    )
    dilation_rates: tuple[int, ...] = _option((8, 32), "dilation rate of each branch", 1, LONGEST)
    window: int | None = _option(
        None,
        "a sliding window of so many positions besides; default: "
        f"{DEFAULT_WINDOW}, or none if --segment-lengths are given",
        1,
        LONGEST,
    )
    learning_rate: float = _option(
        4e-3,
        "peak learning rate of AdamW (all but the matrices of blocks); cosine down to 5 %% of it",
        *RANGE_OF_RATES,
        float,
    )
    muon_learning_rate: float = _option(
        0.015, "the same for Muon (the matrices of blocks)", *RANGE_OF_RATES, float
    )
    dtype: str | None = _option(
        None,
        "in which matrices are multiplied: float32 or bfloat16 (autocast); default: bfloat16 if "
        "this CPU has instructions for it, otherwise float32",
        kind=str,
        metavar="DTYPE",
    )
    warmup_steps: int = _option(10, "steps of linear warm-up", 0)
    held_out_bytes: int = _option(131_072, "the last bytes of the document, which are only scored")
    seed: int = _option(0, "seed of the initial weights and of the order of the data", -MAX_INT64)

    def __post_init__(self) -> None:
        for item in fields(self):
            entries = entries_of(getattr(self, item.name))
            if isinstance(item.default, tuple):
                object.__setattr__(self, item.name, entries)
            least, most = item.metadata["least"], item.metadata["most"]
            for entry in entries:
                if isinstance(entry, str) or entry is None:
                    continue
                if not least <= entry <= most:
                    raise ValueError(
                        f"{flag(item.name)} {in_short(entry)} must be from {least:,} to {most:,}"
                    )
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"--dtype {in_short(self.dtype)!r} must be float32 or bfloat16")
        for phase in self.schedule[:-1]:
            if phase.length >= self.seq_len:
                raise ValueError(
                    f"--phases {phase.length}:... is not shorter than --seq-len {self.seq_len}: leave it out, or raise "
                    "--steps for more steps of that length"
                )
        self.model_config()  # raises ValueError for bad widths and branches

    @property
    def schedule(self) -> tuple[Phase, ...]:
        """The phases of the run. The last one reads sequences of seq_len."""
        return (*map(_phase, self.phases), Phase(self.seq_len, self.batch_size, self.steps))

    @property
    def total_steps(self) -> int:
        return sum(phase.steps for phase in self.schedule)

    def positions_before(self, step: int) -> int:
        """The number of positions read in the steps before `step`."""
        number = 0
        for phase in self.schedule:
            number += phase.num_positions * max(0, min(step, phase.steps))
            step -= phase.steps
        return number

    def phase_of(self, step: int) -> Phase:
        """The phase to which a step belongs; steps count from 0. Steps after the end belong to the last phase."""
        for phase in self.schedule:
            if step < phase.steps:
                break
            step -= phase.steps
        return phase

    def model_config(self) -> LongNetConfig:
        return LongNetConfig.of_run(asdict(self))

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "Hyperparameters":
        """The inverse of `asdict`, also if JSON has turned tuples into lists.

        Raises ValueError if `saved` has different fields, because another version of this package saved it.
        """
        names = {item.name for item in fields(cls)}
        if saved.keys() != names:
            others = ", ".join(sorted(names ^ saved.keys()))
            raise ValueError(
                f"saved by another version of this package, whose hyperparameters differ in {others}"
            )
        return cls(**saved)


def in_short(number: float | str) -> str:
    """A number or a text as a string, cut to 40 letters."""
    text = str(number)
    return text if len(text) <= 40 else f"{text[:37]}..."


def entries_of(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _phase(text: str) -> Phase:
    try:
        length, batch_size, steps = map(int, text.split(":"))
    except ValueError:
        length = batch_size = steps = 0
    is_too_much = max(length, steps) > MAX_INT64 or batch_size > MOST_SEQUENCES
    if is_too_much or min(length, batch_size, steps) < 1:
        raise ValueError(
            f"--phases {in_short(text)!r} must be none or LENGTH:BATCH:STEPS, with a BATCH of at most "
            f"{MOST_SEQUENCES:,}. Example: 512:2:1000 is 1,000 steps of 2 sequences of 512 bytes"
        )
    return Phase(length, batch_size, steps)


def add_hyperparameters(parser: argparse._ArgumentGroup, whole: Callable[[str], int]) -> None:
    """Add an option for each field of `Hyperparameters`. An option that is not given sets no attribute.

    whole: the function that reads an integer from the command line.
    """
    metavars = {str: "FILE", int: "N", float: "X"}
    for item in fields(Hyperparameters):
        kind = item.metadata["kind"]
        nargs = None
        if isinstance(item.default, tuple):
            # Allow --segment-lengths and --dilation-rates without values, because --window may be given alone.
            nargs = "*" if kind is int else "+"
        text = item.metadata["help"]
        if item.default not in ((), None):
            text += f" (default {_shown(item.default)})"
        parser.add_argument(
            flag(item.name),
            default=argparse.SUPPRESS,
            type=whole if kind is int else kind,
            nargs=nargs,
            metavar=item.metadata["metavar"] or metavars[kind],
            help=text,
        )


def resolve(
    arguments: argparse.Namespace, before: Hyperparameters | None = None
) -> Hyperparameters:
    """The hyperparameters that the command line asks for.

    before: the hyperparameters of the run that is resumed, which stay the same; None for a new run.

    Raises ValueError for bad hyperparameters, and for options that differ from `before`.
    """
    options = {
        item.name: getattr(arguments, item.name)
        for item in fields(Hyperparameters)
        if item.name in arguments
    }
    if "data" in options:
        options["data"] = [str(Path(file).resolve()) for file in options["data"]]
    if options.get("phases") == ["none"]:
        options["phases"] = ()
    if before is None:
        if multiplies_bfloat16():
            options.setdefault("dtype", "bfloat16")
        if "segment_lengths" not in options:
            options.setdefault("window", DEFAULT_WINDOW)
        if "steps" not in options and "phases" not in options:
            longest = options.get("seq_len", Hyperparameters.seq_len)
            options["phases"] = tuple(
                text for text in DEFAULT_PHASES if _phase(text).length < longest
            )
        return Hyperparameters(**options)
    differing = []
    for name, new in vars(replace(before, **options)).items():
        old = getattr(before, name)
        if new != old:
            differing.append(f"{flag(name)} {_shown(new)} was {_shown(old)}")
    if differing:
        raise ValueError(
            f"a run that goes on keeps its hyperparameters, but {'; '.join(differing)}. Leave these options out, or "
            "choose another --run-folder"
        )
    return before


def _shown(value: Any) -> str:
    return " ".join(map(str, entries_of(value))) or "none"
