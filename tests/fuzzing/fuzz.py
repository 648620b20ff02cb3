"""`make fuzz`: random and hostile use, judged by what must hold whatever was asked.

A case is made from its kind, a seed and its number alone, so that each can be made again. Cases run in a process of
their own, with a limit of time and of memory: one that hangs or dies is a failure too, and the next begins anew.

A kind is a module with

    prepare(folder)            makes once what its cases start from (if it has such a function)
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
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import NamedTuple
from unittest import mock

from tqdm import tqdm

# before torch is imported, in the processes that are started here
os.environ.setdefault("OMP_NUM_THREADS", "1")
# for what tests share, and benchmarks, which are not installed
sys.path += map(str, Path(__file__).parents[1:3])

from distributed import START

KINDS = (
    "commands",
    "calls",
    "simulated",
    "ranks",
    "caches",
    "torchscale",
)
SECONDS_PER_CASE = 60
MOST_TO_NOTICE = 2000  # cases, to notice that the program is broken
BYTES_BEYOND_TORCH = 4 * 10**9


class Trial(NamedTuple):
    """What became of a case: a word to count it by, how it went, and what is wrong with that, if anything."""

    outcome: str
    description: str
    complaint: str | None = None
    seconds: float = 0.0


@dataclass
class Findings:
    """The findings of one kind. Failures are by the case's number."""

    num_cases: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: dict[int, Trial] = field(default_factory=dict)


def nothing(*_, **__):
    pass


def module_of(kind):
    return import_module(f"fuzz_{kind}")


def fuzz(
    kind, seed, numbers, *, seconds=float("inf"), breakage=None, most_failures=10, on_trial=nothing
):
    """Try cases until they, the time or the patience is through."""
    findings, start, left = Findings(), time.monotonic(), numbers

    def goes_on():
        findings.seconds = time.monotonic() - start
        return left and findings.seconds < seconds and len(findings.failures) < most_failures

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        while goes_on():
            ours, theirs = START.Pipe(duplex=False)
            task = (theirs, kind, seed, left, folder, breakage)
            process = START.Process(target=_work, args=task)
            process.start()
            theirs.close()
            is_alive = True
            try:
                while is_alive and goes_on():
                    trial, is_alive = _next_trial(ours, process)
                    findings.num_cases += 1
                    findings.outcomes[trial.outcome] += 1
                    if trial.complaint is not None:
                        findings.failures[left[0]] = trial
                    on_trial(left[0], trial)
                    left = left[1:]
            finally:
                process.kill()
                process.join()
                ours.close()
    return findings


def _next_trial(pipe, process):
    """The next trial, and whether its process can go on."""
    if not pipe.poll(SECONDS_PER_CASE):
        return Trial("no end", "", f"no end within {SECONDS_PER_CASE} s"), False
    try:
        return Trial(*pipe.recv()), True
    except EOFError:
        process.join()
        return Trial("death", "", f"the process died with code {process.exitcode}"), False


def _work(pipe, kind, seed, numbers, folder, breakage):
    tqdm.set_lock(RLock())  # its own would outlive a process that is killed
    module = module_of(kind)
    prepared = Path(folder) / "prepared"
    if not prepared.exists():
        prepared.mkdir()
        getattr(module, "prepare", nothing)(prepared)
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


def _limit_memory():
    """What takes all memory takes it from everybody on this machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + BYTES_BEYOND_TORCH
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def broken(name, replacement, *targets):
    """A context in which a name is something else, wherever it is known."""

    @contextlib.contextmanager
    def context():
        with contextlib.ExitStack() as stack:
            for target in targets:
                stack.enter_context(mock.patch.object(target, name, replacement))
            yield

    return context


def prove(kind, seed):
    """After how many cases each way of breaking the program is noticed, or None."""
    found = {}
    for breakage in module_of(kind).BREAKAGES:
        cases = range(MOST_TO_NOTICE)
        failures = fuzz(kind, seed, cases, breakage=breakage, most_failures=1).failures
        found[breakage] = None
        for number in failures:  # it must be for the breakage
            if not fuzz(kind, seed, range(number, number + 1)).failures:
                found[breakage] = number + 1
        print(f"{kind}, broken ({breakage}): noticed by case {found[breakage]}", flush=True)
    return found


def note(path, row):
    """Add what was run to a record, with its own date, command and commit."""
    from benchmarks.record import make_record

    record = make_record("fuzz", [], is_quick=False)
    about = {"command": " ".join(["python tests/fuzzing/fuzz.py", *sys.argv[1:]])}
    about |= {"date": record["date"], "commit": record["commit"]}
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    record |= {**about, "rows": [*before, {**row, **about}]}
    path.write_text(json.dumps(record, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--seed", type=int, default=random.randrange(10**6))
    add("--first", type=int, default=0, help="number of the first case")
    add("--cases", type=int, default=2000, help="of each kind (default 2000)")
    add("--seconds", type=float, default=1800, help="most, of each kind (default 1800)")
    add("--broken", help="break the program in this way first")
    add("--prove", action="store_true", help="first see that broken programs are noticed")
    add("--verbose", action="store_true", help="print every case")
    add("--record", type=Path, help="add what was run to this file of such records")
    arguments = parser.parse_args()
    seed, numbers = arguments.seed, range(arguments.first, arguments.first + arguments.cases)
    proofs = {kind: prove(kind, seed) if arguments.prove else {} for kind in arguments.kinds}
    is_right = all(None not in proof.values() for proof in proofs.values())
    for kind in arguments.kinds:
        again = f"python tests/fuzzing/fuzz.py --kinds {kind} --seed {seed}"
        with tqdm(total=arguments.cases, unit="case", desc=kind, dynamic_ncols=True) as bar:

            def show(number, trial, bar=bar, again=again):
                bar.update()
                told = f"{number:6}  {trial.seconds:5.2f} s  {trial.outcome}: {trial.description}"
                if trial.complaint is not None:
                    told += f"\n  FAILED: {trial.complaint}"
                    told += f"\n  again: {again} --first {number} --cases 1 --verbose"
                if arguments.verbose or trial.complaint is not None:
                    bar.write(told, sys.stdout)

            limits = {"seconds": arguments.seconds, "breakage": arguments.broken}
            found = fuzz(kind, seed, numbers, on_trial=show, **limits)
        is_right = is_right and not found.failures
        print(f"{kind}, seed {seed}: {found.num_cases} cases in {found.seconds:.0f} s,", end=" ")
        print(f"{len(found.failures)} failed: {dict(found.outcomes.most_common())}")
        if found.num_cases < arguments.cases:
            first = arguments.first + found.num_cases
            print(f"the time or the patience was up; on from here: {again} --first {first}")
        if arguments.record is not None and arguments.broken is None:
            row = {
                "kind": kind,
                "seed": seed,
                "first": arguments.first,
                "cases": found.num_cases,
                "failures": len(found.failures),
                "seconds": round(found.seconds, 1),
                "outcomes": dict(found.outcomes.most_common()),
                "broken_noticed_by_case": proofs[kind],
            }
            note(arguments.record, row)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
