"""`rda evaluate`: measures a model's bits per byte on any text, by how many bytes of context it may see."""

import argparse
import json
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

from ..models.saved_run import read_state
from ..training.data import cut_into_contexts, letters
from ..training.files import check_mine, folder_made, is_our_picture, write_whole
from ..training.machine import peak_resident_bytes
from ..training.pictures import draw_buckets
from .generate import check_run
from .interrupts import leaving_at_once
from .limits import check_at_least
from .numbers import count
from .output import aligned, check_writable

EXAMPLES = """examples:
  rda evaluate runs/a book.txt                  contexts as long as in training
  rda evaluate runs/a book.txt --context 0      the text is one context
  xz -dc corpus.xz | rda evaluate runs/a -      from a pipe
  rda evaluate runs/a genome.fa --picture bits.png   draw; strip FASTA headers

The text is cut into contexts and read through caches, a chunk at a time: memory grows neither with the text nor with
the length of a context. The first byte of a context is not predicted. If more context helps, bits per byte fall from
row to row.
"""
MAKER = "rda evaluate --picture"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("run_folder", type=Path, metavar="RUN", help="the folder of a run of rda train")
    add("file", metavar="FILE", help="of any size; - is stdin")
    add("--context", type=count, metavar="N", help="bytes of a context, 0: without end (default: as in training)")
    add("--chunk", type=count, default=4096, metavar="N", help="bytes at a time (default 4096)")
    add("--picture", type=Path, metavar="FILE", help="draw bits per byte by position, as PNG")
    add("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    record = evaluate(arguments)
    print(json.dumps(record) if arguments.json else report(record))
    return 0


def evaluate(arguments: argparse.Namespace) -> dict:
    checkpoint, context = check_run(arguments.run_folder), arguments.context
    check_at_least("--chunk", arguments.chunk)
    if context is not None and context != 0 and context < 2:
        rule = "2 or more, or 0 for one that never ends: the first byte of a context is not predicted"
        raise ValueError(f"--context {context} must be {rule}")
    if arguments.picture is not None:
        if find_spec("matplotlib") is None:
            raise ValueError("--picture needs matplotlib: pip install matplotlib")
        check_writable("--picture", arguments.picture.parent, arguments.picture.name)
        check_mine(arguments.picture, is_our_picture, MAKER)
    context = (read_state(checkpoint)["hyperparameters"]["seq_len"] if context is None else context) or None
    with nullcontext(sys.stdin.buffer) if arguments.file == "-" else open(arguments.file, "rb") as file:
        with leaving_at_once("rda evaluate"):
            from ..models.longnet import LongNetLM
            from ..training.bits_per_byte import bits_by_position, mean

        model = LongNetLM.from_run(arguments.run_folder)
        text = cut_into_contexts(letters(arguments.file, file), arguments.chunk, context)
        buckets = bits_by_position(model, text, context)
    if not buckets:
        raise ValueError(f"{arguments.file} has fewer than 2 bytes: each is predicted from those before it")
    if arguments.picture is not None:
        picture = draw_buckets(buckets, mean(buckets), f"{arguments.file}, contexts of {shown(context)}")
        with folder_made(arguments.picture.parent):
            write_whole(arguments.picture, picture, is_our_picture, MAKER)
    return {
        "file": arguments.file,
        "context": context,
        "bits_per_byte": mean(buckets),
        "num_bytes": sum(bucket.num_bytes for bucket in buckets),
        "by_bytes_before": [bucket._asdict() for bucket in buckets],
        "peak_resident_bytes": peak_resident_bytes(),
    }


def shown(context: int | None) -> str:
    return "any length" if context is None else f"{context:,} bytes"


def report(record: dict) -> str:
    headers = ("bytes before", "bytes", "bits per byte", "")
    buckets = record["by_bytes_before"]
    most = max(bucket["bits_per_byte"] for bucket in buckets)
    rows = []
    for bucket in buckets:
        before = " to ".join(f"{edge:,}" for edge in sorted({bucket["first"], bucket["last"]}))
        bits = bucket["bits_per_byte"]
        rows.append((before, f"{bucket['num_bytes']:,}", f"{bits:.3f}", ("#" * round(30 * bits / most)).ljust(30)))
    return (
        f"{aligned(headers, rows)}\n{record['bits_per_byte']:.3f} bits per byte over {record['num_bytes']:,} bytes, in "
        f"contexts of {shown(record['context'])}; peak resident {record['peak_resident_bytes'] / 1e6:,.0f} MB"
    )
