"""The hyperparameters of a run: a resumed run has the same ones. The file imports no torch."""

import argparse
import shlex
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..models.longnet_config import LongNetConfig

MOST_LAYERS = 10_000  # each layer is a module, which takes time and memory
LONGEST = 2**40  # the longest segment, and the largest dilation rate
LARGEST = 2**63 - 1  # the largest integer of 64 bits, also of a tensor's stride
# AdamW stays within float32: its first step divides by 1 - 0.9
LARGEST_FLOAT, SMALLEST_FLOAT = (1e30, 1e-30)
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


def _option(
    default: Any, text: str, least: float = 1, most: float = LARGEST, kind: type = int, **more: Any
) -> Any:
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
        (),
        "files of one document (FASTA is known by its name); default: Python's library",
        kind=str,
    )
    fasta_case: str = _choice("letters of FASTA: as they are, or in upper case", "keep", "upper")
    fasta_records: str = _choice(
        "records of FASTA: end to end, or each with a newline at its end", "join", "newline"
    )
    seq_len: int = _option(
        32_768, "bytes of one sequence, over all ranks; each is predicted from those before it", 2
    )
    batch_size: int = _option(1, "sequences of --seq-len in one step")
    steps: int = _option(
        DEFAULT_STEPS, "optimiser steps with sequences of --seq-len, after those of --phases"
    )
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
    num_kv_heads: int | None = _option(
        None, "key/value heads (grouped queries); default: as many as query heads"
    )
    segment_lengths: tuple[int, ...] = _option(
        (96, 256, 2_048, 32_768), "segment length of each branch", 1, LONGEST
    )
    dilation_rates: tuple[int, ...] = _option(
        (1, 1, 4, 16), "dilation rate of each branch", 1, LONGEST
    )
    optimizer: str = _choice(
        "muon: Muon for matrices of blocks, AdamW for the rest", "muon", "adamw"
    )
    learning_rate: float = _real(4e-3, "peak learning rate of AdamW; cosine down to 5 %% of it")
    muon_learning_rate: float = _real(0.015, "the same for Muon")
    warmup_steps: int = _option(10, "steps of linear warm-up", 0)
    weight_decay: float = _real(0.1, "of AdamW and Muon, on matrices only", 0)
    clip_norm: float = _real(1.0, "largest norm of the gradient")
    held_out: tuple[str, ...] = _option(
        (), "files whose first bytes are held out, not --data's last", kind=str
    )
    held_out_bytes: int = _option(
        131_072, "bytes that are only scored: the last of --data, or the first of --held-out"
    )
    seed: int = _option(0, "seed of the initial weights and of the order of the data", -LARGEST)

    def __post_init__(self) -> None:
        for item in fields(self):
            entries = entries_of(getattr(self, item.name))
            if isinstance(item.default, tuple):
                object.__setattr__(self, item.name, entries)
            for entry in entries:
                _check_entry(item, entry)
        for phase in self.schedule[:-1]:
            if phase.length >= self.seq_len:
                what = f"--phases {phase.length}:... is not shorter than --seq-len {self.seq_len}"
                raise ValueError(
                    f"{what}: leave it out, or raise --steps for more steps of that length"
                )
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
        """About the bytes of parameters, gradients and optimiser state in float32: those of all matrices."""
        num_kv_heads = self.num_kv_heads or self.num_heads
        kv_width = self.embed_dim // self.num_heads * num_kv_heads
        block_matrices = self.embed_dim * (2 * self.embed_dim + 2 * kv_width + 8 * self.embed_dim)
        num_parameters = self.num_layers * block_matrices + 2 * 256 * self.embed_dim
        # others have two
        with_one_moment = self.num_layers * block_matrices if self.optimizer == "muon" else 0
        return 4 * (4 * num_parameters - with_one_moment)

    def to_dict(self) -> dict[str, Any]:
        """A dict that JSON gives back as it was: with lists for tuples."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "Hyperparameters":
        """The inverse of `to_dict`. A ValueError refuses what another version of this package saved."""
        names = {item.name for item in fields(cls)}
        if saved.keys() != names:
            missing, foreign = sorted(names - saved.keys()), sorted(saved.keys() - names)
            raise ValueError(
                f"hyperparameters lack {missing or 'none'} and have {foreign or 'none'} besides"
            )
        return cls(**saved)


def _check_entry(item: Field[Any], entry: Any) -> None:
    """Raise ValueError unless a field may have this number or text."""
    name, least, most = flag(item.name), item.metadata["least"], item.metadata["most"]
    kind, choices = item.metadata["kind"], item.metadata["more"].get("choices")
    if entry is not None and isinstance(entry, str) != (kind is str):  # in a checkpoint
        raise ValueError(f"{name} {entry!r} must be of the type {kind.__name__}")
    if choices and entry not in choices:
        raise ValueError(f"{name} {in_short(entry)!r} must be {' or '.join(choices)}")
    if isinstance(entry, str):
        if "\0" in entry:
            raise ValueError(f"{name} {in_short(entry)!r} has a NUL, which no path can have")
    elif entry is not None and not least <= entry <= most:
        raise ValueError(f"{name} {in_short(entry)} must be from {least:,} to {most:,}")


def in_short(number: float | str) -> str:
    """A number or a text. If it has more than 40 letters: the count of the number's digits, or the text's beginning."""
    text = str(number)
    if len(text) <= 40:
        return text
    if text.lstrip("-").isdecimal():
        return f"(a number of {len(text)} digits)"
    return f"{text[:37]}..."


def entries_of(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _phase(text: str) -> Phase:
    numbers = text.split(":")
    if len(numbers) == 3 and all(
        x.isascii() and x.isdigit() and 1 <= int(x[:20]) <= LARGEST for x in numbers
    ):
        return Phase(*map(int, numbers))
    rule = "such as 512:2:1000, which is 1,000 steps of 2 sequences of 512 bytes, or none"
    raise ValueError(f"--phases {in_short(text)!r} must be LENGTH:BATCH:STEPS, {rule}")


def add_hyperparameters(parser: argparse._ArgumentGroup, whole: Callable[[str], int]) -> None:
    """Add an option for each field. Integers are read by `whole`. An option that is not given leaves no attribute."""
    for item in fields(Hyperparameters):
        kind, more = item.metadata["kind"], dict(item.metadata["more"])
        if "choices" not in more:
            more.setdefault("metavar", {str: "FILE", int: "N", float: "X"}[kind])
        if isinstance(item.default, tuple):
            more["nargs"] = "+"
        text = item.metadata["help"]
        if item.default not in ((), None):
            text += f" (default {_shown(item.default)})"
        read = whole if kind is int else kind
        parser.add_argument(
            flag(item.name), default=argparse.SUPPRESS, type=read, help=text, **more
        )


def resolve(
    arguments: argparse.Namespace, before: Hyperparameters | None = None
) -> Hyperparameters:
    """The hyperparameters of a run. A ValueError refuses bad values, and changes that cannot be.

    before: those of the run that --resume or --from names. A resumed run keeps them all, a run of --from keeps SHAPE.
    """
    options = {
        item.name: getattr(arguments, item.name)
        for item in fields(Hyperparameters)
        if item.name in arguments
    }
    for name in FILES:
        files = options.get(name, ())
        if "-" in files:
            rule = "is stdin, and a resumed run reads its data again: save it in a file first"
            raise ValueError(f"{flag(name)} - {rule}")
        if files:
            options[name] = [str(Path(file).resolve()) for file in files]
    if options.get("phases") == ["none"]:
        options["phases"] = ()
    if before is None:
        if "steps" not in options and "phases" not in options:
            longest = options.get("seq_len", Hyperparameters.seq_len)
            options["phases"] = tuple(
                text for text in DEFAULT_PHASES if _phase(text).length < longest
            )
        return Hyperparameters(**options)
    if arguments.resume is None:
        wanted = replace(before, **{"phases": (), **options})
        changed = {name: said for name, said in changes(wanted, before).items() if name in SHAPE}
    else:
        wanted = replace(before, **options)
        changed = changes(wanted, before)
    if changed:
        raise ValueError(_words_of_refusal(arguments, wanted, changed))
    return wanted


def _words_of_refusal(
    arguments: argparse.Namespace, wanted: Hyperparameters, changed: dict[str, str]
) -> str:
    differences = "; ".join(changed.values())
    remedy = "Leave these options out, or start a new run from random parameters"
    if arguments.resume is None:
        return f"the parameters of --from have other shapes, but {differences}. {remedy}"
    if not changed.keys() & set(SHAPE):
        words = ["--from", str(arguments.resume)]
        for name in changed:
            words += [flag(name), *(map(str, entries_of(getattr(wanted, name)) or ["none"]))]
        remedy = f"A new run from its parameters: rda train {shlex.join(words)}"
    return f"a resumed run keeps its hyperparameters, but {differences}. {remedy}"


def changes(wanted: Hyperparameters, before: Hyperparameters) -> dict[str, str]:
    """What is wanted other than it was, by name, in words."""
    words = {}
    for name, new in vars(wanted).items():
        old = getattr(before, name)
        if new != old:
            words[name] = f"{flag(name)} {_shown(new)} was {_shown(old)}"
    return words


def _shown(value: Any) -> str:
    return " ".join(map(str, entries_of(value))) or "none"
