"""`rda check`: tests every backend and exchange that can run on this machine.

A backend computes attention on a device. An exchange is a way in which keys and values travel between ranks. The
results are compared with the unoptimised attention of `reference.py` in float64.
"""

import json
import math
import sys
from argparse import ArgumentParser, Namespace
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
from .arguments import within
from .errors import DTYPES, Case, Squares, measure, measure_cached, worst
from .local_ranks import Launch, RankFailedError, Worker, run_ranks

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

# Two values of `Trial.exchange`, for trials without messages between ranks. CACHE: one device appends a sequence to a
# cache. SIMULATED: one process computes for all ranks.
CACHE, SIMULATED = "cache", "simulated"


Row = dict[str, Any]  # one row of the table, or one entry of the JSON list


class Trial(NamedTuple):
    """A backend, exchange, dtype and number of ranks, tested on several cases. Each trial becomes one row of the
    table."""

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
        """The entries of `CASES` that the trial can run.

        For the exchange CACHE, every case is made causal, with one document. For all_to_all, a case is kept only if its
        number of key/value heads is a multiple of the number of ranks, because each rank computes some of the heads.
        """
        cases = []
        for case in CASES:
            if self.exchange == CACHE:
                causal = replace(case.pattern, is_causal=True)
                cases.append(case._replace(documents=None, pattern=causal))
            elif self.exchange != "all_to_all" or case.num_kv_heads % self.num_ranks == 0:
                cases.append(case)
        return cases

    def row(self, verdict: str, **others: Any) -> Row:
        """The trial as a row of the table. verdict: passed, failed or cannot run. others: further columns by name."""
        return {
            "backend": self.backend,
            "exchange": self.exchange,
            "num_ranks": self.num_ranks,
            "dtype": str(self.dtype).removeprefix("torch."),
            "verdict": verdict,
            **others,
        }

    def why_not(self) -> str | None:
        """Why this machine cannot run the trial, or None."""
        if not self.cases:
            return f"no case has key/value heads that divide among {self.num_ranks} ranks"
        num_gpus = torch.cuda.device_count()
        if self.device == "cuda" and num_gpus < self.num_processes:
            return f"needs {self.num_processes} GPUs, there are {num_gpus}"
        query = torch.empty(1, 1, 1, 8, dtype=self.dtype, device=self.device)
        return reasons(query)[self.backend]


def plan_trials(num_ranks: int) -> tuple[list[Trial], list[Row]]:
    """Find the trials that can run on this machine with `num_ranks` ranks.

    Returns these trials. Also returns a row for each trial that cannot run, with the reason.
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    exchanges = (*EXCHANGES, SIMULATED) if num_ranks > 1 else ("none", CACHE)
    trials, rows = [], []
    for backend, exchange, dtype in product(BACKENDS, exchanges, DTYPES):
        against = []
        for device in devices:
            trial = Trial(backend, device, exchange, dtype, num_ranks)
            reason = trial.why_not()
            if reason is None:
                trials.append(trial)
                break
            against.append(reason)
        else:
            rows.append(trial.row("cannot run", reason="; ".join(against)))
    return trials, rows


def run_trials(trials: Sequence[Trial], on_step: Callable[[], object], seconds: float) -> list[Row]:
    """Run trials that share a backend, an exchange and a number of ranks, in new processes. Returns a row for each
    trial.

    If a process crashes, or still runs after so many seconds, all of `trials` fail. The other trials of `rda check`
    still run.
    """
    has_gpus = any(trial.device == "cuda" for trial in trials)
    launch = Launch(trials[0].num_processes, has_gpus=has_gpus, seconds=seconds)
    try:
        ranks = run_ranks(
            launch, _measure_all, trials, seconds, on_report=lambda *message: on_step()
        )
    except RankFailedError as error:
        print(error, file=sys.stderr)
        reason = str(error).strip().splitlines()[-1]
        return [trial.row("failed", reason=reason) for trial in trials]
    rows = []
    for i, trial in enumerate(trials):
        result = worst(trial.cases, trial.dtype, [rank[i] for rank in ranks], trial.device)
        verdict = "passed" if result.passed else "failed"
        # Replace an infinite error by a text, because JSON has no infinity.
        size = result.error if math.isfinite(result.error) else "inf"
        rows.append(
            trial.row(
                verdict,
                num_cases=len(trial.cases),
                error=size,
                tolerance=result.tolerance,
                where=result.where,
            )
        )
    return rows


def _measure_all(worker: Worker, trials: Sequence[Trial], seconds: float) -> list[list[Squares]]:
    results = []
    contexts: dict[str, ContextParallel | None] = {}
    for trial in trials:
        device = f"cuda:{worker.rank}" if trial.device == "cuda" else "cpu"
        how = (trial.dtype, trial.backend, device)
        squares_of_cases = []
        for case in trial.cases:
            if trial.exchange == CACHE:
                squares = measure_cached(case, *how)
            else:
                if case.sharding not in contexts:
                    contexts[case.sharding] = _context(trial, case.sharding, seconds)
                squares = measure(case, *how, contexts[case.sharding])
            squares_of_cases.append(squares)
            if worker.rank == 0:
                worker.report(case.name)
        results.append(squares_of_cases)
    return results


def _context(trial: Trial, sharding: str, seconds: float) -> ContextParallel | None:
    if trial.num_ranks == 1:
        return None
    if trial.exchange == SIMULATED:
        return all_ranks(trial.num_ranks, sharding=sharding)
    timeout = timedelta(seconds=seconds)
    return ContextParallel(sharding=sharding, exchange=trial.exchange, timeout=timeout)


EXAMPLES = """examples:
  rda check                 every backend and exchange on 1, 2 and 3 ranks
  rda check --ranks 1       one rank only

