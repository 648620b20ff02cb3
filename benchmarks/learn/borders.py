"""Borders: bits per byte by the place in a segment of the byte that predicts, for widths whose segments begin together
and for widths whose segments do not."""

import math
import statistics
from collections.abc import Iterable, Sequence

import torch

from ring_dilated_attention.models.longnet import LongNetLM
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.training.data import Document
from ring_dilated_attention.training.scoring import POSITIONS_AT_ONCE

from ..record import markdown
from . import text
from .kept import Row, Run
from .text import Settings, document_of, named
from .trainer import Shape, one_thread

SUMMARY = "what it costs that segments of all branches begin at the same byte"
FULL = (
    Settings(
        (((32, 256), (1, 1)), ((96, 256), (1, 1)), ((64, 256), (1, 1)), ((128, 256), (1, 1))), (0, 1, 2), 200, None
    ),
)
QUICK = (Settings((((8, 16), (1, 1)), ((12, 16), (1, 1))), (0,), 2, None, 128, Shape(1, 16, 2), 128, 1, 512),)
BEFORE, FIRST, AFTER = 16, 8, 48  # bytes before a border, the first bytes behind it, and those that a row has


def runs(cases: Sequence[Settings]) -> list[Run]:
    return text.runs(cases, run_one)


def run_one(settings: Settings, pattern: DilatedPattern, seed: int) -> Row:
    """The bits of the byte after a position, by its place in the segments. The first segments do not count."""
    with one_thread():
        model, row = text.train(settings, pattern, seed, _mean_bits)
        bits = bits_by_position(model, document_of(settings.seq_len, settings.num_held_out))
    lengths, positions = pattern.segment_lengths, range(min(pattern.segment_lengths), len(bits))
    begun = {t: sum(t % w == 0 for w in lengths) for t in positions}

    def mean(chosen: Iterable[int]) -> float | None:
        found = [bits[t] for t in chosen if t < len(bits)]
        return statistics.fmean(found) if found else None

    borders = range(max(lengths), len(bits), max(lengths))
    return row | {
        "mean_bits": statistics.fmean(bits),
        "where_all_begin": mean(t for t in positions if begun[t] == len(lengths)),
        "where_some_begin": mean(t for t in positions if 0 < begun[t] < len(lengths)),
        "elsewhere": mean(t for t in positions if not begun[t]),
        "around_borders": [mean(t + k for t in borders) for k in range(-BEFORE, AFTER)],
    }


def bits_by_position(model: LongNetLM, document: Document) -> list[float]:
    held_out, length = document.content[document.num_train :], document.seq_len
    tokens = torch.frombuffer(bytearray(held_out[: len(held_out) // length * length]), dtype=torch.uint8)
    batches = tokens.view(-1, length).long().split(max(1, POSITIONS_AT_ONCE // length))
    nats = torch.cat([model.token_losses(batch) for batch in batches])[:, :-1]
    return (nats.double().mean(0) / math.log(2)).tolist()


def _mean_bits(model: LongNetLM, document: Document) -> float:
    return statistics.fmean(bits_by_position(model, document))


def keys_of(row: Row) -> float:
    """Keys that a query sees in the mean, over all branches."""
    return sum((w + 1) / 2 for w in row["segment_lengths"])


def table(rows: list[Row]) -> str:
    widest, settings = max(max(row["segment_lengths"]) for row in rows), rows[0]["settings"]
    headers: tuple[str, ...] = (
        "pattern",
        "seed",
        "keys of a query",
        "CPU s",
        "mean bits",
        f"byte 0 of {widest}",
        f"bytes 1 to {FIRST - 1}",
    )
    headers = (*headers, "the bytes before", "where all begin", "where some begin", "elsewhere")
    lines = []
    for row in rows:
        around = row["around_borders"]
        groups = (around[BEFORE : BEFORE + 1], around[BEFORE + 1 : BEFORE + FIRST], around[:BEFORE])
        cells = [f"{keys_of(row):.0f}", f"{row['cpu_seconds']:.0f}", f"{row['mean_bits']:.3f}"]
        cells += [f"{statistics.fmean(group):.3f}" for group in groups]
        for name in ("where_all_begin", "where_some_begin", "elsewhere"):
            cells.append("none" if row[name] is None else f"{row[name]:.3f}")
        lines.append((named(row, settings["seq_len"]), str(row["settings"]["seeds"]), *cells))
    said = (
        f"Held-out bits per byte after {settings['most_steps']:,} steps, trained as in learn_text, by the position of "
        f"the byte that predicts: at borders of segments of {widest:,}, and where a segment of every branch begins, of "
        "some branch, or of none."
    )
    return f"{said}\n\n{markdown(headers, lines)}"
