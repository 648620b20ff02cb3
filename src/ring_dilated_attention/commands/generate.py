"""`rda generate`: streams the text that a trained model writes."""

import argparse
import codecs
import io
import json
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..models.saved_run import newest_checkpoint, read_state
from ..training.data import read_files
from .arguments import check_at_least, check_installed, count
from .terminal import leaving_at_once, say

if TYPE_CHECKING:
    from ..models.longnet import LongNetLM

EXAMPLES = """examples:
  rda generate runs/a --prompt 'def ' --tokens 400
  rda generate runs/a --prompt-file story.txt --temperature 0.8
  rda generate runs/a --prompt 'def ' --temperature 0   the likeliest byte

The text goes to stdout while the model writes it. The seconds and the memory of the caches, which does not grow with
the text, go to stderr. Exit codes: 0 done, 2 refused, 130 interrupted.
"""
# Characters that move the cursor or change the colours of a terminal. A byte-level model may write any of them.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_folder", type=Path, metavar="RUN", help="the folder of a run of rda train")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what comes before")
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="the same, from a file of any length; - is stdin"
    )
    add("--tokens", type=count, default=400, metavar="N", help="bytes to write (default 400)")
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="0: the likeliest byte (default 1)",
    )
    add("--seed", type=int, metavar="N", help="to write the same again (default: anew each time)")
    add(
        "--json", action="store_true", help="print a record when all is written, and nothing before"
    )


def run(arguments: argparse.Namespace) -> int:
    hyperparameters_of(arguments.run_folder)  # refuses a folder without a run
    check_at_least("--tokens", arguments.tokens)
    check_at_least("--seed", arguments.seed, least=0)
    option, prompt = "--prompt", os.fsencode(arguments.prompt or "")
    if (file := arguments.prompt_file) is not None:  # FASTA without its headers, as in training
        option, prompt = f"--prompt-file {file}", read_files([Path(file)])[0]
    if not prompt:
        raise ValueError(
            f"{option} is empty: the model goes on from one byte or more, so give it some text"
        )
    with leaving_at_once("rda generate"):
        from ..models.longnet import LongNetLM
        from ..models.sampling import Sampling

    # refuses bad numbers before a model is read
    Sampling(arguments.temperature)
    record = write(LongNetLM.from_run(arguments.run_folder), prompt, arguments)
    if arguments.json:
        print(json.dumps(record))
    else:
        say(summary(record))
    return 130 if record["interrupted"] else 0


def hyperparameters_of(folder: Path) -> dict[str, Any]:
    """The hyperparameters of a run. Raises ValueError if it has no checkpoint. Imports no torch."""
    check_installed(["safetensors"], "train")
    return dict(read_state(newest_checkpoint(folder))["hyperparameters"])


def write(model: "LongNetLM", prompt: bytes, arguments: argparse.Namespace) -> dict[str, Any]:
    """Stream to stdout, unless --json is given. Returns a record of what was written, also after Ctrl-C."""
    caches = model.make_caches(1, max_len=len(prompt) + arguments.tokens)
    steps = model.generate(
        [list(prompt)],
        arguments.tokens,
        caches=caches,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    out, written = TextOutput(io.StringIO() if arguments.json else sys.stdout), bytearray()
    began = time.perf_counter()
    with suppress(KeyboardInterrupt):
        for tokens in steps:
            written.append(int(tokens[0]))
            out.write(bytes(written[-1:]))
    out.close()
    return {
        "prompt_bytes": len(prompt),
        "tokens": list(written),
        "text": written.decode(errors="replace"),
        "seconds": time.perf_counter() - began,
        "cache_bytes": sum(cache.num_bytes for cache in caches),
        "interrupted": len(written) < arguments.tokens,
    }


class TextOutput:
    """A UTF-8 stream of whole characters. Other bytes become U+FFFD, and so do control characters on a terminal."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.is_terminal = file, file.isatty()
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.ends_line = True

    def write(self, some: bytes, final: bool = False) -> None:
        text = self.decoder.decode(some, final)
        if self.is_terminal:
            text = CONTROL.sub("\ufffd", text)
        if text:
            self.ends_line = text.endswith("\n")
            self.file.write(text)
            self.file.flush()

    def close(self) -> None:
        self.write(b"", final=True)
        if self.is_terminal and not self.ends_line:
            self.file.write("\n")
        self.file.flush()


def summary(record: dict[str, Any]) -> str:
    text = f"{len(record['tokens']):,} tokens"
    if record["interrupted"]:
        text = f"interrupted after {text}"
    return f"{text} in {record['seconds']:.2f} s; caches of {record['cache_bytes']:,} bytes"