Each row shows the result that came nearest to its tolerance over all cases:
out, lse, dq, dk or dv. The gradients are those through out and lse. For "cache"
a sequence is appended many tokens at a time and one by one, and only out and
lse are compared. The tolerance is twice the error of torch's attention in the
same dtype under the same mask, plus a floor: a quarter of the dtype's eps, 8
eps in float64, 4 eps in float32 on a GPU.

Exit codes: 0 all rows passed or cannot run here, 1 a row failed, 2 refused.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--ranks",
        # Each rank needs at least one position, in every case.
        type=within(1, min(case.seq_len for case in CASES)),
        nargs="+",
        default=[1, 2, 3],
        metavar="P",
        help="numbers of ranks (default 1 2 3)",
    )
    add(
        "--timeout",
        type=within(1, 86_400),
        default=300,
        metavar="S",
        help="seconds for one backend, exchange and number of ranks (default 300)",
    )
    add("--json", action="store_true", help="print the rows as JSON")


def run(arguments: Namespace) -> int:
    rows = check(arguments.ranks, arguments.timeout)
    print(json.dumps(rows, indent=1) if arguments.json else table(rows))
    return 1 if any(row["verdict"] == "failed" for row in rows) else 0


def check(ranks: Iterable[int], seconds: float) -> list[Row]:
    trials: list[Trial] = []
    impossible: list[Row] = []
    for num_ranks in ranks:
        possible, rows = plan_trials(num_ranks)
        trials += possible
        impossible += rows
    results: list[Row] = []
    with console.progress(sum(len(trial.cases) for trial in trials), "case") as bar:
        for names, group in groupby(trials, lambda x: (x.backend, x.exchange, x.num_ranks)):
            bar.note("{}, {}, ranks: {}".format(*names))
            results += run_trials(list(group), bar.update, seconds)
    return results + impossible


def table(rows: Sequence[Row]) -> str:
    """An aligned table of the trials that ran. Lines below the table list the reasons why trials cannot run, each
    reason once."""
    headers = (
        "backend",
        "exchange",
        "ranks",
        "dtype",
        "cases",
        "error",
        "tolerance",
        "verdict",
        "where",
    )
    lines: list[list[str]] = []
    against: dict[str, None] = {}
    for row in rows:
        if row["verdict"] == "cannot run":
            against[f"{row['backend']} cannot run: {row['reason']}"] = None
            continue
        cells = [row["backend"], row["exchange"], str(row["num_ranks"]), row["dtype"]]
        if "error" in row:
            cells += [f"{row['num_cases']} of {len(CASES)}"]
            cells += [f"{float(row['error']):.1e}", f"{row['tolerance']:.1e}"]
            cells += [row["verdict"], row["where"]]
        else:
            cells += ["", "", "", row["verdict"], row["reason"]]
        lines.append(cells)
    return "\n".join([console.table(headers, lines, num_left=len(headers)), *against])
