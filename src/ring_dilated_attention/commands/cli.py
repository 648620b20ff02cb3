"""`rda`: one command, a module per subcommand, imported only when it is the one asked for.

A subcommand's module has `add_arguments(parser)` and `run(arguments) -> exit code`. `arguments.argv` is what stood
after the subcommand, for those that start other processes with it.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple


class Subcommand(NamedTuple):
    module: str
    summary: str


SUBCOMMANDS = {
    "train": Subcommand(".train", "train a byte-level LongNet on one long document"),
    "embed": Subcommand(".embed", "embed slides by GigaPath's published weights, from files of tile features"),
    "check": Subcommand(".check", "compare every backend and exchange on this machine with the definition"),
    "bench": Subcommand(".bench", "say how the benchmarks are run: from a clone"),
    "plan": Subcommand(".plan", "show what each rank would compute, send and hold"),
    "suggest": Subcommand(".suggest", "suggest patterns for a length and a budget, and explain them"),
    "slice": Subcommand(".slice.command", "run and verify one rank's share of a job that no machine holds"),
}


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            return run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, where it can be caught, and not at exit
    except BrokenPipeError:  # whoever reads the output has enough of it, as in `rda plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest, which is flushed at exit
        return 141  # as a shell reports SIGPIPE


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rda",
        description="Exact dilated attention on one device or many.",
        epilog="Each command explains itself: rda train --help",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = None
    for name, subcommand in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=subcommand.summary,
            description=subcommand.summary[0].upper() + subcommand.summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if arguments[:1] == [name]:
            chosen = import_module(subcommand.module, __package__)
            chosen.add_arguments(subparser)
    parsed = parser.parse_args(arguments)
    parsed.argv = arguments[1:]
    assert chosen is not None
    try:
        return int(chosen.run(parsed))
    except KeyboardInterrupt:
        print(f"\nrda {parsed.command}: interrupted", file=sys.stderr)
        return 130  # as a shell reports SIGINT


if __name__ == "__main__":
    sys.exit(main())
