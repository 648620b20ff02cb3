"""`rda check`: compares every backend and exchange that can run on this machine with the definition in float64."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import groupby, product
from typing import Any, NamedTuple

import torch

from ..kernels.choose import BACKENDS, reasons
from ..pattern import DilatedPattern
from ..plan.exchange import EXCHANGES
from ..ranks.context import ContextParallel
from ..simulate import all_ranks
from . import console
from .arguments import check_at_least, check_ranks_fit, check_seconds, count
from .errors import DTYPES, Case, Squares, measure, measure_cached, worst
from .local_ranks import Launch, RankFailedError, Worker, run_ranks

SECONDS_PER_LAUNCH, MOST_SECONDS = 60, 86_400

CASES = (
    Case("causal, n prime", DilatedPattern((16, 101), (1, 4), is_causal=True), 101, 2, 6, 6, 24),
    Case(
        "dense causal, zigzag",
        DilatedPattern((96,), (1,), is_causal=True),
        96,
        1,
        4,
        2,
        32,
        sharding="zigzag",
    ),
    Case(
        "blocked, grouped queries",
        DilatedPattern((20, 64), (2, 4), phase="blocked"),
        96,
        2,
        6,
        2,
        16,
    ),
    Case("heads split", DilatedPattern((11, 90), (3, 5), heads="split"), 90, 2, 5, 5, 16),
    Case(
        "packed documents",
        DilatedPattern((16, 64), (1, 2), is_causal=True),
        97,
        1,
        4,
        2,
        24,
        (0, 1, 40, 97),
    ),
    Case("queries without keys", DilatedPattern((8, 97), (3, 8)), 97, 1, 3, 3, 16),
)

# Not exchanges. CACHE: a sequence is appended to a cache on one device. SIMULATED: one process has all ranks.
CACHE, SIMULATED = "cache", "simulated"


class Row(NamedTuple):
    """A line of the table. `reason` says why the trial could not run, or how it failed."""

    backend: str
    exchange: str
    dtype: str
    num_ranks: int
    verdict: str
    num_cases: int = 0
    error: float | None = None
    tolerance: float | None = None
    where: str = ""
    reason: str = ""


class Trial(NamedTuple):
    """All cases of one backend, exchange, dtype and number of ranks; they become one row."""

    backend: str
    device: str
    exchange: str
    dtype: torch.dtype
    num_ranks: int

    @property
    def num_processes(self) -> int:
        return 1 if self.exchange == SIMULATED else self.num_ranks

    @property
    def cases(self) -> list[Case]:
        """The cases that can run. A cache needs a causal pattern and one document; all_to_all needs heads to divide."""
        if self.exchange == CACHE:
            return [
                x._replace(documents=None, pattern=replace(x.pattern, is_causal=True))
                for x in CASES
            ]
        deals = self.exchange == "all_to_all"
        return [case for case in CASES if not deals or case.num_kv_heads % self.num_ranks == 0]

    def row(self, verdict: str, **others: Any) -> Row:
        dtype = str(self.dtype).removeprefix("torch.")
        return Row(self.backend, self.exchange, dtype, self.num_ranks, verdict, **others)


def plan_trials(num_ranks: int) -> tuple[list[Trial], list[Row]]:
    """Trials that can run on this machine with `num_ranks` ranks, and a row with the reason for each that cannot."""
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    exchanges = (*EXCHANGES, SIMULATED) if num_ranks > 1 else ("none", CACHE)
    trials, rows = [], []
    for backend, exchange, dtype in product(BACKENDS, exchanges, DTYPES):
        found = [Trial(backend, device, exchange, dtype, num_ranks) for device in devices]
        against = [_why_not(trial) for trial in found]
        if None in against:
            trials.append(found[against.index(None)])
        else:
            rows.append(found[0].row("cannot run", reason="; ".join(map(str, against))))
    return trials, rows


def _why_not(trial: Trial) -> str | None:
    if not trial.cases:
        return f"no case has key/value heads that divide among {trial.num_ranks} ranks"
    reason = reasons(torch.empty(1, 1, 1, 8, dtype=trial.dtype, device=trial.device))[trial.backend]
    if (
        reason is None
        and trial.device == "cuda"
        and torch.cuda.device_count() < trial.num_processes
    ):
        return f"needs a GPU for each of {trial.num_processes} processes, there are {torch.cuda.device_count()}"
    return reason


def run_trials(trials: Sequence[Trial], on_step: Callable[[], object], seconds: float) -> list[Row]:
    """Run trials of one backend and exchange in their own processes, so that a crash or a hang fails only them."""
    has_gpus = any(trial.device == "cuda" for trial in trials)
    launch = Launch(trials[0].num_processes, has_gpus=has_gpus, seconds=seconds)
    try:
        ranks = run_ranks(
            launch, _measure_all, trials, seconds, on_report=lambda rank, message: on_step()
        )
    except RankFailedError as error:
        print(error, file=sys.stderr)
        reason = str(error).strip().splitlines()[-1]
        return [trial.row("failed", error=math.inf, reason=reason) for trial in trials]
    rows = []
    for i, trial in enumerate(trials):
        result = worst(trial.cases, trial.dtype, [rank[i] for rank in ranks], trial.device)
        verdict = "passed" if result.passed else "failed"
        rows.append(trial.row(verdict, num_cases=len(trial.cases), **result._asdict()))
    return rows


def _measure_all(worker: Worker, trials: Sequence[Trial], seconds: float) -> list[list[Squares]]:
    contexts = _contexts(trials, seconds)
    results: list[list[Squares]] = []
    for trial in trials:
        how = (
            trial.dtype,
            trial.backend,
            f"cuda:{worker.rank}" if trial.device == "cuda" else "cpu",
        )
        results.append([])
        for case in trial.cases:
            is_cached = trial.exchange == CACHE
            found = (
                measure_cached(case, *how)
                if is_cached
                else measure(case, *how, contexts.get(case.sharding))
            )
            results[-1].append(found)
            if worker.rank == 0:
                worker.report(case.name)
    return results


def _contexts(trials: Sequence[Trial], seconds: float) -> dict[str, ContextParallel]:
    """By sharding, the contexts that the cases need. One rank needs none."""
    exchange, num_ranks = trials[0].exchange, trials[0].num_ranks
    shardings = dict.fromkeys(
        case.sharding for trial in trials for case in trial.cases if num_ranks > 1
    )
    if exchange == SIMULATED:
        return {sharding: all_ranks(num_ranks, sharding=sharding) for sharding in shardings}
    timeout = timedelta(seconds=seconds)
    return {x: ContextParallel(sharding=x, exchange=exchange, timeout=timeout) for x in shardings}


EXAMPLES = """examples:
  rda check                 every backend and exchange on 1, 2 and 3 ranks
  rda check --ranks 1       one rank only

