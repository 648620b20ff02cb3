"""`python -m benchmarks`: run cases, write their records, make the page."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.commands.output import check_writable, progress_bar
from ring_dilated_attention.commands.terminal import guarded
from ring_dilated_attention.training.files import check_mine

from . import (
    before,
    billion,
    crossover,
    deep,
    device,
    documents,
    error,
    evaluate,
    flops,
    generation,
    gpu,
    gpu_memory,
    gpu_small,
    handshake,
    hosts,
    linear,
    memory,
    million,
    model_memory,
    multi_gpu,
    overlap,
    packing,
    parameters,
    peers,
    planned_counts,
    planned_time,
    planning,
    prefill,
    progress,
    ranks,
    reports,
    scaling,
    sent,
    sharded,
    slides,
    soak,
    token,
    torch_ring,
    transformers_loss,
)
from .gate import GateError
from .learn import command as learn
from .record import Record, for_terminal, is_record, make_record, page_of, write_page, write_record

CASES: dict[str, ModuleType] = {
    "flops": flops,
    "linear": linear,
    "memory": memory,
    "scaling": scaling,
    "ranks": ranks,
    "sent": sent,
    "handshake": handshake,
    "overlap": overlap,
    "hosts": hosts,
    "documents": documents,
    "error": error,
    "torch_ring": torch_ring,
    "peers": peers,
    "million": million,
    "billion": billion,
    "crossover": crossover,
    "packing": packing,
    "model_memory": model_memory,
    "deep": deep,
    "sharded": sharded,
    "transformers_loss": transformers_loss,
    "parameters": parameters,
    "planned_time": planned_time,
    "planned_counts": planned_counts,
    "planning": planning,
    "slides": slides,
    "generation": generation,
    "token": token,
    "prefill": prefill,
    "evaluate": evaluate,
    "reports": reports,
    "soak": soak,
    "gpu": gpu,
    "gpu_memory": gpu_memory,
    "gpu_small": gpu_small,
}
# What makes the table of each record.
TABLES = {name: module.table for name, module in CASES.items()} | learn.TABLES
TABLES |= {"before": before.table, "multi_gpu": multi_gpu.table}
RESULTS = Path(__file__).with_name("results")

EXAMPLES = f"""cases:
{chr(10).join(f"  {name:<17} {module.SUMMARY}" for name, module in CASES.items())}

examples:
  python -m benchmarks flops            one case; its record goes to benchmarks/results/flops.json
  python -m benchmarks --all            all that can run here, one by one (more than half an hour on two cores)
  python -m benchmarks --all --quick    tiny sizes, to see that they run; writes nothing. A CPU stands in for a GPU
  python -m benchmarks --page --html docs/evidence.html --reports docs/reports.md
                                        make all pages from the records again
  python -m benchmarks learn            what dilated patterns learn, in runs of up to an hour; --help says more
  python -m benchmarks multi_gpu        {multi_gpu.SUMMARY}; ten minutes

