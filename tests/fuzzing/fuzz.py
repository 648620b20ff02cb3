"""`make fuzz`: random and hostile use, judged by what must hold whatever was asked.

A case is made from its kind, a seed and its number alone, so that each can be made again. Cases run in a process of
their own, with a limit of time and of memory: one that hangs or dies is a failure too, and the next begins anew.

A kind is a module with

    prepare(folder)            makes once what its cases start from
    try_case(rng, folder)      one case, in an empty folder inside that folder: a Trial
    BREAKAGES                  by name, contexts in which the program is broken, to prove that cases notice

    python tests/fuzzing/fuzz.py                                           all kinds
    python tests/fuzzing/fuzz.py --kinds calls --seed 7 --cases 2000 --seconds 600 --record benchmarks/results/fuzz.json
                                                                   many of one kind, noted beside what is there already
    python tests/fuzzing/fuzz.py --kinds calls --seed 7 --first 9000       on from case 9,000, where a run stopped
    python tests/fuzzing/fuzz.py --kinds calls --seed 7 --first 123 --cases 1
                                                                   one case once more
    python tests/fuzzing/fuzz.py --kinds calls --broken "causality is forgotten"   how a broken program fails
"""

import argparse
import contextlib
import datetime
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from threading import RLock
from typing import Any, BinaryIO, NamedTuple
from unittest import mock

from tqdm import tqdm

from ring_dilated_attention.training.files import MOST_BYTES, check_mine, json_object, write_whole

# before torch is imported, in the processes that are started here
os.environ.setdefault("OMP_NUM_THREADS", "1")
# for what tests share, and benchmarks, which are not installed
sys.path += map(str, Path(__file__).parents[1:3])

from distributed import START

KINDS = {
    "commands": "fuzz_commands",
    "calls": "fuzz_calls",
    "simulated": "fuzz_simulated",
    "ranks": "fuzz_ranks",
    "losses": "fuzz_losses",
    "caches": "fuzz_caches",
    "torchscale": "fuzz_torchscale",
    "autocast": "fuzz_autocast",
}
SECONDS_PER_CASE = 60
MOST_TO_NOTICE = 2000  # cases, to notice that the program is broken
BYTES_BEYOND_TORCH = 4 * 10**9


class Trial(NamedTuple):
    """What became of a case: a word to count it by, how it went, and what is wrong with that, if anything."""

    outcome: str
    description: str
    complaint: str | None = None
    seconds: float = 0.0


class Failure(NamedTuple):
    number: int
    trial: Trial


@dataclass
class Findings:
    """The findings of one kind."""

    kind: str
    seed: int
    num_cases: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def fuzz(
    kind: str,
    seed: int,
    numbers: range,
    *,
    seconds: float = float("inf"),
    breakage: str | None = None,
    most_failures: int = 10,
    on_trial: Callable[[int, Trial], object] = lambda number, trial: None,
) -> Findings:
    """Try cases until they, the time or the patience is through."""
    findings, start, left = Findings(kind, seed), time.monotonic(), numbers
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        while (
            left and time.monotonic() - start < seconds and len(findings.failures) < most_failures
        ):
            ours, theirs = START.Pipe(duplex=False)
            process: Any = START.Process(
                target=_work, args=(theirs, kind, seed, left, folder, breakage)
            )
            process.start()
            theirs.close()
            try:
                while (
                    left
                    and time.monotonic() - start < seconds
                    and len(findings.failures) < most_failures
                ):
                    trial, is_alive = _next_trial(ours, process)
                    findings.num_cases += 1
                    findings.outcomes[trial.outcome] += 1
                    if trial.complaint is not None:
                        findings.failures.append(Failure(left[0], trial))
                    on_trial(left[0], trial)
                    left = left[1:]
                    if not is_alive:
                        break
            finally:
                process.kill()
                process.join()
                ours.close()
    findings.seconds = time.monotonic() - start
    return findings


