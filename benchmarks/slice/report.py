"""What `benchmarks.slice` finds: one rank's share, run and verified, beside the plan's figures, as numbers and text."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ring_dilated_attention.commands.output import aligned
from ring_dilated_attention.forecast.call_cost import pairs
from ring_dilated_attention.forecast.ledger import AttentionMemory, attention_memory
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.plan.counts import Counter, count_ranks
from ring_dilated_attention.plan.plan import Plan
from ring_dilated_attention.plan.sizes import Sizes
from ring_dilated_attention.training.machine import peak_resident_bytes

from ..measure import flops_of
from .share import SlicedJob, run_share, viewers_of
from .verify import Check, tolerance, verify

# How a table is shown: headers and rows to text.
Table = Callable[[tuple[str, ...], Sequence[tuple[str, ...]]], str]

ITEMSIZE = 4
# Query, key, value and out, and their gradients.
NUM_TENSORS = 8


def num_steps_of(job: SlicedJob, rank: int) -> int:
    """How many times `measure` calls its step."""
    return 2 + len(viewers_of(job.plan(rank))) + 3


def measure(job: SlicedJob, rank: int, step: Callable[[str], None]) -> dict[str, Any]:
    """Run and verify a rank's share. `passed` says whether all rows are within the tolerance."""
    share = run_share(job, rank, step)
    start = time.perf_counter()
    checks = verify(job, rank, share, step)
    seconds = share.seconds | {"verification": time.perf_counter() - start}
    limit = tolerance(job.head_dim)
    worst = max(check.error for check in checks)
    return {
        **describe(job, rank),
        "viewers": len(share.viewers),
        "checks": [check._asdict() for check in checks],
        "error": worst,
        "tolerance": limit,
        "passed": math.isfinite(worst) and worst <= limit,  # NaN fails
        "seconds": seconds | {"total": sum(seconds.values())},
        "peak_resident_bytes": peak_resident_bytes(),
    }


def describe(job: SlicedJob, rank: int) -> dict[str, Any]:
    """The job, and the plan's figures for the rank and for all ranks."""
    return {
        "segment_lengths": job.pattern.segment_lengths,
        "dilation_rates": job.pattern.dilation_rates,
        "is_causal": job.pattern.is_causal,
        "seq_len": job.seq_len,
        "num_heads": job.num_heads,
        "num_kv_heads": job.num_kv_heads,
        "head_dim": job.head_dim,
        "dtype": "float32",
        "batch": 1,
        "seed": job.seed,
        "ranks": job.num_ranks,
        "rank": rank,
        "rank_plan": _rank_figures(job, rank),
        "job_plan": _job_figures(job, rank),
    }


def _rank_figures(job: SlicedJob, rank: int) -> dict[str, Any]:
    plan = job.plan(rank)
    sent = tuple(plan.bytes_sent(1, job.head_dim, ITEMSIZE, backward=backward) for backward in (False, True))
    comes, counted = sum(m.size for hop in plan.hops for m in hop.receives), Counter(job.call).of(rank).received
    assert comes == counted, f"by the plan {comes} units of rows come in, and {counted} are counted"
    memory, (forward, backward) = memory_of(job, plan), flops_of(plan, 1, job.head_dim)
    return {
        "positions": plan.num_rows,
        "pairs": plan.pairs,
        "forward_flops": forward,
        "backward_flops": backward,
        "forward_sent_bytes": sent[0],
        "backward_sent_bytes": sent[1],
        "peak_bytes": memory.forward_backward.num_bytes,
        "chunk_bytes": plan.chunk_size * job.head_dim * ITEMSIZE,
        "hops": len(plan.hops),
        "hops_that_carry": sum(any(hop) for hop in plan.hops),
        "chunks_met_by_branch": _chunks_met(job, rank, plan),
    }


def memory_of(job: SlicedJob, plan: Plan) -> AttentionMemory:
    return attention_memory(plan, Sizes(1, job.head_dim, ITEMSIZE, torch.get_num_threads()), TRAITS["cpu"])


def _chunks_met(job: SlicedJob, rank: int, plan: Plan) -> dict[int, int]:
    """By branch, how many chunks of other ranks this rank meets."""
    find = job.chunk_finder(rank)
    met = dict.fromkeys(range(len(job.pattern.branches)), 0)
    for hop in plan.hops:
        for message in hop.receives:
            met[find(message).branch] += 1
    return met


