"""`rda plan` of more ranks than it plans one by one: closed forms where they hold, else bounds from sampled ranks."""

import argparse
import sys
import time
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from ..kernels.traits import TRAITS
from ..pattern import DilatedPattern
from ..plan.advice import Waiting, advice
from ..plan.clock import Hardware, time_text
from ..plan.lockstep import Bounds, Lockstep, why_not, zigzag_balance
from ..plan.memory import Sizes, attention_memory
from ..plan.plan import Plan
from ..plan.planner import make_plan
from ..plan.sharding import Shard
from ..plan.sharing import branch_shares
from ..plan.totals import pairs
from .numbers import scaled, size_text
from .output import aligned

# Seconds that planning every rank may take; of a job that takes longer ranks are sampled for half as long.
MOST_SECONDS = 10
FLOPS_PER_PAIR = 7 * 2  # of each number of a head: 2 products forward, 5 backward, 2 operations each


class Large(NamedTuple):
    """A job of many ranks, as `rda plan` takes it."""

    pattern: DilatedPattern
    shards: tuple[Shard, ...]
    seq_len: int
    sharding: str
    num_heads: int
    num_kv_heads: int
    documents: tuple[int, ...] | None
    sizes: Sizes
    kernel: str

    @property
    def num_ranks(self) -> int:
        return len(self.shards)

    def obstacle(self) -> str | None:
        return why_not(self.pattern, self.seq_len, self.num_ranks, self.sharding, self.documents)


def closed(job: Large, hardware: Hardware | None) -> dict[str, Any]:
    """All figures, exact but for the time of causal patterns, which may be two bounds."""

    def form_of(pattern: DilatedPattern) -> Lockstep:
        return Lockstep(pattern, job.seq_len, job.num_ranks, job.num_heads, job.num_kv_heads, job.sizes)

    def again(pattern: DilatedPattern) -> Bounds | None:
        assert hardware is not None
        return form_of(pattern).step_seconds(hardware) if job._replace(pattern=pattern).obstacle() is None else None

    form = form_of(job.pattern)
    forward, both = form.largest_sent()
    flops = FLOPS_PER_PAIR * job.sizes.head_dim * job.sizes.batch
    memory = form.memory(TRAITS[job.kernel]).forward_backward
    found: dict[str, Any] = {
        "method": "closed forms, exact",
        "positions_per_rank": form.length,
        "flops": flops * form.total_pairs,
        "largest_flops": flops * form.pairs_of_ranks[form.busiest],
        "busiest_rank": form.busiest,
        "balance": form.balance,
        "zigzag_balance": zigzag_balance(job.pattern, job.seq_len, job.num_ranks, job.num_heads),
        "hops": form.num_hops,
        "largest_forward_sent_bytes": forward,
        "largest_sent_bytes": both,
        "peak_bytes": memory.num_bytes,
        "peak_items": [item._asdict() for item in memory.items],
        "ranks_that_share": [
            form.straddling[i].group if i in form.straddling else 1 for i in range(len(job.pattern.branches))
        ],
    }
    if hardware is not None:
        seconds = form.step_seconds(hardware)
        found["step_seconds"] = seconds._asdict()
        waiting = Waiting(form.exposed(hardware, seconds), seconds, form.sent_of_branches())
        found["advice"] = advice(job.pattern, job.num_heads, (0, job.seq_len), waiting, again)
    return found


