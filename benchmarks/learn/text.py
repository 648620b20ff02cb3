"""Text and code: held-out bits per byte of Python's library, by steps, by seconds, and with the context cut."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.models.longnet import LongNetLM
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.training.data import Document, load_document
from ring_dilated_attention.training.scoring import held_out_bits_per_byte

from ..record import branches, markdown
from .trainer import TIMED, Shape, Training, branches_of, one_thread

SUMMARY = "bits per byte of a language model by steps, by seconds and by context, by pattern"
Row = dict[str, Any]
BYTES = 256  # the vocabulary
CUTS = (64, 512, 4_096)
CUT_BYTES = 32_768  # held-out bytes that are scored with each cut
CLEAR_BYTES = 64  # a byte is scored if so many bytes of its segment precede it, or half the segment if that is less
ROWS = 2**14  # positions in one forward


class Run(NamedTuple):
    """One row to come. Its settings decide the row; `name` is for people."""

    name: str
    settings: dict[str, Any]
    make: Callable[[], Row]


class Settings(NamedTuple):
    """A run ends after so many steps, or at the first point of its curve after so many seconds."""

    branches: tuple[
        tuple[Any, ...], ...
    ]  # segment lengths, rates and perhaps a window, of each pattern
    seeds: tuple[int, ...]
    most_steps: int
    most_seconds: float | None
    seq_len: int = 1024
    shape: Shape = Shape()
    positions: int = 8192  # of a step
    every: int = 25  # steps of a point of the curve
    num_held_out: int = 65_536

    @property
    def patterns(self) -> list[DilatedPattern]:
        patterns = []
        for lengths, rates, *window in self.branches:
            one = DilatedPattern(lengths, rates, window=(*window, None)[0], is_causal=True)
            patterns.append(one)
        return patterns


LOCAL, LONGER, WIDE = ((32,), (1,)), ((256,), (1,)), ((32, 1024), (1, 4))
LONGNET, DENSE = ((32, 128, 512, 1024), (1, 4, 16, 64)), ((1024,), (1,))
# A window of 16 in the place of segments of 32: a query sees about as many keys, and none at a border is blind.
WINDOW = ((1024,), (4,), 16)
FULL = (
    Settings((LOCAL, DENSE, WIDE, LONGNET, LONGER), (0, 1, 2), 10_000, 80.0),
    Settings((LOCAL, WIDE, DENSE), (0, 1, 2), 10_000, 240.0),
    Settings((WINDOW,), (0, 1, 2), 400, None),  # beside step 400 of the first
)
QUICK = (Settings((((8,), (1,)), ((64,), (1,))), (0,), 2, 1.0, 128, Shape(1, 16, 2), 128, 1, 512),)


@cache
def document_of(seq_len: int, num_held_out: int) -> Document:
    return load_document((), seq_len, num_held_out)


def run_one(settings: Settings, pattern: DilatedPattern, seed: int) -> Row:
    """A language model, and its curve: steps, CPU seconds, mean training bits since the last point, held-out bits."""
    document, length = document_of(settings.seq_len, settings.num_held_out), settings.seq_len
    most_seconds = math.inf if settings.most_seconds is None else settings.most_seconds
    curve, losses = [], []
    with one_thread():
        training = Training(settings.shape, pattern, BYTES, seed)
        while training.num_steps < settings.most_steps and training.seconds < most_seconds:
            for _ in range(settings.every):
                windows = document.train_windows(
                    seed, training.num_steps, length, settings.positions // length
                )
                tokens = torch.frombuffer(windows, dtype=torch.uint8).view(-1, length).long()
                losses.append(training.step(tokens))
            mean = statistics.fmean(losses) / math.log(2)
            held_out = held_out_bits_per_byte(training.model, document)
            curve.append([training.num_steps, round(training.seconds, 3), mean, held_out])
            losses.clear()
        contexts = bits_by_context(training.model, document)
    return {
        **branches_of(pattern),
        "document": {
            name: document.identity()[name] for name in ("num_bytes", "num_held_out", "sha256")
        },
        "steps": training.num_steps,
        "cpu_seconds": round(training.seconds, 3),
        "curve": curve,
        "bits_by_context": contexts,
    }


def bits_by_context(model: LongNetLM, document: Document) -> dict[str, Any] | None:
    """Bits per byte with the context cut to c bytes, for each of CUTS and for half a sequence, on the same bytes.

    Contexts of 2 c bytes overlap by c; second halves are scored. A byte counts if, with every cut, CLEAR_BYTES or
    half of its segment (the longest of rate 1) precede it. None if a sequence is too short, or no byte counts.
    """
    cuts = [c for c in CUTS if 2 * c < document.seq_len] + [document.seq_len // 2]
    number = min(CUT_BYTES, document.num_held_out)
    begin = document.num_train + min(cuts[-1], document.num_held_out - number)
    lengths_of_rate_1 = [w for w, r, _ in model.config.pattern.branches if r == 1]
    longest = max(lengths_of_rate_1, default=1)
    clear = min(CLEAR_BYTES, longest // 2)
    target = torch.arange(number)
    counts = torch.stack([(target % c + c) % longest >= clear for c in cuts]).all(0)
    if len(cuts) == 1 or not counts.any():
        return None
    bits = []
    for c in cuts:
        rows = []
        for start in range(begin, begin + number, c):
            stop = min(start + c, begin + number)
            rows.append(document.content[start - c : stop].ljust(2 * c, b"\0"))
        tokens = torch.frombuffer(bytearray().join(rows), dtype=torch.uint8).view(-1, 2 * c)
        some_rows = tokens.long().split(max(1, ROWS // (2 * c)))
        # position c - 1 predicts the first byte of a second half
        nats = torch.cat([model.token_losses(some)[:, c - 1 : -1] for some in some_rows])
        counted = nats.flatten()[:number][counts]
        bits.append(counted.mean(dtype=torch.float64).item() / math.log(2))
    return {"num_bytes": int(counts.sum()), "least_context": cuts, "bits_per_byte": bits}


def runs(cases: Sequence[Settings]) -> list[Run]:
    found = []
    for settings in cases:
        until = f"{settings.most_steps:,} steps"
        if settings.most_seconds is not None:
            until += f" or {settings.most_seconds:g} s"
        for seed in settings.seeds:
            for pattern in settings.patterns:
                kept = (
                    settings._asdict()
                    | {"shape": vars(settings.shape), "seeds": seed}
                    | branches_of(pattern)
                )
                del kept["branches"]
                name = f"{named(branches_of(pattern), settings.seq_len)}, {until}, seed {seed}"
                found.append(Run(name, kept, partial(run_one, settings, pattern, seed)))
    return found


def named(row: dict[str, Any], seq_len: int) -> str:
    is_dense = list(row["segment_lengths"]) == [seq_len] and list(row["dilation_rates"]) == [1]
    return "dense" if is_dense else branches(row)


def bits_at(curve: Sequence[Sequence[float]], column: int, value: float) -> float | None:
    """Held-out bits where a curve's column (steps or seconds) has a value, on the line between two points."""
    for before, after in pairwise(curve):
        if before[column] <= value <= after[column]:
            share = (value - before[column]) / (after[column] - before[column])
            return before[3] + share * (after[3] - before[3])
    return None


