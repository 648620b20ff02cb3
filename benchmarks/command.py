"""`python -m benchmarks`: run cases, write their records, make the pages."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from types import ModuleType
from typing import Any

from ring_dilated_attention.training.files import check_mine, in_words

from . import (
    crossover,
    error,
    first,
    flops,
    host,
    linear,
    main_job,
    parts,
    peers,
    ranks,
    scaling,
    token,
)
from .gate import GateError
from .gpu import command as gpu
from .multi_gpu import command as multi_gpu
from .progress import stepper
from .record import (
    for_terminal,
    is_record,
    make_record,
    page_of,
    retired_names,
    write_page,
    write_record,
)

# Each case is a module with a SUMMARY, the MINUTES that it takes, and two settings, FULL and QUICK. Its
# `run(settings, step)` returns the rows of the record, and its `table(rows)` makes text of them.
CASES: dict[str, ModuleType] = {
    "flops": flops,
    "linear": linear,
    "crossover": crossover,
    "ranks": ranks,
    "scaling": scaling,
    "error": error,
    "token": token,
    "first": first,
    "host": host,
    "main_job": main_job,
    "peers": peers,
}
# The function that makes a table of a record's rows, by the name of the case.
TABLES = {name: case.table for name, case in CASES.items()}
TABLES |= {"gpu": parts.table, "multi_gpu": parts.table}
RESULTS = Path(__file__).with_name("results")
NAME = "python -m benchmarks"
HELP = """\
cases, and how many minutes each takes on two quiet cores, or on an H100
(gpu and multi_gpu have options of their own: --help says more):
{}

examples:
  python -m benchmarks flops            one case; its record goes to
                                        benchmarks/results/flops.json
  python -m benchmarks --all            all cases but gpu and multi_gpu
  python -m benchmarks --all --quick    tiny sizes, in two minutes, to see that
                                        they run; writes nothing
  python -m benchmarks --page --html docs/evidence.html \\
                       --reports docs/reports.md
                                        all pages from the records; runs nothing

The gate: no row is timed before the same call, at a small size, agreed with the
definition in float64. Leave the machine alone while a case runs. Exit codes: 0
done, 1 a gate failed, 2 refused, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["gpu"]:
            return gpu.main(words[1:])
        if words[:1] == ["multi_gpu"]:
            return multi_gpu.main(words[1:])
        return run(parsed(words))
    except KeyboardInterrupt:
        print(f"\n{NAME}: interrupted", file=sys.stderr)
        return 130
    except GateError as failure:
        print(failure, file=sys.stderr)
        return 1
    except ValueError as failure:  # a case cannot be run, or a file not be written
        print(failure, file=sys.stderr)
        return 2
    except OSError as failure:
        print(f"{NAME}: {in_words(failure)}", file=sys.stderr)
        return 2


def parsed(words: Sequence[str]) -> argparse.Namespace:
    minutes = {name: (case.MINUTES, case.SUMMARY) for name, case in CASES.items()}
    minutes |= {
        "gpu": (9, gpu.SUMMARY),
        "multi_gpu": (10, multi_gpu.SUMMARY),
    }
    lines = []
    for name, (number, summary) in minutes.items():
        line = f"  {name:<11} {number:>3}  {summary}"
        lines.append(fill(line, 80, subsequent_indent=" " * 19))
    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Measure speed, memory, scaling and errors, each behind a correctness gate.",
        epilog=HELP.format("\n".join(lines)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="which cases to run")
    parser.add_argument("--all", action="store_true", help="run every case that can run here")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes; writes nothing unless --results is given"
    )
    parser.add_argument(
        "--page", action="store_true", help="make benchmarks/README.md from the records"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="make docs/evidence.html, the page of pictures"
    )
    parser.add_argument(
        "--reports",
        type=Path,
        metavar="FILE",
        help="make docs/reports.md, the answer to the reports",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="where records are; the page is beside it (default: in the clone)",
    )
    return parser.parse_args(words)


def run(arguments: argparse.Namespace) -> int:
    names = list(CASES) if arguments.all else arguments.cases
    folder = arguments.results or RESULTS
    is_kept = arguments.results is not None or not arguments.quick
    check(arguments, names, folder, is_kept=is_kept)
    for name in names:
        case = CASES[name]
        rows = run_case(name, is_quick=arguments.quick)
        print(f"{name}: {for_terminal(case.table(rows))}\n")
        if is_kept:
            record = make_record(name, rows, is_quick=arguments.quick)
            print(f"record: {write_record(record, folder)}")
    if arguments.page or (names and is_kept):
        print(f"page: {write_page(folder, TABLES)}")
    if arguments.html:
        from .pages.evidence import write_evidence

        print(f"page: {write_evidence(arguments.html, folder, TABLES)}")
    if arguments.reports:
        from .pages.reports import write_reports

        print(f"page: {write_reports(arguments.reports, folder)}")
    return 0


def check(
    arguments: argparse.Namespace, names: Sequence[str], folder: Path, *, is_kept: bool
) -> None:
    """Raise ValueError, before anything is measured, if a case cannot be run, or a record or page not be written."""
    for name in names:
        if name not in CASES:
            raise ValueError(f"unknown case {name!r}; choose from {', '.join(CASES)}")
    options = {"--page": arguments.page, "--html": arguments.html, "--reports": arguments.reports}
    pages = [option for option, value in options.items() if value]
    if not names and not pages:
        raise ValueError(
            f"name a case ({', '.join(CASES)}), or --all, or --page; {NAME} --help says more"
        )
    if names and pages:
        raise ValueError(
            f"{pages[0]} only makes a page from the records; leave out {pages[0]}, or make it after the cases"
        )
    if arguments.html and find_spec("matplotlib") is None:
        raise ValueError("--html needs matplotlib: pip install matplotlib")
    if is_kept or pages:
        page_of(folder)
    names_of_records = [
        name for name in TABLES if (folder / f"{name}.json").exists()
    ] + retired_names(folder)
    if pages and not names_of_records:
        raise ValueError(
            f"--page: there are no records in {folder}. Name the folder that holds them with --results, or run a case."
        )
    if names and is_kept:
        check_can_hold(folder)
        for name in names:
            check_mine(folder / f"{name}.json", is_record, NAME)


def check_can_hold(folder: Path) -> None:
    """Raise ValueError unless new files can be written to the folder. If it does not exist, its parents are checked."""
    for path in (folder, *folder.parents):
        if path.exists():
            break
    why = "" if path.is_dir() else "a file is in the way"
    if not os.access(path, os.W_OK):
        why = "permission denied"
    if why:
        raise ValueError(f"--results {folder} cannot be written: {why}. Choose another place.")


def run_case(name: str, *, is_quick: bool) -> list[dict[str, Any]]:
    case = CASES[name]
    try:
        return case.run(case.QUICK if is_quick else case.FULL, stepper(name))
    except GateError as failure:
        raise GateError(f"{name}: {failure}") from failure