def sampled(job: Large, hardware: Hardware | None) -> dict[str, Any]:
    """Bounds: totals are exact where one document is planned, the largest figures those of the ranks looked at."""
    flops = FLOPS_PER_PAIR * job.sizes.head_dim * job.sizes.batch
    began, num = time.monotonic(), job.num_ranks
    # The last two, then ever finer halves; few steps reach the extremes of most patterns.
    order = dict.fromkeys(
        [
            num - 1,
            num - 2,
            0,
            *(round((num - 1) * (2 * i + 1) / 2**k) for k in range(1, 8) for i in range(2 ** (k - 1))),
        ]
    )
    ranks, work, sent, peaks = [], [], [], []
    for rank in order:
        plan = plan_of(job, rank)
        ranks.append(rank)
        work.append(plan.pairs)
        sent.append([plan.bytes_sent(*job.sizes[:3], backward=backward) for backward in (False, True)])
        if sent[-1] == max(sent):
            sender = plan
        peaks.append(attention_memory(plan, job.sizes, TRAITS[job.kernel]).forward_backward)
        # The last two at least: of a causal pattern one computes most, and the other sends most chunks.
        if len(ranks) > 1 and time.monotonic() - began > MOST_SECONDS / 2:
            break
    borders = job.documents or (0, job.seq_len)
    total = sum(pairs(job.pattern, b - a, job.num_heads) for a, b in pairwise(borders))
    peak = max(peaks, key=lambda x: x.num_bytes)
    found: dict[str, Any] = {
        "method": f"bounds from {len(ranks)} sampled ranks of {num:,} ({job.obstacle()})",
        "sampled_ranks": sorted(ranks),
        "flops": flops * total,
        "largest_flops": flops * max(work),
        "busiest_rank": ranks[work.index(max(work))],
        "balance": min(1.0, total / (num * max(work))) if max(work) else 1.0,
        "largest_forward_sent_bytes": max(forward for forward, _ in sent),
        "largest_sent_bytes": max(map(sum, sent)),
        "peak_bytes": peak.num_bytes,
        "peak_items": [item._asdict() for item in peak.items],
    }
    if hardware is not None:
        compute = [2 / 7 * found["largest_flops"], 5 / 7 * found["largest_flops"]]
        busy = sum(hardware.compute_seconds(x, backward=i == 1, calls=0) for i, x in enumerate(compute))
        ways = found["largest_sent_bytes"] / hardware.bytes_per_second
        least = max(busy, ways) + 2 * hardware.handshake
        found["step_seconds"] = {"least": least, "most": None}
        shares = branch_shares(job.pattern, job.shards, [sender], job.num_heads, job.num_kv_heads, job.documents)
        bytes_sent = [share.sent * job.sizes.unit * job.sizes.itemsize for share in shares]
        waiting = Waiting(1 - busy / least, Bounds(least, inf), bytes_sent, senders="one rank")
        found["advice"] = advice(job.pattern, job.num_heads, borders, waiting, lambda pattern: None)
    return found


@lru_cache(maxsize=1)  # the rank that was timed is the first that is sampled
def plan_of(job: Large, rank: int) -> Plan:
    return make_plan(job.pattern, job.shards, rank, job.num_heads, job.num_kv_heads, job.documents)


def seconds_of_planning(job: Large) -> float:
    """About how long the plans of all ranks would take, by that of the last one."""
    began = time.monotonic()
    plan_of(job, job.num_ranks - 1)
    return 2 * (time.monotonic() - began) * job.num_ranks


def say_before(seconds: float, job: Large) -> None:
    """Nobody should wait without knowing for what."""
    if seconds > 2:
        sample = max(MOST_SECONDS, seconds / job.num_ranks)  # two plans, and their memory
        how = f"about {time_text(seconds)}" if seconds <= MOST_SECONDS else f"about {time_text(sample)}, for a sample"
        print(f"planning {job.num_ranks:,} ranks takes {how}: {job.obstacle()}", file=sys.stderr)


def text(job: Large, found: dict[str, Any]) -> str:
    is_bound = "sampled_ranks" in found
    at_least, at_most = ("at least ", "at most ") if is_bound else ("", "")
    rows = [
        ("work of all ranks", scaled(found["flops"], "FLOP")),
        (f"largest work, rank {found['busiest_rank']:,}", at_least + scaled(found["largest_flops"], "FLOP")),
        ("balance (mean work over the largest)", f"{at_most}{found['balance']:.1%}"),
        ("sent by a rank in a forward, at most", at_least + size_text(found["largest_forward_sent_bytes"])),
        ("sent by a rank in all, at most", at_least + size_text(found["largest_sent_bytes"])),
        ("peak memory of a rank", at_least + size_text(found["peak_bytes"])),
    ]
    if "step_seconds" in found:
        least, most = found["step_seconds"]["least"], found["step_seconds"]["most"]
        span = time_text(least) if least == most else f"{time_text(least)} to {time_text(most)}" if most else ""
        rows.append(("modelled step", span or f"at least {time_text(least)}"))
    lines = [f"{job.num_ranks:,} ranks, by {found['method']}", aligned(("", "forward and backward"), rows)]
    lines += [f"  {item['num_bytes'] / 1e6:>12,.1f} MB  {item['name']}" for item in found["peak_items"]]
    for i, sharing in enumerate(found.get("ranks_that_share", ())):
        what = f"travels among {sharing:,} ranks" if sharing > 1 else "stays at home"
        lines.append(f"branch {i} ({job.pattern.branches[i]}) {what}")
    if found.get("zigzag_balance") is not None:
        lines.append(f"balance by sharding: contiguous {found['balance']:.1%}, zigzag {found['zigzag_balance']:.1%}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--every-rank", action="store_true", help="plan each rank, however long it takes")
