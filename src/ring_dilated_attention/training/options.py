"""The hyperparameters of a run: a resumed run has the same ones. The file imports no torch."""

import argparse
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..forecast.shape import Shape
from ..models.longnet_config import LongNetConfig

MOST_LAYERS = 10_000  # each layer is a module, which takes time and memory
LONGEST = 2**40  # the longest segment, and the largest dilation rate
LARGEST = 2**63 - 1  # the largest integer of 64 bits, also of a tensor's stride
LARGEST_FLOAT, SMALLEST_FLOAT = 1e30, 1e-30  # AdamW stays within float32: its first step divides by 1 - 0.9
# Short sequences teach most in the same time. They take half of the time of a run of the default length and steps.
DEFAULT_STEPS, DEFAULT_PHASES = 18, ("512:2:1500", "1024:2:400", "4096:2:120")
FILES = ("data", "held_out")
# A run of --from has that run's layers, width and heads, since these decide the shapes of parameters.
SHAPE = ("num_layers", "embed_dim", "num_heads", "num_kv_heads")


class Phase(NamedTuple):
    """Steps that read `batch_size` sequences of `length` bytes each, joined as packed documents."""

    length: int
    batch_size: int
    steps: int

    @property
    def num_positions(self) -> int:
        return self.length * self.batch_size


def _option(default: Any, text: str, least: float = 1, most: float = LARGEST, kind: type = int, **more: Any) -> Any:
    """A field with its --help. Its numbers are from `least` to `most`. `more` goes to argparse."""
    metadata = {"help": text, "least": least, "most": most, "kind": kind, "more": more}
    return field(default=default, metadata=metadata)


def _real(default: float, text: str, least: float = SMALLEST_FLOAT) -> Any:
    return _option(default, text, least, LARGEST_FLOAT, float)


def _choice(text: str, *choices: str) -> Any:
    return _option(choices[0], text, kind=str, choices=choices)


