"""`make mutants`: break the source on purpose, one idea at a time, and print which tests notice.

    python -m tests.mutants                     all mutants
    python -m tests.mutants windows core        those of two files
    python -m tests.mutants --only run/ --json  those with this text in file or idea, for scripts
    python -m tests.mutants --record tests/mutants/noticed.json
    python -m tests.mutants --record tests/mutants/noticed.json --missing

A mutant is run on a copy of the source, against the tests that it names, until enough cases have failed: two in the
core, one elsewhere. Two mutants run at a time, each on a copy of its own.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from tests.kept_record import add_record, kept_record

from . import apps, core, drawn, quick, windows
from .mutant import TRITON, Mutant

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "src/ring_dilated_attention"
GROUPS = {
    "windows": windows.MUTANTS,
    "drawn": drawn.MUTANTS,
    "core": core.MUTANTS,
    "apps": apps.MUTANTS,
}
# Tests that have not ended by then wait for what will not come. The slowest need a minute on a quiet machine.
MOST_SECONDS = 600
Row = dict[str, Any]
Key = tuple[str, str]  # the file and the idea of a mutant
NO_END = "the tests did not end"
DIED = "the process of the tests died"
ENDS = {NO_END, DIED}


class Verdict(NamedTuple):
    """What tests make of a mutant."""

    group: str
    mutant: Mutant
    # The cases that failed, in their order, and then why the tests came to no end: that counts as one case.
    failed: tuple[str, ...]
    seconds: float

    @property
    def cases(self) -> int:
        return len(self.failed)

    @property
    def is_noticed(self) -> bool:
        return self.cases >= self.mutant.enough

    def __str__(self) -> str:
        mark = "" if self.is_noticed else "  NOT ENOUGH"
        text = f"{self.cases} of {self.mutant.enough} cases{mark}  {self.mutant.file}: {self.mutant.idea}"
        noticed_by = "\n      ".join(self.failed or ["no test failed"])
        return f"{text}\n      {noticed_by}, {self.seconds:.0f} s"

    @property
    def row(self) -> Row:
        mutant = self.mutant
        about = {"group": self.group, "file": mutant.file, "idea": mutant.idea}
        seconds = round(self.seconds, 1)
        return about | {
            "cases": self.cases,
            "enough": mutant.enough,
            "noticed_by": list(self.failed),
            "seconds": seconds,
        }


def misfits() -> list[str]:
    """Mutants whose text is no longer in the source, or not once."""
    found = []
    for mutants in GROUPS.values():
        for mutant in mutants:
            path = ROOT / PACKAGE / mutant.file
            number = path.read_text().count(mutant.old) if path.exists() else 0
            if number != 1:
                found.append(f"{mutant.file} has {number} times {mutant.old!r}: {mutant.idea}")
    return found


def judged(group: str, mutant: Mutant, source: Path) -> Verdict:
    """Run a mutant's tests on it, in this copy of the source."""
    path = source / PACKAGE / mutant.file
    original, before = path.read_text(), path.stat().st_mtime
    path.write_text(original.replace(mutant.old, mutant.new))
    # Python compiles a source again if it has another time, in whole seconds, or length.
    os.utime(path, (before + 10, before + 10))
    began = time.monotonic()
    try:
        failed = failed_cases(mutant.tests, mutant.enough, source)
    finally:
        path.write_text(original)
        os.utime(path, (before, before))
    seconds = time.monotonic() - began
    return Verdict(group, mutant, tuple(failed), seconds)


def failed_cases(
    tests: Sequence[str], most: int, source: Path, seconds: float = MOST_SECONDS
) -> list[str]:
    """Run tests until so many cases have failed. Returns their names, and then one of ENDS if pytest came to no end."""
    environment = os.environ | {"PYTHONPATH": str(source / "src")}
    if any(test.startswith(TRITON) for test in tests):
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=no"]
    command += ["-p", "no:cacheprovider", "-p", "tests.mutants.quick"]
    command += [f"--maxfail={most}", "--continue-on-collection-errors"]
    end = []
    with tempfile.NamedTemporaryFile("r") as noted, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*command, *tests],
            cwd=source,
            env=environment | {quick.FAILED: noted.name},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code, end = 1, [NO_END]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it started
                process.wait()
        if code < 0:
            code, end = 1, [DIED]
        if code not in (0, 1):  # no tests, or an error of pytest's
            said.seek(0)
            raise RuntimeError(f"{' '.join(tests)[:300]}: {said.read()[-3000:]}")
        return [*dict.fromkeys(noted.read().splitlines()), *end][:most]


def without_false_ones(verdicts: Sequence[Verdict], copies: Sequence[Path]) -> list[Verdict]:
    """Run all cases that failed once more, without a mutant. Those that fail then too have noticed nothing."""
    cases = sorted({case for verdict in verdicts for case in verdict.failed} - ENDS)
    shares = [(cases[i :: len(copies)], copy) for i, copy in enumerate(copies)]
    with ThreadPoolExecutor(len(copies)) as pool:
        futures = [
            pool.submit(failed_cases, share, len(share), copy, 3 * MOST_SECONDS)
            for share, copy in shares
            if share
        ]
    false_ones = {case for future in futures for case in future.result()}
    for case in sorted(false_ones):
        print(f"fails without a mutant too: {case}", file=sys.stderr)
    checked = []
    for verdict in verdicts:
        failed = tuple(case for case in verdict.failed if case not in false_ones)
        checked.append(verdict._replace(failed=failed))
    return checked


