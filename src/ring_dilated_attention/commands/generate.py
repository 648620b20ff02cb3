"""`rda generate`: streams the text that a trained model writes."""

import codecs
import os
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path

from ..training.data import read_file
from .arguments import positive, within
from .terminal import INTERRUPTED_EXIT_CODE, leaving_at_once, say

EXAMPLES = """examples:
  rda generate runs/a --prompt 'def ' --tokens 400
  rda generate runs/a --prompt-file story.txt --temperature 0.8
  rda generate runs/a --prompt 'def ' --temperature 0   the likeliest byte

The text goes to stdout while the model writes it. The seconds and the memory of
the caches, which does not grow with the text, go to stderr. Exit codes: 0 done,
2 refused, 130 interrupted.
"""
# Characters that move the cursor or change the colours of a terminal. A byte-level model may write any of them.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("run_folder", type=Path, metavar="RUN", help="the folder of a run of rda train")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what comes before")
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="the same, from a file of any length; - is stdin"
    )
    add("--tokens", type=positive, default=400, metavar="N", help="bytes to write (default 400)")
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="0: the likeliest byte (default 1)",
    )
    add(
        "--seed",
        type=within(0),
        metavar="N",
        help="to write the same again (default: anew each time)",
    )


def run(arguments: Namespace) -> int:
    """Stream to stdout what the model writes. Then say on stderr how long that took, also after Ctrl-C."""
    if arguments.prompt_file is None:
        prompt = os.fsencode(arguments.prompt)
    else:
        prompt = read_file(arguments.prompt_file)
    if not prompt:
        raise ValueError("the prompt is empty: the model goes on from one byte or more")
    with leaving_at_once("rda generate"):
        from ..models.longnet import LongNetLM

    model = LongNetLM.from_run(arguments.run_folder)
    caches = model.make_caches(1, max_len=len(prompt) + arguments.tokens)
    steps = model.generate(
        [list(prompt)],
        arguments.tokens,
        caches=caches,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    num_written = 0
    began = time.perf_counter()
    with suppress(KeyboardInterrupt):
        for tokens in steps:
            show(decoder.decode(bytes([int(tokens[0])])))
            num_written += 1
    show(decoder.decode(b"", final=True))
    seconds = time.perf_counter() - began
    num_bytes = sum(cache.num_bytes for cache in caches)
    say(f"\n{num_written:,} tokens in {seconds:.2f} s; caches of {num_bytes:,} bytes")
    if num_written < arguments.tokens:
        say("interrupted")
        return INTERRUPTED_EXIT_CODE
    return 0


def show(text: str) -> None:
    """Write text to stdout, and flush it. On a terminal, control characters are written as U+FFFD."""
    if sys.stdout.isatty():
        text = CONTROL.sub("\ufffd", text)
    print(text, end="", flush=True)
