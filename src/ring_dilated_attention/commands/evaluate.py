"""`rda evaluate`: measures a model's bits per byte on any text, in contexts of any length."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..models.saved_run import newest_checkpoint, read_state
from ..training.data import read_file
from .arguments import within
from .console import progress
from .terminal import leaving_at_once

EXAMPLES = """examples:
  rda evaluate runs/a book.txt                  contexts as long as in training
  rda evaluate runs/a book.txt --context 512    does more context help?
  rda evaluate runs/a book.txt --context 0      the text is one context
  xz -dc corpus.xz | rda evaluate runs/a -      from a pipe

The text is cut into contexts. The first byte of a context is not predicted.

The model reads through caches, whose memory does not grow with the context.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("run_folder", type=Path, metavar="RUN", help="the folder of a run of rda train")
    add("file", metavar="FILE", help="the text; - is stdin")
    add(
        "--context",
        type=within(0),
        metavar="N",
        help="bytes of a context, 0: the whole text (default: as in training)",
    )
    add("--json", action="store_true", help="print the figures as JSON")


def run(arguments: Namespace) -> int:
    state = read_state(newest_checkpoint(arguments.run_folder))
    text = read_file(arguments.file)
    context = len(text)
    if arguments.context != 0:
        context = min(arguments.context or state["hyperparameters"]["seq_len"], len(text))
    if context < 2:
        raise ValueError(
            f"{arguments.file}: no context has 2 bytes, and the first byte of a context is not predicted"
        )
    with leaving_at_once("rda evaluate"):
        from ..models.longnet import LongNetLM
        from ..training.scoring import score

    num_bytes = 0
    bits = 0.0
    with progress(len(text), "byte") as bar:
        for scored in score(LongNetLM.from_run(arguments.run_folder), text, context):
            num_bytes += scored.num_predicted
            bits += scored.bits
            bar.update(scored.num_read)
    record = {
        "file": arguments.file,
        "context": context,
        "bits_per_byte": bits / num_bytes,
        "num_bytes": num_bytes,
    }
    if arguments.json:
        print(json.dumps(record))
        return 0
    print(
        f"{record['bits_per_byte']:.3f} bits per byte over {num_bytes:,} bytes, in contexts of {context:,} bytes"
    )
    return 0
