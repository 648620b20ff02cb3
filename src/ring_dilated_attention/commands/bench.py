"""`rda bench`: says how the benchmarks are run. They measure the library from a clone and are not installed with it."""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs=argparse.REMAINDER, metavar="CASE", help="what to measure")


def run(arguments: argparse.Namespace) -> int:
    command = " ".join(["python -m benchmarks", *(arguments.cases or ["CASE"])])
    print(f"The benchmarks run from a clone of the repository: {command}", file=sys.stderr)
    return 2
