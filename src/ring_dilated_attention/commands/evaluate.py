"""`rda evaluate`: measures a model's bits per byte on any text, by how many bytes of context it may see."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from ..training.data import Text, opened
from .arguments import within
from .console import progress, table, wrapped
from .generate import hyperparameters_of
from .terminal import leaving_at_once

EXAMPLES = """examples:
  rda evaluate runs/a book.txt                  contexts as long as in training
  rda evaluate runs/a book.txt --context 0      the text is one context
  xz -dc corpus.xz | rda evaluate runs/a -      from a pipe

The text is cut into contexts. The first byte of a context is not predicted. If
more context helps, bits per byte fall from row to row. Of FASTA, known by its
name (as .fa), the letters are read; on stdin it is text.

The model reads through caches, whose memory does not grow with the text.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("run_folder", type=Path, metavar="RUN", help="the folder of a run of rda train")
    add("file", metavar="FILE", help="of any size, also packed by gzip, bzip2 or xz; - is stdin")
    context = "bytes of a context, 0: without end (default: as in training)"
    add("--context", type=within(0), metavar="N", help=context)
    add("--json", action="store_true", help="print the figures as JSON")


def run(arguments: Namespace) -> int:
    context = arguments.context
    if context is None:
        context = hyperparameters_of(arguments.run_folder)["seq_len"]
    text = Text(arguments.file)
    with leaving_at_once("rda evaluate"):
        from ..models.longnet import LongNetLM
        from ..training.scoring import Score, score

    total = Score()
    with progress(None, "byte") as bar, opened(text.name) as file:
        model = LongNetLM.from_run(arguments.run_folder)
        for scored in score(model, text.blocks(file), context or None):
            total = total.plus(scored)
            bar.update(scored.num_read)
    buckets = total.buckets()
    if not buckets:
        raise ValueError(
            f"{arguments.file}: no context has 2 bytes: each is predicted from those before it"
        )
    record = {
        "file": arguments.file,
        "read": str(text),
        "context": context or None,
        "bits_per_byte": total.mean(),
        "num_bytes": sum(total.counts),
        "by_bytes_before": buckets,
    }
    print(json.dumps(record) if arguments.json else report(record))
    return 0


def report(record: dict[str, Any]) -> str:
    """A table of bits per byte."""
    rows = []
    for bucket in record["by_bytes_before"]:
        before = f"{bucket['first']:,}"
        if bucket["last"] != bucket["first"]:
            before = f"{before} to {bucket['last']:,}"
        rows.append((before, f"{bucket['num_bytes']:,}", f"{bucket['bits_per_byte']:.3f}"))
    length = "any length" if record["context"] is None else f"{record['context']:,} bytes"
    bits = f"{record['bits_per_byte']:.3f} bits per byte over {record['num_bytes']:,} bytes"
    headers = ("bytes before", "bytes", "bits per byte")
    lines = (wrapped(record["read"]), table(headers, rows), f"{bits}, in contexts of {length}")
    return "\n".join(lines)
