"""Random jobs whose estimates, as of many ranks, are compared with the plans and the clock of all their ranks.

    python tests/forecast/estimates.py --seed 0 --number 1000 --record benchmarks/results/estimates.json

The same seed and number give the same jobs. docs/planning.md and forecast/large.py quote the record, and
test_forecast.py compares them. The exit status is 1 if an estimated memory is more than 5 % below the planned one.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for what tests share

import pytest
from kept_record import add_record, kept_record

from ring_dilated_attention.forecast import call_cost
from ring_dilated_attention.forecast.call_cost import Figures, Way, count, forecast
from ring_dilated_attention.forecast.clock import Hardware
from ring_dilated_attention.forecast.large import MEMORY_ERRORS
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.sharding import Cut
from ring_dilated_attention.plan.sizes import Sizes, Traits

RandomHardware = Callable[[random.Random, Job, Sizes], Hardware]


def random_job(rng: random.Random, way: Way | None = None) -> tuple[Job, Way, Sizes]:
    """9 to 40 ranks, near-equal, aligned or in zigzag, with up to four branches and packed documents or none."""
    num_ranks, each = rng.choice([9, 12, 16, 24, 40]), rng.choice([32, 50, 64, 100, 256])
    n = num_ranks * each + rng.choice([0, 0, rng.randrange(num_ranks)])
    num_branches = rng.randint(1, 4)
    lengths = [
        rng.choice([n, 2**62, each * 2 ** rng.randint(0, 6) // 4, rng.randint(each // 2, n)])
        for _ in range(num_branches)
    ]
    rates = [rng.choice([1, 2, 4, 8, 16, 3, rng.randint(1, 40)]) for _ in range(num_branches)]
    num_kv_heads = rng.choice([1, 2, 4, 8])
    num_heads = num_kv_heads * rng.choice([1, 1, 2])
    heads = "split" if num_heads >= num_branches and rng.random() < 0.2 else "all"
    inner = [i for i in (2, 4) if num_ranks % i == 0 and num_kv_heads % i == 0]
    ways = [Way(), Way("all_gather"), *(Way("ring", i) for i in inner)]
    way = rng.choice(ways) if way is None else way
    documents = None
    if rng.random() < 0.3:
        documents = (0, *sorted(rng.sample(range(1, n), rng.choice([1, 2, 5, 20]))), n)
    sharding = rng.choice(["contiguous", "zigzag"])
    align = rng.choice([1, 1, 16]) if sharding == "contiguous" and way.inner == 1 else 1
    cut = Cut(sharding, num_ranks, align=align, inner=way.inner)
    pattern = DilatedPattern(lengths, rates, is_causal=rng.random() < 0.6, heads=heads)
    job = Job(pattern, cut.shards_of(cut.default_lengths(n)), num_heads, num_kv_heads, documents)
    return job, way, Sizes(1, 64, rng.choice([2, 4]))


def random_hardware(rng: random.Random, job: Job, sizes: Sizes) -> Hardware:
    """Messages that take from a thirtieth of the time of computing up to thirty times as long."""
    found = count(job, Way())
    flops = 10 ** rng.uniform(9, 15)
    computing = 14 * 64 * sum(found.pairs) / flops
    rows = sum(share.sent for share in found.branches)
    rate = rows * 64 * (2 * sizes.itemsize + sizes.sum_itemsize) / computing * 10 ** rng.uniform(-1.5, 1.5)
    latency = rng.choice([0, computing / job.num_ranks * 10 ** rng.uniform(-3, -0.5)])
    return Hardware(flops, rate, latency, rng.choice([None, flops / 2]))


def random_hosts(rng: random.Random, job: Job, sizes: Sizes) -> Hardware:
    """Two networks: hosts of several ranks, in which messages are faster."""
    slow = random_hardware(rng, job, sizes)
    return slow._replace(
        gpus_per_host=rng.choice([2, 3, 4, 8]),
        host_bytes_per_second=8 * slow.bytes_per_second,
        host_latency_seconds=slow.latency_seconds / 2,
    )


def uneven_job(rng: random.Random) -> tuple[Job, Way, Sizes, Traits]:
    """65 to 80 ranks, whose longest shard and largest chunk need not be of one rank."""
    num_ranks, each = rng.choice([65, 70, 80]), rng.choice([8, 16])
    lengths = [each] * num_ranks
    for rank in rng.sample(range(num_ranks), rng.choice([1, 5, num_ranks])):
        lengths[rank] = rng.randrange(3 * each)
    n, num_kv_heads = sum(lengths), rng.choice([1, 2])
    pattern = DilatedPattern([rng.choice([n, rng.randint(each // 2, 8 * each)])], [rng.choice([1, 2, 3, 8, 39])])
    pattern = replace(pattern, is_causal=rng.random() < 0.5)
    way = rng.choice([Way(), Way("all_gather")])
    job = Job(pattern, Cut("contiguous", num_ranks).shards_of(lengths), num_kv_heads, num_kv_heads)
    return job, way, Sizes(1, 64, 2), TRAITS[rng.choice(["cpu", "sdpa"])]


def both(job: Job, way: Way, sizes: Sizes, **given: Any) -> tuple[Figures, Figures]:
    """The estimated figures, and those of the plans of all ranks."""
    with pytest.MonkeyPatch.context() as most_planned:
        most_planned.setattr(call_cost, "MOST_PLANNED", 1)
        found = forecast(job, way, sizes, **given)
        most_planned.setattr(call_cost, "MOST_PLANNED", job.num_ranks)
        return found, forecast(job, way, sizes, **given)


def sending_job(rng: random.Random, way: Way | None = None) -> tuple[Job, Way, Sizes, Traits]:
    """A random job in which something is sent."""
    while True:
        job, one, sizes = random_job(rng, way)
        if any(share.sent for share in count(job, Way()).branches):
            return job, one, sizes, TRAITS[rng.choice(["cpu", "sdpa"])]


def timed_estimates(
    rng: random.Random, number: int, hardware: RandomHardware = random_hardware
) -> Iterator[tuple[Figures, Figures]]:
    """(estimate, exact) figures of so many random jobs, with their time."""
    for _ in range(number):
        job, way, sizes, _ = sending_job(rng, Way())
        yield both(job, way, sizes, hardware=hardware(rng, job, sizes))


def memory_ratio(make: Callable[[random.Random], tuple[Job, Way, Sizes, Traits]], rng: random.Random) -> float:
    job, way, sizes, traits = make(rng)
    found, exact = both(job, way, sizes, traits=traits)
    return found.peak_bytes / exact.peak_bytes


def time_ratio(hardware: RandomHardware, rng: random.Random) -> float:
    [(found, exact)] = timed_estimates(rng, 1, hardware)
    return found.seconds / exact.seconds


KINDS: dict[str, Callable[[random.Random], float]] = {
    "memory, near-equal shards": partial(memory_ratio, sending_job),
    "memory, uneven shards": partial(memory_ratio, uneven_job),
    "time": partial(time_ratio, random_hardware),
    "time, two networks": partial(time_ratio, random_hosts),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=100, help="jobs of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    add_record(parser)
    arguments = parser.parse_args()
    keep = kept_record(parser, arguments.record, "estimates", "tests/forecast/estimates.py", seed=arguments.seed)
    rows = []
    for kind in arguments.kinds:
        rng = random.Random(f"{arguments.seed} {kind}")
        ratios = sorted(KINDS[kind](rng) for _ in range(arguments.number))
        twentieths = quantiles(ratios, n=20, method="inclusive")
        found = {"least": ratios[0], "5 %": twentieths[0], "median": twentieths[9], "95 %": twentieths[18]}
        rows.append({"kind": kind, "number": arguments.number, "estimate_over_exact": found | {"most": ratios[-1]}})
        print(kind, arguments.number, *(f"{name} {ratio:.3f}" for name, ratio in found.items()), flush=True)
    keep(rows)
    memory = [row["estimate_over_exact"]["least"] for row in rows if "memory" in row["kind"]]
    return 1 if min(memory, default=1.0) < MEMORY_ERRORS[0] else 0


if __name__ == "__main__":
    sys.exit(main())
