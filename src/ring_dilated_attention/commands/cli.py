"""The command `rda`: it imports and runs the module of the subcommand that the user asks for. Modules of other
subcommands are not imported.

A subcommand's module has `EXAMPLES` (the last lines of the subcommand's --help), `add_arguments(parser)` and
`run(arguments) -> exit code`. The text of a ValueError that `run` raises is shown to the user. `arguments.argv` holds
the words after the subcommand, so that `run` can start other processes with these words.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

from .. import __version__
from .arguments import check_installed
from .terminal import guarded, leaving_at_once, say


class Subcommand(NamedTuple):
    module: str
    summary: str
    extra: str = "commands"  # the pip extra with the packages that the subcommand needs


SUBCOMMANDS = {
    "train": Subcommand(".train", "train a byte-level LongNet on one long document", "train"),
    "embed": Subcommand(
        ".embed.embed",
        "embed slides by GigaPath's published weights, from files of tile features",
        "slides",
    ),
    "generate": Subcommand(".generate", "write on from a prompt with the model of a run", "train"),
    "evaluate": Subcommand(
        ".evaluate", "measure bits per byte of any text, in contexts of any length", "train"
    ),
    "check": Subcommand(
        ".check", "compare every backend and exchange on this machine with the definition"
    ),
    "plan": Subcommand(
        ".plan.one_call", "show what each rank would compute, send and hold in one attention call"
    ),
    "plan model": Subcommand(
        ".plan.model", "rank all meshes of some GPUs for the training of a model"
    ),
    "doctor": Subcommand(
        ".doctor.doctor",
        "show the versions, interfaces and rates of this machine or cluster",
    ),
    "suggest": Subcommand(
        ".suggest", "suggest patterns for a length and a budget, and explain them"
    ),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise a ValueError, which `run` shows as one line. argparse's own method prints the usage and exits."""
        raise ValueError(message)


def main(argv: Sequence[str] | None = None) -> int:
    arguments, asked = split_off(list(sys.argv[1:] if argv is None else argv))
    command = f"rda {asked}" if asked in SUBCOMMANDS else "rda"
    return guarded(command, lambda: run(arguments, asked, command), is_process=argv is None)


def split_off(arguments: list[str]) -> tuple[list[str], str]:
    """Returns the arguments, and the subcommand that they begin with ("" without arguments).

    argparse takes only one argument as a subcommand, so the two words of "plan model" are joined to one argument.
    """
    both = " ".join(arguments[:2])
    if both in SUBCOMMANDS:
        return [both, *arguments[2:]], both
    return arguments, "".join(arguments[:1])


def run(arguments: list[str], asked: str, command: str) -> int:
    parser = Parser(
        prog="rda",
        description="Exact dilated attention on one device or many.",
        epilog="Each command explains itself: rda train --help",
    )
    parser.add_argument("--version", action="version", version=f"rda {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, subcommand in SUBCOMMANDS.items():
        summary = subcommand.summary
        subparser = subparsers.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == asked:
            with leaving_at_once(command):
                chosen = import_module(subcommand.module, __package__)
            chosen.add_arguments(subparser)
            subparser.epilog = chosen.EXAMPLES
    try:
        for word in arguments:
            # Refuse --option=--, because argparse would take it for an option without values.
            if word.startswith("--") and word.endswith("=--"):
                parser.error(f"{word}: -- is no value")
        parsed = parser.parse_args(arguments)
        parsed.argv = arguments[1:]
        check_installed(["rich"], SUBCOMMANDS[asked].extra)
        return int(chosen.run(parsed))
    except ValueError as error:  # show the text of the error, without a traceback
        say(f"{command}: {error}")
        return 2