def _next_trial(pipe: Connection, process: Any) -> tuple[Trial, bool]:
    """The next trial, and whether its process can go on."""
    if not pipe.poll(SECONDS_PER_CASE):
        return Trial("no end", "", f"no end within {SECONDS_PER_CASE} s"), False
    try:
        return Trial(*pipe.recv()), True
    except EOFError:
        process.join()
        return Trial("death", "", f"the process died with code {process.exitcode}"), False


def _work(
    pipe: Connection, kind: str, seed: int, numbers: range, folder: str, breakage: str | None
) -> None:
    tqdm.set_lock(RLock())  # its own would outlive a process that is killed
    module = import_module(KINDS[kind])
    prepared = Path(folder) / "prepared"
    if not prepared.exists():
        prepared.mkdir()
        module.prepare(prepared)
    _limit_memory()
    with module.BREAKAGES[breakage]() if breakage is not None else contextlib.nullcontext():
        for number in numbers:
            start = time.monotonic()
            scratch = prepared / "case"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                trial = module.try_case(random.Random(f"{kind} {seed} {number}"), scratch)
            except Exception:  # noqa: BLE001  the case's own mistake is a failure too
                trial = Trial("mistake", "", traceback.format_exc())
            pipe.send(tuple(trial._replace(seconds=time.monotonic() - start)))