@dataclass(frozen=True)
class Hyperparameters:
    """On the same machine with the same number of ranks, equal hyperparameters give the same result to the bit."""

    data: tuple[str, ...] = _option(
        (), "files of one document (FASTA is known by its name); default: Python's library", kind=str
    )
    fasta_case: str = _choice("letters of FASTA: as they are, or in upper case", "keep", "upper")
    fasta_records: str = _choice("records of FASTA: end to end, or each with a newline at its end", "join", "newline")
    seq_len: int = _option(32_768, "bytes of one sequence, over all ranks; each is predicted from those before it", 2)
    batch_size: int = _option(1, "sequences of --seq-len in one step")
    steps: int = _option(DEFAULT_STEPS, "optimiser steps with sequences of --seq-len, after those of --phases")
    phases: tuple[str, ...] = _option(
        (),
        "shorter sequences that are read first, as LENGTH:BATCH:STEPS, or none (default: those of "
        f"{' '.join(DEFAULT_PHASES)} that are shorter than --seq-len; none if --steps or --from is given)",
        kind=str,
        metavar="PHASE",
    )
    num_layers: int = _option(2, "transformer blocks", most=MOST_LAYERS)
    embed_dim: int = _option(128, "width of the model")
    num_heads: int = _option(4, "query heads")
    num_kv_heads: int | None = _option(None, "key/value heads (grouped queries); default: as many as query heads")
    segment_lengths: tuple[int, ...] = _option((96, 256, 2_048, 32_768), "segment length of each branch", 1, LONGEST)
    dilation_rates: tuple[int, ...] = _option((1, 1, 4, 16), "dilation rate of each branch", 1, LONGEST)
    optimizer: str = _choice("muon: Muon for matrices of blocks, AdamW for the rest", "muon", "adamw")
    learning_rate: float = _real(4e-3, "peak learning rate of AdamW; cosine down to 5 %% of it")
    muon_learning_rate: float = _real(0.015, "the same for Muon")
    warmup_steps: int = _option(10, "steps of linear warm-up", 0)
    weight_decay: float = _real(0.1, "of AdamW and Muon, on matrices only", 0)
    clip_norm: float = _real(1.0, "largest norm of the gradient")
    held_out: tuple[str, ...] = _option((), "files whose first bytes are held out, not --data's last", kind=str)
    held_out_bytes: int = _option(131_072, "bytes that are only scored: the last of --data, or the first of --held-out")
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
        for name in ("learning_rate", "muon_learning_rate"):
            if (rate := getattr(self, name)) * self.weight_decay > LARGEST_FLOAT:
                product = f"{flag(name)} {rate} times --weight-decay {self.weight_decay}"
                raise ValueError(f"{product} must be at most {LARGEST_FLOAT:,}")
        for phase in self.schedule[:-1]:
            if phase.length >= self.seq_len:
                found = f"--phases {phase.length}:... is not shorter than --seq-len {self.seq_len}"
                raise ValueError(f"{found}: leave it out, or raise --steps for more steps of that length")
        self.model_config()  # refuses bad widths and branches

    @property
    def schedule(self) -> tuple[Phase, ...]:
        """The phases of the run. The last one reads sequences of seq_len."""
        return (*map(_phase, self.phases), Phase(self.seq_len, self.batch_size, self.steps))

    @property
    def total_steps(self) -> int:
        return sum(phase.steps for phase in self.schedule)

    def positions_before(self, step: int) -> int:
        """The positions that all steps before this one read."""
        number = 0
        for phase in self.schedule:
            number += phase.num_positions * max(0, min(step, phase.steps))
            step -= phase.steps
        return number

    @property
    def steps_again(self) -> int:
        """How many steps of the last phase read as many positions as the whole run."""
        return -(-self.positions_before(self.total_steps) // self.schedule[-1].num_positions)

    def phase_of(self, step: int) -> Phase:
        """The phase of a step, counted from 0. After the last step it is the last phase."""
        for phase in self.schedule:
            if step < phase.steps:
                break
            step -= phase.steps
        return phase

    def model_config(self) -> LongNetConfig:
        return LongNetConfig.of_run(asdict(self))

    def num_training_bytes(self) -> int:
        """The bytes of parameters, gradients and optimiser state in float32."""
        width, num_kv_heads = self.embed_dim, self.num_kv_heads or self.num_heads
        shape = Shape(self.num_layers, width, 4 * width, 256, self.num_heads, num_kv_heads)
        with_one_moment = self.num_layers * shape.block_matrices if self.optimizer == "muon" else 0  # others have two
        return 4 * (4 * shape.num_parameters - with_one_moment)

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
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _phase(text: str) -> Phase:
    numbers = text.split(":")
    if len(numbers) != 3 or not all(x.isascii() and x.isdigit() and 1 <= int(x[:20]) <= LARGEST for x in numbers):
        rule = "such as 512:2:1000, which is 1,000 steps of 2 sequences of 512 bytes, or none"
        raise ValueError(f"--phases {in_short(text)!r} must be LENGTH:BATCH:STEPS, {rule}")
    return Phase(*map(int, numbers))


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


def resolve(arguments: argparse.Namespace, before: Hyperparameters | None = None) -> Hyperparameters:
    """The hyperparameters of a run. A ValueError refuses bad values, and changes that cannot be.

    before: those of the run that --resume or --from names. A resumed run keeps them all, a run of --from keeps SHAPE.
    """
    given = {item.name: getattr(arguments, item.name) for item in fields(Hyperparameters) if item.name in arguments}
    for name in FILES:
        if "-" in given.get(name, ()):
            raise ValueError(
                f"{flag(name)} - is stdin, and a resumed run reads its data again: save it in a file first"
            )
    given |= {name: [str(Path(file).resolve()) for file in given[name]] for name in FILES if name in given}
    if given.get("phases") == ["none"]:
        given["phases"] = ()
    if before is None:
        if not given.keys() & {"steps", "phases"}:
            longest = given.get("seq_len", Hyperparameters.seq_len)
            given["phases"] = tuple(text for text in DEFAULT_PHASES if _phase(text).length < longest)
        return Hyperparameters(**given)
    resumed = arguments.resume
    wanted = replace(before, **given if resumed else {"phases": ()} | given)
    refused = {name: said for name, said in changes(wanted, before).items() if resumed or name in SHAPE}
    if refused:
        rule = "a resumed run keeps its hyperparameters" if resumed else "the parameters of --from have other shapes"
        remedy = "Leave these options out, or start a new run from random parameters"
        if resumed and not set(refused) & set(SHAPE):
            given_anew = {name: entries_of(getattr(wanted, name)) or ("none",) for name in refused}
            command = [str(word) for name, entries in given_anew.items() for word in (flag(name), *entries)]
            remedy = f"A new run from its parameters: rda train --from {shlex.join([str(resumed), *command])}"
        raise ValueError(f"{rule}, but {'; '.join(refused.values())}. {remedy}")
    return wanted


def changes(wanted: Hyperparameters, before: Hyperparameters) -> dict[str, str]:
    """What is wanted other than it was, by name, in words."""
    pairs = ((name, value, getattr(before, name)) for name, value in vars(wanted).items())
    return {name: f"{flag(name)} {_shown(new)} was {_shown(old)}" for name, new, old in pairs if new != old}


def _shown(value: Any) -> str:
    return " ".join(map(str, entries_of(value))) or "none"
