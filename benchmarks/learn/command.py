"""`python -m benchmarks learn`: run the studies, a row at a time, and go on where an earlier start ended."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from ring_dilated_attention.commands.output import check_writable, progress_bar
from ring_dilated_attention.training.files import check_mine

from .. import progress
from ..record import for_terminal, is_record, page_of
from . import borders, influence, recall, text
from .kept import is_done, keep, record_name, rows_of
from .pictures import draw

STUDIES: dict[str, ModuleType] = {"influence": influence, "recall": recall, "text": text, "borders": borders}
TABLES = {record_name(name): module.table for name, module in STUDIES.items()}
EXAMPLES = f"""studies:
{chr(10).join(f"  {name:<10} {module.SUMMARY}" for name, module in STUDIES.items())}

examples:
  python -m benchmarks learn                          all studies, one after the other
  python -m benchmarks learn text --only "240 s"      the runs whose names hold these letters
  python -m benchmarks learn text --list              the runs of a study, and which are done
  python -m benchmarks learn --pictures docs          draw what the records say; runs nothing
  python -m benchmarks learn --quick                  tiny sizes; writes nothing unless --results is given

Each run is a row, written when it is done. A second start leaves out the rows that the same settings made, so Ctrl-C
loses the run at hand. Studies can run at the same time. `python -m benchmarks --page` makes the page again.
"""


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks learn",
        description="Measure what a dilated pattern learns, beside a local one and dense attention.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)} (default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only runs whose names hold this text")
    parser.add_argument("--list", action="store_true", help="show the runs, and which are done")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="only draw the records' pictures into this folder")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; writes nothing unless --results is given")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where records go (default: those of the clone)")
    return parser.parse_args(argv)


def run(argv: Sequence[str], results: Path, write_page: Callable[[Path], Path]) -> int:
    arguments = parsed(argv)
    studies = arguments.studies or list(STUDIES)
    unknown = [name for name in studies if name not in STUDIES]
    if unknown:
        print(f"unknown study {unknown[0]!r}; choose from {', '.join(STUDIES)}", file=sys.stderr)
        return 2
    folder = arguments.results or results
    is_kept = arguments.results is not None or not arguments.quick
    if arguments.pictures is not None:
        check_writable("--pictures", arguments.pictures)
        print(*draw(folder, arguments.pictures), sep="\n")
        return 0
    try:
        page_of(folder)
        if is_kept and not arguments.list:
            check_writable("--results", folder)
        for name in studies:
            check_mine(folder / f"{record_name(name)}.json", is_record, "python -m benchmarks")
        for name in studies:
            run_study(name, folder if is_kept else None, arguments)
        if is_kept and not arguments.list:
            print(f"page: {write_page(folder)}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run_study(name: str, folder: Path | None, arguments: argparse.Namespace) -> None:
    """The runs of a study that are not done. Without a folder, nothing is written."""
    study = STUDIES[name]
    order = study.runs(study.QUICK if arguments.quick else study.FULL)
    rows = rows_of(folder, name) if folder is not None else []
    chosen = [run for run in order if arguments.only in run.name]
    if arguments.list:
        print("\n".join(f"{name}: {run.name}: {'done' if is_done(run, rows) else 'to come'}" for run in chosen))
        return
    with progress_bar(len(chosen), "run") as bar:
        step = progress.stepper(bar)
        for run in chosen:
            step(f"{name}: {run.name}")
            if folder is None:
                rows.append({"name": run.name, "settings": run.settings, **run.make()})
            elif not is_done(run, rows_of(folder, name)):
                keep(run.make(), run, folder, name, order, is_quick=arguments.quick)
    rows = rows_of(folder, name) if folder is not None else rows
    if rows:
        print(f"{name}: {for_terminal(study.table(rows))}\n")