Leave the machine alone while a case runs. No row is timed before the same call passed against the definition in
float64 at a small size. Exit codes: 0 done, 1 a gate failed, 2 refused.
"""


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv

    def work() -> int:
        if given[:1] == ["learn"]:
            return learn.run(given[1:], RESULTS, lambda folder: write_page(folder, TABLES))
        if given[:1] == ["multi_gpu"]:
            return multi_gpu.main(given[1:])
        return run(parsed(given))

    return guarded("python -m benchmarks", work, is_process=argv is None)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure speed, memory and scaling, each behind a correctness gate.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="which cases to run")
    parser.add_argument("--all", action="store_true", help="run every case that can run here")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; writes nothing unless --results is given")
    parser.add_argument("--page", action="store_true", help="make benchmarks/README.md from the records")
    parser.add_argument("--html", type=Path, metavar="FILE", help="make docs/evidence.html, the page of pictures")
    parser.add_argument("--reports", type=Path, metavar="FILE", help="make docs/reports.md, the answer to the reports")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="where records go; the page goes beside it (default: those of the clone)",
    )
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> int:
    names = list(CASES) if arguments.all else arguments.cases
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"unknown case {unknown[0]!r}; choose from {', '.join(CASES)}", file=sys.stderr)
        return 2
    asked = {"--page": arguments.page, "--html": arguments.html, "--reports": arguments.reports}
    pages = [flag for flag, value in asked.items() if value]
    if not names and not pages:
        print(
            f"name a case ({', '.join(CASES)}), or --all, or --page; python -m benchmarks --help says more",
            file=sys.stderr,
        )
        return 2
    folder = arguments.results or RESULTS
    is_kept = arguments.results is not None or not arguments.quick
    try:
        if names and pages:
            raise ValueError(
                f"{pages[0]} only makes a page from the records; leave out {pages[0]}, or make it after the cases"
            )
        if arguments.html and find_spec("matplotlib") is None:
            raise ValueError("--html needs matplotlib: pip install matplotlib")
        if is_kept or pages:
            check_folder(folder, names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    against = {name: why_not(CASES[name], is_quick=arguments.quick) for name in names}
    for name, reason in against.items():
        if reason and arguments.all:
            print(f"{name}: skipped, it {reason}\n")
        elif reason:
            print(f"{name} {reason}", file=sys.stderr)
            return 2
    for name in [name for name in names if not against[name]]:
        try:
            rows = run_case(CASES[name], is_quick=arguments.quick)
        except GateError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {for_terminal(CASES[name].table(rows))}\n")
        if is_kept:
            print(f"record: {write_record(record_of(name, rows, is_quick=arguments.quick), folder)}")
    try:
        if (names and is_kept) or arguments.page:
            print(f"page: {write_page(folder, TABLES)}")
        write_others(arguments, folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def write_others(arguments: argparse.Namespace, folder: Path) -> None:
    """The pages that are asked for by name. Their pictures need matplotlib, which no case does."""
    if arguments.html:
        from .pages.evidence import write_evidence

        print(f"page: {write_evidence(arguments.html, folder, TABLES)}")
    if arguments.reports:
        from .pages.reports import write_reports

        print(f"page: {write_reports(arguments.reports, folder)}")


def check_folder(folder: Path, names: Sequence[str]) -> None:
    """Raise ValueError, before anything is measured, unless the records of these cases and the page can be written."""
    page_of(folder)
    if not names and not any((folder / f"{name}.json").exists() for name in TABLES):
        raise ValueError(
            f"--page: there are no records in {folder}. Name the folder that holds them with --results, or run a case."
        )
    if names:
        check_writable("--results", folder)
    for name in names:
        check_mine(folder / f"{name}.json", is_record, "python -m benchmarks")


def why_not(case: ModuleType, *, is_quick: bool) -> str | None:
    """The reason why a case cannot run here, or None. Quick, a CPU stands in for the GPU."""
    if hasattr(case, "why_not"):
        return case.why_not()
    return device.why_not() if needs_gpu(case) and not is_quick else None


def needs_gpu(case: ModuleType) -> bool:
    return getattr(case, "NEEDS_GPU", False)


def record_of(name: str, rows: list[dict], *, is_quick: bool) -> Record:
    """The GPU is asked in a process of its own: asking takes some of its memory for as long as a process lives."""
    found = None
    if needs_gpu(CASES[name]) and device.why_not() is None:
        [found] = run_ranks(Launch(1), _describe_gpu)
    return make_record(name, rows, is_quick=is_quick, gpu=found)


def _describe_gpu(worker: Worker) -> dict[str, Any]:
    return device.describe()


def run_case(case: ModuleType, *, is_quick: bool) -> list[dict]:
    settings = case.QUICK if is_quick else case.FULL
    with progress_bar(case.num_steps(settings), "call") as bar:
        return case.run(settings, progress.stepper(bar))
