"""`rda evaluate`: measures a model's bits per byte on any text, by how many bytes of context it may see."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..training.data import PACKED, Text, opened
from ..training.machine import peak_resident_bytes
from .arguments import check_at_least, count
from .console import progress, table, wrapped
from .generate import hyperparameters_of
from .terminal import leaving_at_once

if TYPE_CHECKING:
    from ..training.scoring import Score

EXAMPLES = """examples:
  rda evaluate runs/a book.txt                  contexts as long as in training
  rda evaluate runs/a book.txt --context 0      the text is one context
  xz -dc corpus.xz | rda evaluate runs/a -      from a pipe

The text is cut into contexts. The first byte of a context is not predicted. If more context helps, bits per byte fall
from row to row. Of FASTA, known by its name (as .fa), the letters are read; on stdin it is text.

The model reads through caches, whose memory does not grow with the text.
"""


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
    add("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    saved = hyperparameters_of(arguments.run_folder)
    context = saved["seq_len"] if arguments.context is None else arguments.context
    if context != 0:
        check_at_least("--context", context, least=2)
    text = Text(arguments.file)
    score = measure(arguments.run_folder, text, context or None)
    buckets = score.buckets()
    if not buckets:
        raise ValueError(
            f"{arguments.file} has fewer than 2 bytes: each is predicted from those before it"
        )
    record = {
        "file": arguments.file,
        "read": str(text),
        "context": context or None,
        "bits_per_byte": score.mean(),
        "num_bytes": sum(score.counts),
        "by_bytes_before": buckets,
        "peak_resident_bytes": peak_resident_bytes(),
    }
    print(json.dumps(record) if arguments.json else report(record))
    return 0


def measure(run_folder: Path, text: Text, context: int | None) -> "Score":
    with leaving_at_once("rda evaluate"):
        from ..models.longnet import LongNetLM
        from ..training.scoring import Score, score

    total, path, size = Score(), Path(text.name), None
    if path.is_file() and not PACKED.search(text.name.lower()):
        size = path.stat().st_size
    with progress(size, "byte") as bar, opened(text.name) as file:
        model = LongNetLM.from_run(run_folder)
        for scored in score(model, text.blocks(file), context):
            total = total.plus(scored)
            bar.update(scored.num_read)
    return total


def report(record: dict) -> str:
    """A table of bits per byte."""
    rows = []
    for bucket in record["by_bytes_before"]:
        first, last = bucket["first"], bucket["last"]
        before = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        rows.append((before, f"{bucket['num_bytes']:,}", f"{bucket['bits_per_byte']:.3f}"))
    length = "any length" if record["context"] is None else f"{record['context']:,} bytes"
    result = (
        f"{record['bits_per_byte']:.3f} bits per byte over {record['num_bytes']:,} bytes, in contexts of {length}; "
        f"peak resident {record['peak_resident_bytes'] / 1e6:,.0f} MB"
    )
    headers = ("bytes before", "bytes", "bits per byte")
    return "\n".join((wrapped(record["read"]), table(headers, rows), wrapped(result)))
