"""`rda evaluate`: measures a model's bits per byte on any text, by how many bytes of context it may see."""

import argparse
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..training.data import PACKED, STDIN, Text, opened
from ..training.files import check_mine, is_our_picture, write_whole
from ..training.machine import peak_resident_bytes, physical_bytes
from ..training.pictures import draw_buckets
from ..training.rank_launcher import share_of_cores
from .generate import hyperparameters_of
from .local_ranks import Launch, RankFailedError, Worker, run_ranks
from .numbers import LARGEST, check_at_least, check_ranks_fit, count
from .output import aligned, check_installed, check_writable, progress_bar, wrapped
from .terminal import INTERRUPTED_EXIT_CODE, leaving_at_once

if TYPE_CHECKING:
    from ..training.scoring import Score

EXAMPLES = """examples:
  rda evaluate runs/a book.txt                  contexts as long as in training
  rda evaluate runs/a book.txt --context 0      the text is one context
  rda evaluate runs/a book.txt --ranks 2        two processes share each context
  xz -dc corpus.xz | rda evaluate runs/a -      from a pipe
  rda evaluate runs/a genome.fa.gz --picture bits.png           draw a picture

The text is cut into contexts. The first byte of a context is not predicted. If more context helps, bits per byte fall
from row to row. FASTA, known by its name (as .fa), is read as the run read it; on stdin it is text.

A forward takes 64 bytes times the context times --embed-dim. If that is at most a quarter of this machine's memory, a
context goes through one forward, and short contexts in batches. Otherwise, and with --chunk, the model reads through
caches: their memory grows neither with the text nor with the context. After Ctrl-C the command shows what it has
measured, and the exit code is 130.
"""
MAKER = "rda evaluate --picture"
DEFAULT_CHUNK = 4096
BYTES_PER_NUMBER = 64  # of memory in a forward, for each position and entry of --embed-dim: 16 float32 numbers
SECONDS, JOIN_SECONDS = 20 * 86_400, 120  # the longest evaluation on several ranks, and how long they take to meet
# The score of one rank, or of all; the text with what was read so far; the peak of resident bytes.
Measured = tuple["Score", Text, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_folder", type=Path, metavar="RUN", help="the folder of a run of rda train")
    add("file", metavar="FILE", help="of any size, also packed by gzip, bzip2 or xz; - is stdin")
    add("--context", type=count, metavar="N", help="bytes of a context, 0: without end (default: as in training)")
    add("--max-bytes", type=count, default=LARGEST, metavar="N", help="stop after so many bytes (default: at the end)")
    add("--ranks", type=count, default=1, metavar="P", help="processes that share each context (default 1)")
    add("--chunk", type=count, metavar="N", help="read N bytes at a time through caches (default: 4096 if needed)")
    add("--picture", type=Path, metavar="FILE", help="draw bits per byte by position, as PNG")
    add("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    record = evaluate(arguments)
    print(json.dumps(record) if arguments.json else report(record))
    return INTERRUPTED_EXIT_CODE if record["interrupted"] else 0


def evaluate(arguments: argparse.Namespace) -> dict:
    context, chunk, hyperparameters = resolved(arguments)
    if arguments.picture is not None:
        check_installed(["matplotlib"], "train", "--picture ")
        check_writable("--picture", arguments.picture.parent, arguments.picture.name)
        check_mine(arguments.picture, is_our_picture, MAKER)
    text = Text(arguments.file, hyperparameters, arguments.max_bytes)
    scores_of = partial(scores, arguments.run_folder, text, context, chunk)
    (total, text, peak), is_whole = measure(scores_of, text, arguments.ranks)
    if not (buckets := total.buckets()):
        if not is_whole:
            raise KeyboardInterrupt
        raise ValueError(f"{arguments.file} has fewer than 2 bytes: each is predicted from those before it")
    if arguments.picture is not None:
        picture = draw_buckets(buckets, total.mean(), f"{arguments.file}, contexts of {shown(context)}")
        write_whole(arguments.picture, picture, is_our_picture, MAKER)
    return {
        "file": arguments.file,
        "read": str(text),
        "context": context,
        "interrupted": not is_whole,
        "bits_per_byte": total.mean(),
        "num_bytes": sum(total.counts),
        "by_bytes_before": buckets,
        "peak_resident_bytes": peak,
    }


def resolved(arguments: argparse.Namespace) -> tuple[int | None, int | None, dict]:
    """The context, the chunk if caches are needed, and the run's hyperparameters. A ValueError refuses bad options."""
    saved, context, chunk = hyperparameters_of(arguments.run_folder), arguments.context, arguments.chunk
    p = arguments.ranks
    check_at_least("--chunk", chunk)
    check_at_least("--max-bytes", arguments.max_bytes, least=2)
    check_at_least("--ranks", p)
    if context is not None and context != 0 and context < 2:
        rule = "2 or more, or 0 for one that never ends: the first byte of a context is not predicted"
        raise ValueError(f"--context {context} must be {rule}")
    context = (saved["seq_len"] if context is None else context) or None
    if context is None or BYTES_PER_NUMBER * context * saved["embed_dim"] > physical_bytes() / 4:
        chunk = DEFAULT_CHUNK if chunk is None else chunk
    if p > 1 and chunk is not None:
        why = f"contexts of {shown(context)} are read through caches, by one process"
        raise ValueError(f"--ranks {p}, but {why}: leave it out, or give a shorter --context and no --chunk")
    if p > 1 and (arguments.file == STDIN or not stat.S_ISREG(os.stat(arguments.file).st_mode)):
        raise ValueError(f"--ranks {p}: each rank reads {arguments.file}, which must be a file, and no pipe")
    check_ranks_fit(p, context or p, "--context")
    return context, chunk, saved


def measure(scores_of: Callable[..., Iterator[Measured]], text: Text, num_ranks: int) -> tuple[Measured, bool]:
    """What was measured, and whether that is all: Ctrl-C may have ended it."""
    with leaving_at_once("rda evaluate"):
        from ..training.scoring import Score

    total, peak, path, is_whole = Score(), 0, Path(text.name), False
    is_plain = path.is_file() and not PACKED.search(text.name.lower())
    size = min(path.stat().st_size if is_plain else LARGEST, text.most)
    with progress_bar(None if size == LARGEST else size, "B", delay=1) as bar, suppress(KeyboardInterrupt):

        def add(rank: int, told: Measured) -> None:
            nonlocal total, text, peak
            scored, text, resident = told
            total, peak = total.plus(scored), max(peak, resident)
            bar.update(scored.num_read * (rank == 0))

        if num_ranks > 1:
            launch = Launch(num_ranks, share_of_cores(num_ranks), seconds=SECONDS, join_seconds=JOIN_SECONDS)
            try:
                run_ranks(launch, _on_rank, scores_of, on_report=add)
            except RankFailedError as error:  # the last line is the error: most often a refusal of the text
                raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from error
        else:
            for told in scores_of():
                add(0, told)
        is_whole = True
    return (total, text, peak), is_whole


def scores(
    run_folder: Path, text: Text, context: int | None, chunk: int | None, *, is_rank: bool = False
) -> Iterator[Measured]:
    """What is measured, score by score, and what has been read until then."""
    with leaving_at_once("rda evaluate"):
        from ..models.longnet import LongNetLM
        from ..ranks.context import ContextParallel
        from ..training.scoring import score

    model = LongNetLM.from_run(run_folder, parallel=ContextParallel() if is_rank else None)
    with opened(text.name) as file:
        for scored in score(model, text.blocks(file), context, chunk):
            yield scored, text, peak_resident_bytes()


def _on_rank(worker: Worker, scores_of: Callable[..., Iterator[Measured]]) -> None:
    for told in scores_of(is_rank=True):
        worker.report(told)


def shown(context: int | None) -> str:
    return "any length" if context is None else f"{context:,} bytes"


def report(record: dict) -> str:
    buckets = record["by_bytes_before"]
    bits = [bucket["bits_per_byte"] for bucket in buckets]
    least, height = min(bits), max(bits) - min(bits) or 1
    rows = []
    for bucket in buckets:
        before = " to ".join(f"{edge:,}" for edge in sorted({bucket["first"], bucket["last"]}))
        bar = "#" * round(30 * (bucket["bits_per_byte"] - least) / height)
        rows.append((before, f"{bucket['num_bytes']:,}", f"{bucket['bits_per_byte']:.3f}", bar.ljust(30)))
    headers = ("bytes before", "bytes", "bits per byte", f"above {least:.3f}".ljust(30))
    stopped = "interrupted: " if record["interrupted"] else ""
    return wrapped(
        f"{record['read']}\n{aligned(headers, rows)}\n{stopped}{record['bits_per_byte']:.3f} bits per byte over "
        f"{record['num_bytes']:,} bytes, in contexts of {shown(record['context'])}; peak resident "
        f"{record['peak_resident_bytes'] / 1e6:,.0f} MB"
    )