def judge_all(
    chosen: Sequence[tuple[str, Mutant]],
    jobs: int,
    folder: Path,
    note: Callable[[int, Verdict], None],
) -> list[Verdict]:
    """All verdicts, in the order of `chosen`. `note` is called with each as it comes, and how many have come."""
    copies: SimpleQueue[Path] = SimpleQueue()
    all_copies = [folder / f"source{number}" for number in range(jobs)]
    ignored = shutil.ignore_patterns(".*", "runs", "site", "__pycache__", "results")
    for copy in all_copies:
        shutil.copytree(ROOT, copy, ignore=ignored)
        copies.put(copy)

    def judge(group: str, mutant: Mutant) -> Verdict:
        copy = copies.get()
        try:
            return judged(group, mutant, copy)
        finally:
            copies.put(copy)

    verdicts: dict[int, Verdict] = {}
    with ThreadPoolExecutor(jobs) as pool:
        numbers = {pool.submit(judge, *one): number for number, one in enumerate(chosen)}
        try:
            for future in as_completed(numbers):
                verdict = verdicts[numbers[future]] = future.result()
                note(len(verdicts), verdict)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return without_false_ones([verdicts[number] for number in range(len(chosen))], all_copies)


def table(verdicts: Sequence[Verdict], num_left_out: int) -> str:
    lines = ["", "cases   the tests that noticed", ""]
    for verdict in verdicts:
        lines.append(
            f"{verdict.cases} of {verdict.mutant.enough}  {verdict.mutant.file}: {verdict.mutant.idea}"
        )
        lines += [f"        {case}" for case in verdict.failed or ["NO TEST FAILED"]]
    noticed = sum(verdict.is_noticed for verdict in verdicts)
    lines.append(f"\n{noticed} of {len(verdicts)} mutants are noticed by enough cases.")
    if num_left_out:
        lines.append(f"{num_left_out} were left out: what they need is not installed.")
    return "\n".join(lines)


def rows_of(record: Path | None) -> dict[Key, Row]:
    """The rows of a record that is there."""
    if record is None or not record.exists():
        return {}
    return {(row["file"], row["idea"]): row for row in json.loads(record.read_text())["rows"]}


def is_settled(mutant: Mutant, recorded: dict[Key, Row]) -> bool:
    row = recorded.get((mutant.file, mutant.idea))
    return row is not None and row["cases"] >= mutant.enough


def with_recorded(rows: list[Row], recorded: dict[Key, Row]) -> list[Row]:
    """The rows of this run, each with the commit, and of other mutants those that were recorded before."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    latest = dict(recorded)
    for row in rows:
        latest[row["file"], row["idea"]] = row | {"commit": commit.strip()}
    keys = [(mutant.file, mutant.idea) for mutants in GROUPS.values() for mutant in mutants]
    return [latest[key] for key in keys if key in latest]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; all by default")
    parser.add_argument("--only", default="", help="mutants with this text in file or idea")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default 2)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    missing = "only mutants that the record lacks, or that too few cases noticed"
    parser.add_argument("--missing", action="store_true", help=missing)
    add_record(parser)
    arguments = parser.parse_args()
    groups = arguments.groups or list(GROUPS)
    for group in groups:
        if group not in GROUPS:
            parser.error(f"there are no mutants {group!r}; choose from {', '.join(GROUPS)}")
    if wrong := misfits():
        parser.error("the source has changed, and mutants do not fit it:\n" + "\n".join(wrong))
    chosen = []
    num_left_out = 0
    for group in groups:
        for mutant in GROUPS[group]:
            name = f"{mutant.file}: {mutant.idea}"
            if arguments.only not in name:
                continue
            if mutant.needs is not None and find_spec(mutant.needs) is None:
                print(f"left out, since {mutant.needs} is not installed: {name}", file=sys.stderr)
                num_left_out += 1
            else:
                chosen.append((group, mutant))
    recorded = rows_of(arguments.record)
    if arguments.missing:
        chosen = [(group, mutant) for group, mutant in chosen if not is_settled(mutant, recorded)]
    keep = kept_record(parser, arguments.record, "mutants", "-m tests.mutants")
    began = time.monotonic()
    rows: list[Row] = []

    def note(number: int, verdict: Verdict) -> None:
        if not arguments.json:
            print(f"{number:3} of {len(chosen)}: {verdict}", flush=True)
        rows.append(verdict.row)
        if arguments.record is not None:
            seconds = round(time.monotonic() - began)
            keep(with_recorded(rows, recorded), seconds_of_last_run=seconds, at_once=arguments.jobs)

    with tempfile.TemporaryDirectory(prefix="rda-mutants-") as folder:
        verdicts = judge_all(chosen, arguments.jobs, Path(folder), note)
    rows = [verdict.row for verdict in verdicts]
    if arguments.record is not None:
        seconds = round(time.monotonic() - began)
        keep(with_recorded(rows, recorded), seconds_of_last_run=seconds, at_once=arguments.jobs)
    print(json.dumps(rows, indent=1) if arguments.json else table(verdicts, num_left_out))
    return int(not all(verdict.is_noticed for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