def overtakes(
    longer: Sequence[Sequence[float]], shorter: Sequence[Sequence[float]], column: int
) -> float | None:
    """The first value of a column from which on one curve is below the other wherever both are known."""
    last = min(longer[-1][column], shorter[-1][column])
    values = sorted(
        {point[column] for curve in (longer, shorter) for point in curve if point[column] <= last}
    )
    found = None
    for value in values:
        mine, other = bits_at(longer, column, value), bits_at(shorter, column, value)
        if mine is None or other is None:
            continue
        if mine >= other:
            found = None
        elif found is None:
            found = value
    return found


def table(rows: list[Row]) -> str:
    settings, steps = rows[0]["settings"], min(row["steps"] for row in rows)
    seconds, length = min(row["cpu_seconds"] for row in rows), settings["seq_len"]
    cuts = (rows[0]["bits_by_context"] or {"least_context": []})["least_context"]
    first = {_alike(row): row for row in reversed(rows)}
    headers: tuple[str, ...] = (
        "pattern",
        "seed",
        "steps",
        "CPU s",
        "bits",
        f"at step {steps:,}",
        f"at {seconds:.0f} s",
    )
    headers = (
        *headers,
        "below the first from step",
        "from s",
        *(f"{c:,} to {2 * c - 1:,} before" for c in cuts),
    )
    lines = []
    for row in rows:
        curve, found, local = row["curve"], row["bits_by_context"], first[_alike(row)]
        cells = [f"{row['steps']:,}", f"{row['cpu_seconds']:.0f}", f"{curve[-1][3]:.3f}"]
        cells += [_bits(bits_at(curve, 0, steps)), _bits(bits_at(curve, 1, seconds))]
        for column in (0, 1):
            value = overtakes(curve, local["curve"], column)
            if row is local:
                cells.append("")
            else:
                cells.append("not found" if value is None else f"{value:,.0f}")
        cells += (
            [f"{value:.3f}" for value in found["bits_per_byte"]] if found else ["" for _ in cuts]
        )
        lines.append((named(row, length), str(row["settings"]["seeds"]), *cells))
    shape, held_out = settings["shape"], settings["num_held_out"]
    said = (
        f"Held-out bits per byte on {held_out:,} bytes of Python's standard library. A model has {shape['num_layers']} "
        f"layers of {shape['embed_dim']} with {shape['num_heads']} heads; a step reads "
        f"{settings['positions'] // length} sequences of {length:,} bytes. The learning rate is constant after a rise. "
        f"{TIMED} Last: bits with the context cut, on the same bytes along a row."
    )
    return f"{said}\n\n{markdown(headers, lines)}"


def _alike(row: Row) -> tuple[int, float | None]:
    """What runs share that are compared with the first of them."""
    return row["settings"]["seeds"], row["settings"]["most_seconds"]


def _bits(value: float | None) -> str:
    return "not run" if value is None else f"{value:.3f}"
