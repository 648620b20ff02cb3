"""What `rda plan` says of shardings and `rda plan compare` recommends, in random jobs, by plans and clock."""

import random
import re

import pytest
from helpers import said_of

from ring_dilated_attention.commands import cli
from ring_dilated_attention.commands.hardware import Machine, as_toml
from ring_dilated_attention.forecast.call_cost import all_plans
from ring_dilated_attention.forecast.clock import Hardware, model_step, time_text
from ring_dilated_attention.forecast.exchanges import ALIKE, Call, ways_of
from ring_dilated_attention.forecast.ledger import attention_memory
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import Cut
from ring_dilated_attention.plan.sizes import Sizes

TIME = ("--flops", "1e9", "--bandwidth", "1e8", "--latency", "1e-4")


@pytest.mark.parametrize("seed", range(16))
def test_what_is_recommended_is_so(seed, tmp_path, capsys):
    """Random jobs: the plans and the clock of all ranks say what is fastest, what fits, and by how much."""
    rng = random.Random(seed)
    n, ranks, heads = rng.randint(300, 900), rng.choice([2, 3, 4]), rng.choice([1, 2, 4])
    w, r, is_causal, head_dim = rng.randint(20, n), rng.randint(1, 6), rng.random() < 0.6, rng.choice([8, 16])
    flops, rate, latency = 10 ** rng.uniform(8.5, 11), 10 ** rng.uniform(6, 9), rng.choice([0, 1e-5])
    memory = rng.choice([10**12, rng.randint(200_000, 900_000), 1000])
    argv = f"plan compare --seq-len {n} --ranks {ranks} --segment-lengths {w} {n} --dilation-rates 1 {r}"
    argv += f" --heads {heads} --head-dim {head_dim} --memory {memory} --hardware {tmp_path}/h.toml"
    hosts = rng.choice([{}, {"gpus_per_host": 2, "host_bytes_per_second": 8 * rate, "host_latency_seconds": 1e-6}])
    hardware = Hardware(flops, rate, latency, **hosts)
    (tmp_path / "h.toml").write_text(as_toml(Machine(hardware, 4, None, "mine"), []))
    assert cli.main([*argv.split(), *["--causal"] * is_causal]) == 0
    said = said_of(capsys)
    pattern, sizes, costs = DilatedPattern((w, n), (1, r), is_causal=is_causal), Sizes(1, head_dim, 4), {}
    for one in ways_of(Call(pattern, n, ranks, heads, heads, sizes), hardware):
        if one.function == "dense" or (one.way.exchange == "all_to_all" and heads % ranks):
            continue
        job = Call(pattern, n, ranks, heads, heads, sizes).job(one.sharding, one.way.inner)
        plans = all_plans(job, one.way)
        dealings = [x.dealing for x in plans if x.dealing is not None]
        step = model_step([x.plan for x in plans], sizes, hardware, dealings or None)
        peaks = [attention_memory(x.plan, sizes, TRAITS["cpu"], x.dealing).forward_backward.num_bytes for x in plans]
        sent = max(sum(x.bytes_sent(sizes, backward=b) for b in (False, True)) for x in plans)
        costs[one.name, one.sharding] = step.step_seconds, sent, max(peaks), step.balance
    fitting = {name: cost for name, cost in costs.items() if cost[2] <= memory}
    found = re.search(r"recommended: (?:(.+), (\w+) shards: )?(.*)", said)
    if not fitting:
        (name, sharding), least = min(costs.items(), key=lambda x: x[1][2])
        assert found[3].startswith(f"none fits: the least, {name} {sharding}, holds {least[2] / 1e6:,.1f} MB")
        return
    fastest = min(cost[0] for cost in fitting.values())
    alike = {name: cost for name, cost in fitting.items() if cost[0] <= ALIKE * fastest}
    best = fitting[found[1], found[2]]
    assert best in alike.values()
    assert best[1] == min(cost[1] for cost in alike.values())
    others = {name: cost for name, cost in fitting.items() if name not in alike}
    longer = re.search(
        r"; (\S+|2-D, \d+ deal) (\w+) would take ([\d,]+)% longer( \(its work is less balanced\))?", found[3]
    )
    assert (longer is None) == (not others)
    if others:
        second = others[longer[1], longer[2]]
        assert second[0] == min(cost[0] for cost in others.values())
        assert longer[3] == f"{100 * (second[0] / best[0] - 1):.0f}"
        assert (longer[4] is not None) == (second[3] < 0.95 * best[3])
    ways = "another way" if len(alike) == 2 else f"{len(alike) - 1} other ways"
    assert found[3].startswith("the fastest" if len(alike) == 1 else f"as fast as {ways}, and of ")
    assert ("sends and holds least" in found[3]) == (len(alike) > 1 and best[2] == min(x[2] for x in alike.values()))


@pytest.mark.parametrize("seed", range(12))
def test_what_is_said_of_shardings_is_the_plans(seed, capsys):
    """Random jobs, timed or not: balance, bytes, times and the verdict, by plans and clock of all ranks."""
    rng = random.Random(seed)
    n, ranks, kv_heads = rng.randint(300, 2000), rng.randint(2, 6), rng.choice([1, 2])
    w, r, is_causal = rng.randint(20, n), rng.randint(1, 6), rng.random() < 0.7
    documents = rng.choice([None, [n // 3, n - n // 3]])
    argv = f"plan --seq-len {n} --ranks {ranks} --segment-lengths {w} {n} --dilation-rates 1 {r} --heads 2 --head-dim 8"
    argv += f" --exchange ring --kv-heads {kv_heads}{' --causal' * is_causal}"
    argv += f" --documents {' '.join(map(str, documents))}" if documents else ""
    is_timed = seed % 2 == 0
    assert cli.main([*argv.split(), *(TIME if is_timed else ())]) == 0
    said = said_of(capsys).partition("balance by sharding, with near-equal shards: ")[2]
    borders, rows = documents and (0, documents[0], n), []
    names = ["contiguous", "zigzag", *["zigzag_documents"] * (documents is not None)]
    for sharding in names:
        cut = Cut(sharding, ranks)
        shards = cut.shards_of(cut.default_lengths(n, borders), borders)
        job = Job(DilatedPattern((w, n), (1, r), is_causal=is_causal), shards, 2, kv_heads, borders)
        plans, sizes = [make_plan(job, rank) for rank in range(ranks)], Sizes(1, 8, 4)
        work = [plan.pairs for plan in plans]
        sent = max(sum(plan.bytes_sent(*sizes[:3], backward=b) for b in (False, True)) for plan in plans)
        rows.append(
            (sum(work) / ranks / max(work), sent, model_step(plans, sizes, Hardware(1e9, 1e8, 1e-4)).step_seconds)
        )
    told = (
        f"{name} {balance:.1%} ({sent / 1e6:,.1f} MB sent at most{f', {time_text(time)} modelled' * is_timed})"
        for name, (balance, sent, time) in zip(names, rows, strict=True)
    )
    costs = [time if is_timed else 1 / balance for balance, _, time in rows]
    bytes_sent = [sent for _, sent, _ in rows]
    if any(cost > 1.001 * min(costs) for cost in costs):
        best = next(name for name, cost in zip(names, costs, strict=True) if cost <= 1.001 * min(costs))
        verdict = f"{best} is the {'best' if documents else 'better'} one here"
    else:
        verdict = "equally fast" if is_timed else "equally balanced"
        if len(set(bytes_sent)) > 1:
            verdict += f", and {names[bytes_sent.index(min(bytes_sent))]} sends less"
    assert said == f"{', '.join(told)}: {verdict}"