def _job_figures(job: SlicedJob, rank: int) -> dict[str, Any]:
    total = pairs(job.pattern, job.seq_len, job.num_heads)
    forward = sum(count_ranks(Counter(job.call)).received) * job.head_dim * ITEMSIZE
    backward = 2 * forward  # the chunks again, and their gradients, which are of float32 too
    memory = memory_of(job, job.plan(rank))
    n = job.seq_len
    return {
        "pairs": total,
        "dense_pairs": job.num_heads * (n * (n + 1) // 2 if job.pattern.is_causal else n * n),
        "forward_flops": 2 * 2 * job.head_dim * total,
        "backward_flops": 5 * 2 * job.head_dim * total,
        "forward_sent_bytes": forward,
        "backward_sent_bytes": backward,
        "tensor_bytes": n * job.head_dim * ITEMSIZE * NUM_TENSORS * (job.num_heads + job.num_kv_heads) // 2,
        # Of ranks with as many positions, the one with rows in most rings has the largest buffers.
        "peak_bytes_at_most": job.num_ranks * memory.forward_backward.num_bytes,
    }


def text(row: dict[str, Any], table: Table = aligned) -> str:
    """What was found, in a paragraph and two tables."""
    rank, job, seconds = row["rank_plan"], row["job_plan"], row["seconds"]
    verdict = "within" if row["passed"] else "NOT within"
    return (
        f"Rank {row['rank']:,} of {row['ranks']:,}, {rank['positions']:,} of {row['seq_len']:,} positions, "
        f"{row['num_heads']} heads of {row['head_dim']}, {row['dtype']}{', causal' if row['is_causal'] else ''}: "
        f"{rank['hops_that_carry']:,} of {row['ranks'] - 1:,} hops carry something. "
        f"Worst relative L2 error {row['error']:.1e}, {verdict} "
        f"{row['tolerance']:.1e}. Forward {seconds['forward']:.1f} s, backward {seconds['backward']:.1f} s; "
        f"{row['viewers']} ranks that meet its chunks {seconds['other ranks']:.0f} s; verification "
        f"{seconds['verification']:.0f} s; {row['peak_resident_bytes'] / 1e9:.2f} GB resident at most.\n\n"
        + plan_table(row, table)
        + f"\n\nDense attention would have {job['dense_pairs'] / job['pairs']:,.0f} times as many pairs.\n\n"
        + _branch_table(row, table)
    )


def plan_table(row: dict[str, Any], table: Table = aligned) -> str:
    """The plan's figures of the rank and of the whole job."""
    rank, job = row["rank_plan"], row["job_plan"]
    lines = [
        (title, f"{rank[name] / unit:,.3f}", f"{job[name] / unit:,.0f}")
        for title, name, unit in (
            ("forward, GFLOP", "forward_flops", 1e9),
            ("backward, GFLOP", "backward_flops", 1e9),
            ("sent in forward, MB", "forward_sent_bytes", 1e6),
            ("sent in backward, MB", "backward_sent_bytes", 1e6),
        )
    ]
    peak = ("peak memory, MB", f"{rank['peak_bytes'] / 1e6:,.3f}", f"at most {job['peak_bytes_at_most'] / 1e6:,.0f}")
    return table(("the plan", "this rank", "all ranks"), [*lines, peak])


def _branch_table(row: dict[str, Any], table: Table) -> str:
    checks = [Check(**check) for check in row["checks"]]
    met = {int(branch): number for branch, number in row["rank_plan"]["chunks_met_by_branch"].items()}
    headers = (
        "branch",
        "chunks met",
        "queries",
        "worst",
        "dK, dV by own queries",
        "(remote keys)",
        "worst",
        "whole dK, dV",
        "worst",
    )
    lines = []
    for branch, (w, r) in enumerate(zip(row["segment_lengths"], row["dilation_rates"], strict=True)):
        cells = [f"({w:,}, {r:,})", str(met[branch])]
        for start, shows_remote in (("", False), ("contribution", True), ("complete", False)):
            found = [c for c in checks if c.branch == branch and _kind(c) == start]
            cells.append(str(found[0].num_rows) if found else "0")
            cells += [str(found[0].num_remote) if found else "0"] if shows_remote else []
            cells.append(f"{max(c.error for c in found):.1e}" if found else "")
        lines.append(tuple(cells))
    return table(headers, lines)


def _kind(check: Check) -> str:
    return next((kind for kind in ("contribution", "complete") if check.quantity.startswith(kind)), "")