Each row shows the result that came nearest to its tolerance over all cases: out, lse, dq, dk or dv. The gradients are
those through out and lse. For "cache" a sequence is appended many tokens at a time and one by one, and only out and lse
are compared. The tolerance is twice the error of torch's attention in the same dtype under the same mask, plus a floor:
a quarter of the dtype's eps, 8 eps in float64, 4 eps in float32 on a GPU.

Exit codes: 0 all rows passed or cannot run here, 1 a row failed, 2 refused.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--ranks",
        type=count,
        nargs="+",
        default=[1, 2, 3],
        metavar="P",
        help="numbers of ranks (default 1 2 3)",
    )
    seconds = f"for one backend, exchange and number of ranks (default {SECONDS_PER_LAUNCH} s)"
    add("--timeout", type=float, default=SECONDS_PER_LAUNCH, metavar="S", help=seconds)
    add("--json", action="store_true", help="print the rows as JSON")


def run(arguments: argparse.Namespace) -> int:
    check_at_least("--ranks", min(arguments.ranks))
    check_ranks_fit(max(arguments.ranks), min(case.seq_len for case in CASES), "the shortest case")
    check_seconds("--timeout", arguments.timeout, MOST_SECONDS)
    rows = check(arguments.ranks, arguments.timeout)
    if arguments.json:
        known = (
            {name: x for name, x in row._asdict().items() if x not in (None, "")} for row in rows
        )
        print(
            json.dumps(
                [{name: "inf" if x == math.inf else x for name, x in row.items()} for row in known],
                indent=1,
            )
        )
    else:
        print(table(rows))
    return 1 if any(row.verdict == "failed" for row in rows) else 0


def check(ranks: Iterable[int], seconds: float = SECONDS_PER_LAUNCH) -> list[Row]:
    planned = [plan_trials(num_ranks) for num_ranks in ranks]
    possible = [trial for trials, _ in planned for trial in trials]
    results: list[Row] = []
    with console.progress(sum(len(trial.cases) for trial in possible), "case") as bar:
        for (backend, exchange, num_ranks), trials in groupby(
            possible, lambda x: (x.backend, x.exchange, x.num_ranks)
        ):
            bar.note(f"{backend}, {exchange}, {console.counted(num_ranks, 'rank')}")
            results += run_trials(list(trials), bar.update, seconds)
    return results + [row for _, rows in planned for row in rows]


def table(rows: Sequence[Row]) -> str:
    """The rows, aligned. What cannot run has one row for each backend and reason."""
    headers = (
        "backend",
        "exchange",
        "ranks",
        "dtype",
        "cases",
        "worst error",
        "tolerance",
        "verdict",
        "where",
    )
    lines: list[tuple[str, ...]] = []
    for row in rows:
        if row.verdict != "cannot run":
            numbers = ("" if x is None else f"{x:.1e}" for x in (row.error, row.tolerance))
            names = (
                row.backend,
                row.exchange,
                str(row.num_ranks),
                row.dtype,
                f"{row.num_cases} of {len(CASES)}",
            )
            lines.append((*names, *numbers, row.verdict, row.where or row.reason))
    for backend, reason in dict.fromkeys(
        (row.backend, row.reason) for row in rows if row.verdict == "cannot run"
    ):
        columns, alike = [], [row for row in rows if (row.backend, row.reason) == (backend, reason)]
        for name in ("exchange", "num_ranks", "dtype"):
            values = dict.fromkeys(getattr(row, name) for row in alike)
            is_any = values.keys() == {getattr(row, name) for row in rows}
            columns.append("any" if is_any else ", ".join(map(str, values)))
        lines.append((backend, *columns, "", "", "", "cannot run", reason))
    return console.table(headers, lines, num_left=len(headers))
