"""Estimates memory and time of a job with too many ranks to plan each of them, from counts. Numbers only, no torch.

MEMORY_ERRORS and TIME_ERRORS say how far the estimates were off, in random jobs that are small enough to plan.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

from ..plan.counts import Counter, JobCount, Share
from ..plan.dealing import Dealing
from ..plan.job import Job
from ..plan.plan import gathered
from ..plan.planner import make_plan
from ..plan.sharding import default_lengths, joined, make_shards, shard_length
from ..plan.sizes import Sizes, Traits
from .clock import Hardware
from .ledger import Peak, attention_memory

# A large job is replaced by two small ones, with so many ranks. One number is even and one is odd, since the largest
# rank of a zigzag depends on that: the two spans in its middle may share a segment or not.
FEW = (12, 13)
# Bounds of estimate / exact in 1,000 random jobs of each kind. For memory all ratios are above the first (the least is
# 0.97), and 95 % are below the second. For time the bounds are the 5th and the 95th percentile.
# Evidence: benchmarks/results/estimates.json.
MEMORY_ERRORS, TIME_ERRORS, TIME_ERRORS_OF_HOSTS = (0.95, 1.2), (0.68, 1.06), (0.75, 1.23)

ERRORS_TEXT = (
    "about: estimated. In random jobs, memory was at least {:g} times that of the plans, and in 19 of 20 jobs at most "
    "{:g} times. Time was {:g} to {:g} times that of the plans in 9 of 10 jobs. With two networks it was {:g} to {:g}"
).format(*MEMORY_ERRORS, *TIME_ERRORS, *TIME_ERRORS_OF_HOSTS)


def peak_memory(
    counter: Counter, counted: JobCount, sizes: Sizes, traits: Traits, *, dealing: Dealing | None, is_gathered: bool
) -> Peak:
    """The memory of an imagined rank with the longest shard and the largest buffers of all ranks.

    Its tiles come from the plans of jobs of few ranks (`_few`). Its buffers have the sizes that were counted.
    is_gathered: the rank holds all received chunks at the same time, as after an all-gather.
    """
    job = counter.job
    jobs = [job] if job.num_ranks <= max(FEW) else list(_few(job, counted))
    plans = [make_plan(small, rank) for small in jobs for rank in range(small.num_ranks)]
    buffer = max(counted.buffers)
    received_and_home = {(buffer, buffer)}
    if is_gathered:  # another rank may hold most at each moment: keep the pairs that are largest by one of the weights
        plans = [gathered(plan) for plan in plans]
        moved = list(zip(counted.received, _coming_home(counted, is_causal=job.pattern.is_causal), strict=True))
        weights = ((1, 0), (0, 1), (1, 1), (sizes.itemsize + sizes.sum_itemsize, sizes.sum_itemsize))
        received_and_home = {max(moved, key=lambda pair: pair[0] * a + pair[1] * b) for a, b in weights}
    found = []
    for plan, (received, home) in product(plans, received_and_home):
        plan = replace(plan, chunk_size=buffer, received_size=received, home_size=home)
        found.append(attention_memory(plan, sizes, traits, dealing).forward_backward)
    return max(found, key=lambda peak: peak.num_bytes)


def _coming_home(counted: JobCount, *, is_causal: bool) -> list[int]:
    """For each rank, the rows of gradients that it receives: one for each own row, from each rank that uses the row."""
    found: dict[tuple[int, int], list[tuple[int, Share]]] = defaultdict(list)
    for rank, own in enumerate(counted.shares):
        for share in own:
            found[share.place].append((rank, share))
    coming = [0] * len(counted.shares)
    for place, shares in found.items():
        if not counted.segments[place].received:
            continue
        lasts = sorted([share.starts[-1] for _, share in shares])
        for rank, (_, starts, _, rows, _) in shares:
            if not is_causal:
                coming[rank] += (len(lasts) - 1) * sum(rows)
                continue
            for start, num in zip(starts, rows, strict=True):
                coming[rank] += num * (len(lasts) - bisect_right(lasts, start) - (start < starts[-1]))
    return coming


def most_sharing(counted: JobCount) -> dict[int, int]:
    """By branch, the most ranks that share a segment whose rows are sent. Branches that send nothing are left out."""
    # A dict keeps the last value of a key: in sorted pairs, the largest.
    return dict(sorted({(branch, x.sharers) for (branch, _), x in counted.segments.items() if x.received}))


def _few(job: Job, counted: JobCount) -> Iterator[Job]:
    """Small jobs, of FEW ranks, whose shards are as long as the longest shard of the job.

    A segment that is the whole sequence stays the whole sequence. Any other becomes at most about half of it. Its end
    stays inside a shard if it lay inside one. A segment that straddles shards still does.
    """
    length, longest = max(map(shard_length, job.shards)), max(b - a for a, b in pairwise(job.borders))
    name = "zigzag" if any(len(shard) > 1 for shard in job.shards) else "contiguous"
    rates = [min(rate, length) for rate in job.pattern.dilation_rates]  # so that the shorter segments keep rows
    sharing, job_len = most_sharing(counted), job.seq_len
    for num_ranks in FEW:
        seq_len, segments = num_ranks * length, []
        for branch, w in enumerate(job.pattern.segment_lengths):
            is_whole = min(w, longest) >= job_len
            w = seq_len if is_whole else min(w, longest, num_ranks // 2 * length + w % length)
            if sharing.get(branch, 1) > 2:
                w = max(w, 3 * length + w % length)
            segments.append(w + 1 if length % w == 0 and branch in sharing else w)
        shards = make_shards(name, default_lengths(name, seq_len, num_ranks))
        if len(job.shards[-1]) == 1:  # with 2-D meshes, the last shard of a zigzag is one span
            shards = tuple(map(joined, shards))
        pattern = replace(job.pattern, segment_lengths=segments, dilation_rates=rates)
        yield job._replace(pattern=pattern, shards=shards, documents=None)


def step_seconds(counter: Counter, counted: JobCount, sizes: Sizes, hardware: Hardware) -> tuple[float, float]:
    """The seconds of the slowest rank in a step, and the most seconds that a rank computes.

    Only some ranks are timed: the one that computes most, the one that receives most, and the first and last rank on
    the hosts of these two.
    """
    ranks = {column.index(max(column)) for column in (counted.pairs, counted.received)}
    if size := hardware.gpus_per_host:
        ranks |= {min(rank // size * size + x, counter.job.num_ranks - 1) for rank in ranks for x in (0, size - 1)}
    loads = [_work_of(counter, counted, rank, hardware) for rank in ranks]
    seconds = max(_rank_seconds(*load, sizes, hardware, counter.job.num_ranks) for load in loads)
    calls = [own.calls + sum(hops * load.calls for hops, load in rings.items()) for own, rings in loads]
    work = zip(ranks, calls, strict=True)
    return seconds, max(hardware.work_seconds(counted.pairs[rank], sizes, num) for rank, num in work)


def _rank_seconds(own: "_Load", rings: dict[int, "_Load"], sizes: Sizes, hardware: Hardware, num_ranks: int) -> float:
    """Seconds of a rank's forward and backward, if it has equal work in all hops of a ring.

    After the handshake it computes with its own keys, while the first chunk arrives. While it computes one chunk, it
    receives the next: a hop takes as long as the longer of the two. Messages of the backward include gradients.
    """
    seconds, latency = 0.0, hardware.network(0, num_ranks - 1)[1]
    for is_backward in (False, True):
        passing = sizes.unit * (sizes.itemsize + is_backward * sizes.sum_itemsize)

        def work(load: _Load, is_backward: bool = is_backward) -> float:
            return hardware.stage_seconds(load.pairs, sizes, load.calls, backward=is_backward)

        first = sum(load.seconds_a_byte for load in rings.values()) * sizes.unit * sizes.itemsize
        arrives = first + latency if rings else 0.0
        total, before = hardware.handshake(num_ranks) + max(work(own), arrives), 0
        for last in sorted(rings):
            load = _Load(*map(sum, zip(*(load for hops, load in rings.items() if hops >= last), strict=True)))
            total += (last - before) * max(work(load), load.seconds_a_byte * passing + latency)
            before = last
        seconds += total
    return seconds


class _Load(NamedTuple):
    """Pairs, kernel calls, and the seconds in which the rows arrive over the slowest network, per byte of a unit."""

    pairs: float = 0.0
    calls: int = 0
    seconds_a_byte: float = 0.0


def _work_of(counter: Counter, counted: JobCount, rank: int, hardware: Hardware) -> tuple[_Load, dict[int, _Load]]:
    """A rank's load with its own keys; and, by the number of hops of a ring, its load in one hop of such rings."""
    job = counter.job
    heads = job.num_heads, job.num_kv_heads, job.held
    calls = [len(job.pattern.head_groups(branch, *heads)) for branch in range(len(job.pattern.branches))]
    own = _Load(counted.pairs[rank], sum(calls))
    rings: dict[int, _Load] = {}
    for (branch, origin), _, num_pairs, rows, received in counted.shares[rank]:
        segment = counted.segments[branch, origin]
        if not segment.received:
            continue
        each = sum(rows) / 2 / counter.keys[branch].num  # the mean number of the rank's own rows in a phase
        home = counter.queries[branch].num * each * ((each + 1) / 2 if job.pattern.is_causal else each)
        hops, remote = segment.sharers - 1, max(0.0, num_pairs - home)
        own = own._replace(pairs=own.pairs - remote)
        hop, passed = rings.get(hops, _Load()), received / hops / hardware.network(segment.first, segment.last)[0]
        rings[hops] = _Load(hop.pairs + remote / hops, hop.calls + calls[branch], hop.seconds_a_byte + passed)
    return own, rings
