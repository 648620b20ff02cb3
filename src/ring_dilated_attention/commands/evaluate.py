"""`rda evaluate`: measures a model's bits per byte on any text, by how many bytes of context it may see."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..training.data import PACKED, Text, opened
from ..training.machine import peak_resident_bytes
from ..training.options import LARGEST
from .arguments import check_at_least, count
from .console import progress, table, wrapped
from .generate import hyperparameters_of
from .terminal import INTERRUPTED_EXIT_CODE, leaving_at_once

if TYPE_CHECKING:
    from ..training.scoring import Score

EXAMPLES = """examples:
  rda evaluate runs/a book.txt                  contexts as long as in training
  rda evaluate runs/a book.txt --context 0      the text is one context
  xz -dc corpus.xz | rda evaluate runs/a -      from a pipe

The text is cut into contexts. The first byte of a context is not predicted. If more context helps, bits per byte fall
from row to row. Of FASTA, known by its name (as .fa), the letters are read; on stdin it is text.

The model reads through caches, whose memory does not grow with the text. After Ctrl-C the command shows what it has
measured, and the exit code is 130.
"""
LONGEST_BAR = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_folder", type=Path, metavar="RUN", help="the folder of a run of rda train")
    add("file", metavar="FILE", help="of any size, also packed by gzip, bzip2 or xz; - is stdin")
    add(
        "--context",
        type=count,
        metavar="N",
        help="bytes of a context, 0: without end (default: as in training)",
    )
    add(
        "--max-bytes",
        type=count,
        default=LARGEST,
        metavar="N",
        help="stop after so many bytes (default: at the end)",
    )
    add("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    context = resolved(arguments)
    text = Text(arguments.file, arguments.max_bytes)
    score, is_whole = measure(arguments.run_folder, text, context)
    buckets = score.buckets()
    if not buckets and not is_whole:
        raise KeyboardInterrupt
    if not buckets:
        raise ValueError(
            f"{arguments.file} has fewer than 2 bytes: each is predicted from those before it"
        )
    record = {
        "file": arguments.file,
        "read": str(text),
        "context": context,
        "interrupted": not is_whole,
        "bits_per_byte": score.mean(),
        "num_bytes": sum(score.counts),
        "by_bytes_before": buckets,
        "peak_resident_bytes": peak_resident_bytes(),
    }
    print(json.dumps(record) if arguments.json else report(record))
    return 0 if is_whole else INTERRUPTED_EXIT_CODE


def resolved(arguments: argparse.Namespace) -> int | None:
    """The context; None if it never ends. A ValueError refuses bad options."""
    saved, context = hyperparameters_of(arguments.run_folder), arguments.context
    check_at_least("--max-bytes", arguments.max_bytes, least=2)
    if context is None:
        return int(saved["seq_len"])
    if context == 0:
        return None
    if context < 2:
        rule = (
            "2 or more, or 0 for one that never ends: the first byte of a context is not predicted"
        )
        raise ValueError(f"--context {context} must be {rule}")
    return int(context)


def measure(run_folder: Path, text: Text, context: int | None) -> "tuple[Score, bool]":
    """The score of what was read, and whether that is all: Ctrl-C may have ended it."""
    with leaving_at_once("rda evaluate"):
        from ..models.longnet import LongNetLM
        from ..training.scoring import Score, score

    total, path, size = Score(), Path(text.name), text.most
    if path.is_file() and not PACKED.search(text.name.lower()):
        size = min(path.stat().st_size, text.most)
    with progress(None if size == LARGEST else size, "B") as bar:
        try:
            model = LongNetLM.from_run(run_folder)
            with opened(text.name) as file:
                for scored in score(model, text.blocks(file), context):
                    total = total.plus(scored)
                    bar.update(scored.num_read)
        except KeyboardInterrupt:
            return total, False
    return total, True


def shown(context: int | None) -> str:
    return "any length" if context is None else f"{context:,} bytes"


def report(record: dict) -> str:
    """A table of bits per byte, with bars of their height above the least."""
    bits = [bucket["bits_per_byte"] for bucket in record["by_bytes_before"]]
    least, height = min(bits), max(bits) - min(bits) or 1
    rows = []
    for bucket in record["by_bytes_before"]:
        first, last = bucket["first"], bucket["last"]
        before = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        bar = "#" * round(LONGEST_BAR * (bucket["bits_per_byte"] - least) / height)
        rows.append(
            (
                before,
                f"{bucket['num_bytes']:,}",
                f"{bucket['bits_per_byte']:.3f}",
                bar.ljust(LONGEST_BAR, "."),
            )
        )
    headers = ("bytes before", "bytes", "bits per byte", f"above {least:.3f}")
    result = (
        f"{record['bits_per_byte']:.3f} bits per byte over {record['num_bytes']:,} bytes, in contexts of "
        f"{shown(record['context'])}; peak resident {record['peak_resident_bytes'] / 1e6:,.0f} MB"
    )
    if record["interrupted"]:
        result = f"interrupted: {result}"
    return "\n".join((wrapped(record["read"]), table(headers, rows), wrapped(result)))
