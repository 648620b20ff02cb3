"""`python -m benchmarks.before COMMIT`: an earlier commit beside this one, case by case, in one run on one machine.

Each case runs at the earlier commit, in a checkout of its own, and at once here. Both write their own records, of which
`results/before.json` keeps the times and their ratio. What a small call costs besides arithmetic is timed in turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ring_dilated_attention.commands.terminal import guarded

from .record import branches, make_record, markdown, write_record

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
# What is compared of each case. Times with a spread are records' medians, others are numbers.
TIMES = {
    "flops": ("seconds",),
    "linear": ("forward_seconds", "seconds"),
    "token": ("seconds",),
    "scaling": ("one_rank_seconds", "two_ranks_seconds"),
}
WHAT = ("stage", "sharding", "dtype", "num_kv_heads", "num_threads")  # of a row: which of a case's it is
ROUNDS = 10
# Three tiles of 4,096 positions, and so little to compute that the time is that of Python and of torch's dispatch.
SMALL_CALL = """
import statistics, time, torch
from ring_dilated_attention import DilatedPattern, dilated_attention
torch.set_num_threads(1)
pattern = DilatedPattern((4, 4096, 4096), (4, 2048, 4096))
inputs = [torch.randn(1, 4096, 1, 8, requires_grad=True) for _ in range(3)]
def call():
    start = time.perf_counter()
    dilated_attention(*inputs, pattern).sum().backward()
    return time.perf_counter() - start
times = [call() for _ in range(400)][100:]
print(statistics.median(times))
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commit", help="the earlier commit, in the history of this clone")
    parser.add_argument("--cases", nargs="+", choices=TIMES, default=[*TIMES], help="default: all")
    arguments = parser.parse_args(argv)
    known = ["git", "-C", str(ROOT), "cat-file", "-e", arguments.commit + "^{commit}"]
    if subprocess.run(known, stderr=subprocess.DEVNULL, check=False).returncode:
        parser.error(f"this clone has no commit {arguments.commit!r}: name one that `git log` shows")
    return guarded("python -m benchmarks.before", lambda: run(arguments), is_process=argv is None)


def run(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        earlier = Path(folder) / "earlier"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(earlier), arguments.commit], check=True)
        try:
            rows = [small_call(earlier, arguments.commit)]
            for case in arguments.cases:
                rows += compared(case, earlier, arguments.commit)
        finally:
            subprocess.run([*git, "remove", "--force", str(earlier)], check=True)
    record = make_record("before", rows, is_quick=False) | {
        "command": f"python -m benchmarks.before {arguments.commit}"
    }
    print(table(rows), f"written to {write_record(record, RESULTS)}", sep="\n\n")
    return 0


def python(checkout: Path, *arguments: str) -> str:
    """What Python prints with the package and the benchmarks of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def compared(case: str, earlier: Path, commit: str) -> list[dict[str, Any]]:
    """A row for each time that both records of the case have."""
    found = []
    for checkout in (earlier, ROOT):
        print(f"{case}, {commit if checkout == earlier else 'now'}", file=sys.stderr)
        python(checkout, "-m", "benchmarks", case)
        found.append(json.loads((checkout / f"benchmarks/results/{case}.json").read_text())["rows"])
    rows = []
    for before, now in zip(*found, strict=True):
        same = {name: now[name] for name in ("segment_lengths", "dilation_rates", "is_causal", "seq_len", "num_heads")}
        if {name: before[name] for name in same} != same:
            raise ValueError(f"{case} measures something else now than at {commit}: {same}")
        for name in TIMES[case]:
            times = [row[name] if isinstance(row[name], float) else row[name]["median"] for row in (before, now)]
            what = ", ".join([*(str(now[key]) for key in WHAT if key in now), *caches(now), name.replace("_", " ")])
            rows.append({"of": case, "what": what, **same, "batch": now["batch"], "commit": commit, **ratio(*times)})
    return rows


def small_call(earlier: Path, commit: str) -> dict[str, Any]:
    """Medians of rounds in turn, each of 300 calls in a process of its own."""
    print(f"a small call, {commit} and now in turn", file=sys.stderr)
    times: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        before, now = (float(python(checkout, "-c", SMALL_CALL)) for checkout in (earlier, ROOT))
        times.append((before, now))
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    pattern = {"segment_lengths": [4, 4096, 4096], "dilation_rates": [4, 2048, 4096], "is_causal": False}
    sizes = {"seq_len": 4096, "num_heads": 1, "batch": 1}
    return {
        "of": "a small call",
        "what": "forward and backward",
        **pattern,
        **sizes,
        "commit": commit,
        **ratio(*medians),
    }


def caches(row: dict[str, Any]) -> list[str]:
    """What the processor's caches held before each call, where a case says so."""
    return [row["cpu_caches"]["state"]] if "cpu_caches" in row else []


def ratio(before: float, now: float) -> dict[str, float]:
    return {"before_seconds": before, "seconds": now, "ratio": now / before}


def table(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            f"{row['of']}: {row['what']}",
            branches(row),
            f"{row['seq_len']:,} x {row['batch']}, {row['num_heads']} heads",
            f"{row['before_seconds']:.4g}",
            f"{row['seconds']:.4g}",
            f"{row['ratio']:.2f}",
        )
        for row in rows
    ]
    headers = ("what", "pattern", "positions", f"seconds at {rows[0]['commit']}", "seconds now", "now / before")
    return markdown(headers, tuple(cells))


if __name__ == "__main__":
    sys.exit(main())