def _limit_memory() -> None:
    """What takes all memory takes it from everybody on this machine."""
    now = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmSize")
    )
    most = int(now.split()[1]) * 1024 + BYTES_BEYOND_TORCH
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def broken(name: str, replacement: object, *targets: object) -> Callable[[], Any]:
    """A context in which a name is something else, wherever it is known."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for target in targets:
                stack.enter_context(mock.patch.object(target, name, replacement))
            yield

    return context


def nothing(*_: object, **__: object) -> None:
    pass


def prove(kind: str, seed: int) -> dict[str, int | None]:
    """After how many cases each way of breaking the program is noticed, or None."""
    found = {}
    for breakage in import_module(KINDS[kind]).BREAKAGES:
        failures = fuzz(
            kind, seed, range(MOST_TO_NOTICE), breakage=breakage, most_failures=1
        ).failures
        if failures:  # it must be for the breakage
            failures = (
                []
                if fuzz(kind, seed, range(failures[0].number, failures[0].number + 1)).failures
                else failures
            )
        found[breakage] = failures[0].number + 1 if failures else None
        print(
            f"{kind}, broken ({breakage}): {f'noticed by case {found[breakage]}' if failures else 'NOT NOTICED'}",
            flush=True,
        )
    return found


def is_record(file: BinaryIO) -> bool:
    """Whether a file is one that this script wrote, so that rows may be added to it."""
    record = json_object(file.read(MOST_BYTES))
    return (
        record.get("case") == "fuzz"
        and {"command", "hardware", "versions", "rows"} <= record.keys()
    )


def record_of(
    before: Sequence[dict[str, Any]],
    all_findings: Sequence[Findings],
    proofs: dict[str, dict[str, int | None]],
    first: int,
) -> dict[str, Any]:
    """What was run, for documents to quote: each row with its own date, command and commit, after those before."""
    from ring_dilated_attention.training.machine import hardware, versions

    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    about = {
        "command": " ".join(["python tests/fuzzing/fuzz.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        or None,
    }
    rows = [
        {
            "kind": found.kind,
            "seed": found.seed,
            "first": first,
            "cases": found.num_cases,
            "failures": len(found.failures),
            "seconds": round(found.seconds, 1),
            "outcomes": dict(found.outcomes.most_common()),
            "broken_noticed_by_case": proofs.get(found.kind, {}),
            **about,
        }
        for found in all_findings
    ]
    return {
        "case": "fuzz",
        **about,
        "hardware": hardware(),
        "versions": versions(),
        "rows": [*before, *rows],
    }


def lines_of(record: dict[str, Any]) -> list[str]:
    """A record as a table for a page."""
    found, on = record["versions"], record["hardware"]
    rows = [
        "| {kind} | {seed} | {cases:,} | {failures} | {seconds:,.0f} | {commit} |".format(**row)
        for row in record["rows"]
        if row["cases"]
    ]
    noticed: dict[str, list[int | None]] = {}
    for row in record["rows"]:
        noticed.setdefault(row["kind"], []).extend(row["broken_noticed_by_case"].values())
    proofs = [
        f"{kind}: {len(proof)} of {len(proof)}"
        for kind, proof in noticed.items()
        if proof and None not in proof
    ]
    return [
        "| kind | seed | cases | failures | seconds | commit |",
        "|---|---:|---:|---:|---:|---|",
        *rows,
        "",
        f"Python {found['python']}, torch {found['torch']}, {on['processor']}, {on['cores']} busy cores.",
        f"Programs broken on purpose that were noticed: {'; '.join(proofs)}.",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=2000, help="of each kind (default 2000)")
    parser.add_argument(
        "--seconds", type=float, default=1800, help="most, of each kind (default 1800)"
    )
    parser.add_argument("--broken", help="break the program in this way first")
    parser.add_argument(
        "--prove", action="store_true", help="first see that broken programs are noticed"
    )
    parser.add_argument("--verbose", action="store_true", help="print every case")
    parser.add_argument("--record", type=Path, help="add what was run to a file")
    parser.add_argument(
        "--table", action="store_true", help="only print the record as a table for a page"
    )
    arguments = parser.parse_args()
    if arguments.table:
        print("\n".join(lines_of(json.loads(arguments.record.read_text()))))
        return 0
    if arguments.record is not None:
        try:
            check_mine(arguments.record, is_record, "tests/fuzzing/fuzz.py")
        except ValueError as error:
            parser.error(f"--record: {error}")
    proofs = (
        {kind: prove(kind, arguments.seed) for kind in arguments.kinds} if arguments.prove else {}
    )
    all_findings = []
    for kind in arguments.kinds:
        print(f"{kind}, seed {arguments.seed}", flush=True)

        with tqdm(total=arguments.cases, unit="case", desc=kind, dynamic_ncols=True) as bar:

            def show(number: int, trial: Trial, kind: str = kind, bar: Any = bar) -> None:
                bar.update()
                if arguments.verbose or trial.complaint is not None:
                    again = f"--kinds {kind} --seed {arguments.seed} --first {number} --cases 1 --verbose"
                    bar.write(
                        f"{number:6}  {trial.seconds:5.2f} s  {trial.outcome}: {trial.description}",
                        sys.stdout,
                    )
                    if trial.complaint is not None:
                        bar.write(
                            f"  FAILED: {trial.complaint}\n  again: python tests/fuzzing/fuzz.py {again}",
                            sys.stdout,
                        )

            found = fuzz(
                kind,
                arguments.seed,
                range(arguments.first, arguments.first + arguments.cases),
                seconds=arguments.seconds,
                breakage=arguments.broken,
                on_trial=show,
            )
        all_findings.append(found)
        counts = ", ".join(
            f"{number} {outcome}" for outcome, number in found.outcomes.most_common()
        )
        print(
            f"{kind}: {found.num_cases} cases in {found.seconds:.0f} s, {len(found.failures)} failed: {counts}"
        )
        if found.num_cases < arguments.cases:
            on = f"--kinds {kind} --seed {arguments.seed} --first {arguments.first + found.num_cases}"
            print(
                f"the time or the patience was up; on from here: python tests/fuzzing/fuzz.py {on}"
            )
        if arguments.record is not None and arguments.broken is None:
            path = arguments.record
            before = json.loads(path.read_text())["rows"] if path.exists() else []
            text = json.dumps(record_of(before, [found], proofs, arguments.first), indent=1) + "\n"
            write_whole(path, text.encode(), is_record, "tests/fuzzing/fuzz.py")
    is_proven = all(number is not None for proof in proofs.values() for number in proof.values())
    return 1 if any(found.failures for found in all_findings) or not is_proven else 0


if __name__ == "__main__":
    sys.exit(main())
