"""A whole model, planned: parameters, what is saved, mesh and time; hardware files; and the alternatives."""

import json
import math
import random
import re
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import said_of
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure import flops_of
from ring_dilated_attention.commands import cli
from ring_dilated_attention.commands.hardware import PRESETS, Machine, as_toml, machine_of
from ring_dilated_attention.commands.numbers import size_text
from ring_dilated_attention.forecast import call_cost, large
from ring_dilated_attention.forecast import training_cost as planned
from ring_dilated_attention.forecast.clock import Hardware, model_step, time_text
from ring_dilated_attention.forecast.ledger import attention_memory
from ring_dilated_attention.forecast.training_cost import Mesh, ModelJob, Shape, model_memory
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.models import recompute
from ring_dilated_attention.models.longnet import LongNetLM
from ring_dilated_attention.models.longnet_config import LongNetConfig
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharding import default_lengths, make_shards

SMALL = dict(num_layers=3, embed_dim=48, num_heads=4, num_kv_heads=2, ffn_dim=80)


def drawn(seed):
    """A small model's sizes."""
    rng = random.Random(seed)
    heads = rng.choice((2, 4, 6))
    kv_heads = rng.choice([k for k in (1, 2, 3, 6) if heads % k == 0])
    sizes = dict(num_layers=rng.randint(1, 3), embed_dim=heads * rng.choice((8, 16)), ffn_dim=rng.randrange(16, 200))
    return sizes | dict(num_heads=heads, num_kv_heads=kv_heads)


LONG = DilatedPattern((2048, 30_000, 2**26), (1, 16, 1024), is_causal=True)


def job_of(fields, n, mesh=None):
    config = LongNetConfig((64, n), (1, 4), **fields)
    kv_heads = config.num_kv_heads or config.num_heads
    shape = Shape(
        config.num_layers, config.embed_dim, config.ffn_dim or 4 * config.embed_dim, 256, config.num_heads, kv_heads
    )
    return config, ModelJob(shape, config.pattern, n, 1, mesh or Mesh())


@pytest.mark.parametrize("fields", [SMALL, dict(num_layers=1, embed_dim=32, num_heads=4)])
def test_parameters_are_the_models(fields):
    config, job = job_of(fields, 512)
    assert job.shape.num_parameters == sum(x.numel() for x in LongNetLM(config).parameters())
    block = LongNetLM(config).blocks[0]
    assert job.shape.block_parameters == sum(x.numel() for x in block.parameters())


@pytest.mark.parametrize(("data", "sequence", "shards"), [(1, 1, 1), (2, 4, 1), (2, 4, 8), (1, 3, 3)])
def test_flops_and_gradients_of_a_step(data, sequence, shards):
    """By the model's own matrices, the plans of its attention and a ring's sum of gradients."""
    config, job = job_of(SMALL, 516, Mesh(data, sequence, shards))
    job, model = replace(job, batch=3), LongNetLM(config)
    entries = sum(x.numel() for x in model.parameters() if x.ndim == 2) - 256 * 48  # the embedding is no product
    cut = make_shards("contiguous", default_lengths("contiguous", 516, sequence))
    plans = [make_plan(Job(job.pattern, cut, 4, 2), rank) for rank in range(sequence)]
    attention = sum(sum(flops_of(plan, 3, 12)) for plan in plans)
    tokens = 3 * data * 516
    assert job.tokens == tokens
    assert planned.flops_of_step(job) == 6 * tokens * entries + data * 3 * attention
    for activations, again in (("kept", 0), ("checkpointed", 2), ("offloaded", 2)):
        times = planned.step_times(job, activations, Hardware(1e9, 1e6))
        in_blocks = entries - 256 * 48  # the head is not computed again
        products = 6 * tokens * entries + again * tokens * in_blocks
        assert times.matrices == pytest.approx(products / (data * sequence) / 1e9)
        passes = (3 if shards > 1 else 2) * (data * sequence - 1) / (data * sequence)
        assert times.gradients == pytest.approx(passes * 4 * job.shape.num_parameters / 1e6)


def test_the_loss_is_cut_as_in_the_model():
    assert planned.LOSS_SLICE_LOGITS == recompute.LOSS_SLICE_LOGITS
    assert planned.LOSS_SLICE_ROWS == recompute.LOSS_SLICE_ROWS


@pytest.mark.parametrize("fields", [SMALL, dict(num_layers=2, embed_dim=32, num_heads=4), *map(drawn, range(3))])
def test_activations_are_what_autograd_saves(fields):
    """Catches a tensor of a block that is forgotten, or counted twice. Storages, each once."""
    n = 1024
    config, job = job_of(fields, n)
    model = LongNetLM(config)
    known = {x.untyped_storage().data_ptr() for x in model.parameters()}
    saved, kept = {}, []

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.loss(torch.randint(256, (1, n)))
    found = model_memory(job, "kept", TRAITS["cpu"]).activations
    assert found == pytest.approx(sum(saved.values()), rel=0.01)


def held_and_working(config, n, *, checkpointing):
    """Bytes that the forward saved, and those beyond, by torch's allocator, with gradients of an earlier backward."""
    model, tokens = LongNetLM(config, activation_checkpointing=checkpointing), torch.randint(config.vocab_size, (1, n))
    model.loss(tokens).backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = model.loss(tokens)
        with record_function("the forward is done"):
            pass
        loss.backward()
    current = peak = held = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "the forward is done":
            held = current
        elif event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return held, peak - held


@pytest.mark.parametrize(
    ("embed_dim", "ffn_dim", "vocab_size", "n", "activations"),
    [
        (256, 1024, 256, 256, "kept"),  # the gradient of a matrix of the feed-forward is more than of all positions
        (256, 1024, 256, 256, "checkpointed"),
        (512, 2048, 8192, 64, "kept"),  # that of the head is more than the logits
        (256, 128, 2048, 1280, "kept"),  # and is summed over chunks
        (512, 128, 2048, 1280, "kept"),
    ],
)
def test_wide_models_on_short_shards_take_what_is_measured(embed_dim, ffn_dim, vocab_size, n, activations, monkeypatch):
    """Catches the gradient of a matrix that is forgotten while it is computed."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    sizes = dict(num_layers=1, embed_dim=embed_dim, num_heads=4, ffn_dim=ffn_dim, vocab_size=vocab_size)
    config = LongNetConfig((64, n), (1, 4), **sizes)
    job = ModelJob(Shape(1, embed_dim, ffn_dim, vocab_size, 4, 4), config.pattern, n, 1, Mesh())
    _, found = held_and_working(config, n, checkpointing=activations == "checkpointed")
    assert model_memory(job, activations, TRAITS["cpu"]).working == pytest.approx(found, rel=0.01)


def test_offloaded_activations_take_what_is_measured(monkeypatch):
    """The memory of numpy, which torch's allocator does not count, is the host's here. No copy comes back from it: that
    of one block is added to what is measured."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    on_host = []

    def to_host(x):
        on_host.append(x.detach().numpy().copy())
        return torch.from_numpy(on_host[-1])

    monkeypatch.setattr(torch.Tensor, "cpu", to_host)
    config, job = job_of(SMALL | {"num_layers": 8}, 1024)
    LongNetLM(config).loss(torch.zeros(1, 8, dtype=torch.int64)).backward()
    held, working = held_and_working(config, 1024, checkpointing="offload")
    found, moved = model_memory(job, "offloaded", TRAITS["cpu"]), sum(x.nbytes for x in on_host) // 2  # of two passes
    assert found.host == pytest.approx(moved, rel=0.01)
    assert found.activations == pytest.approx(held + moved / 8, rel=0.02)
    assert found.activations + found.working == pytest.approx(held + moved / 8 + working, rel=0.02)


def test_a_mesh_cuts_what_it_should():
    _, one = job_of(SMALL, 4096)
    _, four = job_of(SMALL, 4096, Mesh(2, 4, 8))
    a, b = (model_memory(job, "kept", TRAITS["cpu"]) for job in (one, four))
    assert b.parameters == -(-a.parameters // 8)
    assert b.optimiser == 2 * b.parameters
    assert b.activations == pytest.approx(a.activations / 4)
    offloaded = model_memory(one, "offloaded", TRAITS["cpu"])
    checkpointed = model_memory(one, "checkpointed", TRAITS["cpu"])
    each = offloaded.host // SMALL["num_layers"]  # of these the device has one
    assert offloaded.activations + offloaded.host - each == checkpointed.activations < a.activations


def test_what_fits_is_the_border():
    """A little more does not fit; nor does one rank less."""
    _, job = job_of(SMALL, 2**16, Mesh(1, 2))
    memory = total_of(job)
    assert 2**16 <= planned.longest_sequence(job, "kept", TRAITS["cpu"], memory) <= 2**16 * (1 + planned.SEARCHED_TO)
    assert planned.smallest_mesh(job, "kept", TRAITS["cpu"], memory) == Mesh(1, 2)
    assert planned.smallest_mesh(job, "kept", TRAITS["cpu"], 1000) is None
    assert planned.longest_sequence(job, "kept", TRAITS["cpu"], 1000) == 0


def test_the_search_for_the_longest_sequence_ends():
    """Catches a search without end where the job's length is no multiple of the ranks and hardly too long."""
    _, job = job_of(SMALL, 100, Mesh(1, 8))
    memory = total_of(replace(job, seq_len=88))
    assert total_of(job) > memory
    assert planned.longest_sequence(job, "kept", TRAITS["cpu"], memory) == 88


def total_of(job):
    return model_memory(job, "kept", TRAITS["cpu"]).total


@pytest.mark.parametrize(("ranks", "there"), [(6, 6), (1, 6), (7, 7), (64, 11)])
def test_the_fewest_ranks_need_not_be_a_power_of_two(ranks, there):
    """Catches eight ranks for a job that fits on its own six."""
    _, job = job_of(SMALL, 2**14, Mesh(1, ranks))
    found = planned.smallest_mesh(job, "kept", TRAITS["cpu"], total_of(replace(job, mesh=Mesh(1, there))))
    assert found is not None
    assert found.sequence == there


@pytest.mark.parametrize(
    ("mesh", "enough", "found"),
    [
        (Mesh(2, 2, 2), Mesh(2, 8, 2), Mesh(2, 8, 2)),  # as the job's
        (Mesh(2, 2, 4), Mesh(2, 8, 16), Mesh(2, 8, 16)),  # over all, as the job's
        (Mesh(1, 4, 4), Mesh(1, 8, 8), Mesh(1, 8, 8)),
        (Mesh(2, 6, 4), Mesh(2, 7, 4), Mesh(2, 8, 4)),  # 14 ranks do not divide into groups of four
    ],
)
def test_the_cut_of_the_states_stays(mesh, enough, found):
    """Catches states that are cut over more ranks than the job says, and a mesh that the command would refuse."""
    _, job = job_of(SMALL, 2**14, mesh)
    memory = total_of(replace(job, mesh=enough))
    assert planned.smallest_mesh(job, "kept", TRAITS["cpu"], memory) == found


def test_short_sequences_fit_too():
    """Catches a zero where fewer than 1,024 positions a rank would do."""
    _, job = job_of(SMALL, 2048, Mesh(1, 8))
    longest = planned.longest_sequence(job, "kept", TRAITS["cpu"], total_of(replace(job, seq_len=800)))
    assert longest == 800


def test_what_fits_is_searched_without_a_plan_of_many_ranks(monkeypatch):
    """Catches lengths and meshes for which plans of 4,096 ranks are made."""

    def few(job, rank):
        assert job.num_ranks <= call_cost.MOST_PLANNED
        return make_plan(job, rank)

    monkeypatch.setattr(large, "make_plan", few)
    for sharding in ("contiguous", "zigzag"):
        job = ModelJob(Shape(2, 64, 256, 256, 4, 4), LONG, 2**26 + 1, 1, Mesh(1, 2**12), sharding)
        assert planned.longest_sequence(job, "kept", TRAITS["cpu"], 10**9) > 2**22
        assert planned.smallest_mesh(job, "kept", TRAITS["cpu"], 10**9) is not None


@pytest.mark.parametrize("num_ranks", [24, 66])
def test_attention_holds_and_takes_what_its_plans_do(num_ranks):
    """For one layer on the ranks of a sequence; for many layers about that."""
    pattern, seq_len = DilatedPattern((700, 9000, 60000), (1, 2, 8), is_causal=True), 1000 * num_ranks + 5
    job = ModelJob(Shape(1, 64, 256, 256, 4, 4), pattern, seq_len, 1, Mesh(1, num_ranks), "zigzag")
    shards = make_shards("zigzag", default_lengths("zigzag", seq_len, num_ranks))
    plans = [make_plan(Job(pattern, shards, 4, 4), rank) for rank in range(num_ranks)]
    most = max(attention_memory(p, job.sizes, TRAITS["cpu"]).forward_backward.num_bytes for p in plans)
    hardware = Hardware(1e12, 1e9, 1e-5)
    seconds = model_step(plans, job.sizes, hardware).step_seconds
    found = planned.attention_of(job, TRAITS["cpu"], hardware)
    assert found.peak.num_bytes == pytest.approx(most, rel=0.1 if num_ranks > call_cost.MOST_PLANNED else 0)
    assert found.time.seconds == pytest.approx(seconds, rel=0.3 if num_ranks > call_cost.MOST_PLANNED else 0)
    times = planned.step_times(job, "kept", hardware)
    assert times.attention.seconds == found.time.seconds
    assert times.all.seconds == times.matrices + times.attention.seconds + times.gradients


MODEL = ["plan", "model", "--layers", "2", "--embed-dim", "64", "--heads", "4", "--seq-len", "4Ki", "--causal"]
MODEL += ["--segment-lengths", "256", "4Ki", "--dilation-rates", "1", "8"]


def drawn_model(seed):
    """Options of a small model on a mesh, the model's config, and the job."""
    rng, sizes = random.Random(seed), drawn(seed)
    branches, batch, n = rng.randint(1, 3), rng.randint(1, 3), rng.randrange(200, 3000)
    data, sequence = rng.randint(1, 3), rng.randint(1, 5)
    mesh = Mesh(data, sequence, rng.choice([k for k in range(1, 16) if data * sequence % k == 0]))
    lengths, rates = sorted(rng.sample(range(16, n), branches)), sorted(rng.sample(range(1, 17), branches))
    config, sharding = LongNetConfig(lengths, rates, **sizes), rng.choice(("contiguous", "zigzag"))
    layers, embed_dim, ffn_dim, heads, kv_heads = sizes.values()
    argv = ["plan", "model", "--layers", layers, "--embed-dim", embed_dim, "--heads", heads, "--kv-heads", kv_heads]
    argv += ["--ffn-dim", ffn_dim, "--seq-len", n, "--batch", batch, "--causal", "--sharding", sharding, "--mesh", mesh]
    argv += ["--segment-lengths", *lengths, "--dilation-rates", *rates]
    shape = Shape(layers, embed_dim, ffn_dim, 256, heads, kv_heads)
    return list(map(str, argv)), config, ModelJob(shape, config.pattern, n, batch, mesh, sharding)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_printed_of_a_model_is_that_of_its_plans(seed, capsys):
    """Random jobs: parameters and FLOPs by the model and the plans of its attention, times by the clock. The printed
    table has the same figures as the JSON."""
    argv, config, job = drawn_model(seed)
    argv += ["--flops", "1T", "--bandwidth", "1G", "--latency", "1e-5", "--tokens", "1e9", "--memory", "1G"]
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    with torch.device("meta"):
        sizes = [x.shape for x in LongNetLM(config).parameters()]
    (data, sequence, shards), ranks = job.mesh, job.mesh.data * job.mesh.sequence
    assert found["num_parameters"] == sum(map(math.prod, sizes))
    assert found["tokens_per_step"] == (tokens := job.batch * data * job.seq_len)
    cut = make_shards(job.sharding, default_lengths(job.sharding, job.seq_len, sequence))
    heads = job.shape.num_heads, job.shape.num_kv_heads
    plans = [make_plan(Job(job.pattern, cut, *heads), rank) for rank in range(sequence)]
    head_dim, layers = config.embed_dim // config.num_heads, config.num_layers
    entries = sum(math.prod(size) for size in sizes if len(size) == 2) - 256 * config.embed_dim
    attention = sum(sum(flops_of(plan, job.batch, head_dim)) for plan in plans)
    assert found["flops_per_step"] == 6 * tokens * entries + data * layers * attention
    clock = model_step(plans, job.sizes, Hardware(1e12, 1e9, 1e-5)).step_seconds
    most_rows = job.batch * -(-job.seq_len // sequence)
    # Gathers and scatters over those that share the states, and an all-reduce over those that hold the same.
    passes = 3 * (shards - 1) / shards + 2 / shards * (1 - shards / ranks)
    for name, row in found["memory"].items():
        held = [row[x] for x in ("parameters", "gradients", "optimiser", "activations", "working")]
        states = 4 * -(-found["num_parameters"] // shards)
        assert held[:3] == [states, states, 2 * states]
        assert row["total"] == sum(held)
        assert row["fits"] is True
        again = 0 if name == "kept" else 2 * (entries - 256 * config.embed_dim)  # the head is not computed again
        step = row["step"]
        assert step["matrices"] == pytest.approx(most_rows * (6 * entries + again) / 1e12)
        assert step["attention"] == pytest.approx(layers * clock)
        assert step["gradients"] == pytest.approx(passes * 4 * found["num_parameters"] / 1e9)
        assert step["seconds"] == step["matrices"] + step["attention"] + step["gradients"]
        assert row["tokens_per_second"] == pytest.approx(tokens / step["seconds"])
        assert row["training_seconds"] == pytest.approx(1e9 / tokens * step["seconds"])
    assert cli.main(argv) == 0
    out = said_of(capsys)
    columns = found["memory"].values()
    for name in ("parameters", "gradients", "optimiser", "activations", "working", "total", "host"):
        assert f" {name} {' '.join(size_text(row[name]) for row in columns)} " in out
    steps = [row["step"] for row in columns]
    for label, name in (("products with weights", "matrices"), ("attention", "attention"), ("in all", "seconds")):
        assert f" {label} {' '.join(time_text(step[name]) for step in steps)} " in out
    assert f" tokens/s {' '.join(format(row['tokens_per_second'], ',.0f') for row in columns)} " in out
    for words in ("a rank holds", "assumed of each rank: 1.00 TFLOP/s", "longest sequence"):
        assert words in out


def test_a_model_says_which_pattern_it_was_planned_with(tmp_path, capsys, monkeypatch):
    """Nobody typed the pattern of a run's folder."""
    fields = {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "seq_len": 4096}
    fields |= {"segment_lengths": [256, 4096], "dilation_rates": [1, 8]}
    command = "ring_dilated_attention.commands.plan.model"
    monkeypatch.setattr(f"{command}.find_checkpoint", lambda folder: folder)
    monkeypatch.setattr(f"{command}.read_state", lambda folder: {"hyperparameters": fields})
    assert cli.main(["plan", "model", "--config", str(tmp_path)]) == 0
    assert "\npattern: w=256, r=1; w=4096, r=8; causal\n" in capsys.readouterr().out
    assert cli.main(["plan", "model", "--config", str(tmp_path), "--json"]) == 0
    pattern = json.loads(capsys.readouterr().out)["pattern"]
    assert DilatedPattern(**pattern) == DilatedPattern([256, 4096], [1, 8], is_causal=True)


def test_memory_too_small_says_what_would_do(capsys):
    """And that does. One rank of a sequence has too little for the states alone, unless they are cut over several."""
    for mesh, memory in (("1x1", "4M"), ("2x2x2", "4M"), ("1x2", "1M"), ("1x1", "1M")):
        assert cli.main([*MODEL, "--mesh", mesh, "--memory", memory]) == 0
        out = " ".join(capsys.readouterr().out.split())
        said = re.search(r"it does not fit; --mesh (\S+) would do(?:, by an estimate)?, with activations (\w+)", out)
        assert said is not None, mesh
        is_about = Mesh(*map(int, said[1].split("x"))).sequence > call_cost.MOST_PLANNED
        assert is_about == ("by an estimate" in out) == out.endswith(large.ERRORS_TEXT)
        assert cli.main([*MODEL, "--mesh", said[1], "--memory", memory, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["memory"][said[2]]["fits"] is True
    assert cli.main([*MODEL, "--memory", "1K"]) == 0
    assert "it does not fit on any number of ranks" in capsys.readouterr().out


@pytest.mark.parametrize("mesh", ["1x8", "1x66"])
def test_estimates_of_a_model_are_marked(mesh, capsys):
    """Those of the job's own mesh, and a mesh of more than 64 ranks that was found for one of fewer."""
    argv = [*MODEL, "--seq-len", "264Ki", "--mesh", mesh, "--flops", "1T", "--bandwidth", "1G", "--memory", "36M"]
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    meshes = [row["smallest_mesh"] for row in found["memory"].values()]
    assert meshes[0]["sequence"] > call_cost.MOST_PLANNED >= meshes[2]["sequence"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    words = "(working|total|in all|attention|tokens/s|longest sequence, to 0.4%)"
    cells = dict(re.findall(rf"^{words} +(.*)$", out, re.MULTILINE))
    assert len(cells) == 6
    assert all(line.count("about ") == (3 if mesh == "1x66" else 0) for line in cells.values())
    fewest = re.search("fewest ranks for this length(.*)", out)[1].split("  ")
    assert [cell.strip() for cell in fewest if cell] == [
        "about " * (mesh["sequence"] > call_cost.MOST_PLANNED) + str(Mesh(**mesh)) for mesh in meshes
    ]
    assert " ".join(out.split()).endswith(large.ERRORS_TEXT)
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize(("memory", "steps"), [("1G", 10), ("4M", 13), ("1K", 16)])
def test_the_search_for_a_mesh_is_within_the_progress_bar(memory, steps, monkeypatch, capsys):
    """All steps are counted while the bar is open, and there are at most as many as it says."""
    seen = []

    @contextmanager
    def bar(total, *names, **options):
        done = []
        yield SimpleNamespace(update=lambda: done.append(1))
        seen.append((len(done), total))

    monkeypatch.setattr("ring_dilated_attention.commands.plan.model.progress_bar", bar)
    assert cli.main([*MODEL, "--memory", memory]) == 0
    assert seen == [(steps, 16)]


@pytest.mark.parametrize("ffn_dim", [16, 2048])
@pytest.mark.parametrize("activations", planned.ACTIVATIONS)
def test_what_is_found_without_attention_fits_with_it(ffn_dim, activations):
    """The search looks at attention only where it decides: what it finds fits, and what is next to it does not."""
    shape = planned.Shape(4, 512, ffn_dim, 256, 8, 8)
    job = planned.ModelJob(shape, DilatedPattern([64, 512, 4096], [1, 4, 16]), 4096, 1, planned.Mesh(1, 4))
    traits, room = TRAITS["cpu"], 400_000_000

    def suffices(job: planned.ModelJob) -> bool:
        return planned.model_memory(job, activations, traits).total <= room

    longest = planned.longest_sequence(job, activations, traits, room)
    assert suffices(replace(job, seq_len=longest))
    assert not suffices(replace(job, seq_len=int(longest * (1 + 2 * planned.SEARCHED_TO)) + 8))
    smallest = planned.smallest_mesh(replace(job, seq_len=longest), activations, traits, room)
    assert smallest is not None
    assert suffices(replace(job, seq_len=longest, mesh=smallest))
    fewer = smallest._replace(sequence=smallest.sequence - 1)
    assert not fewer.sequence or not suffices(replace(job, seq_len=longest, mesh=fewer))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--mesh", "2x3", "--ranks", "8"], "--mesh 2x3 has 2 * 3 = 6 ranks, and --ranks is 8"),
        (["--mesh", "1x8Ki"], "4,096 would own nothing"),
        (["--mesh", "8x"], "--mesh 8x is not DATAxSEQUENCE"),
        (["--mesh", "8"], "--mesh 8 is not DATAxSEQUENCE"),
        (["--mesh", "2x4x3"], "8 ranks do not divide into groups of 3"),
        (["--mesh", "1x8192"], "4,096 would own nothing"),
        (["--mesh", "2Mix1"], "the number of ranks of --mesh must be at most 1,048,576, got 2097152"),
        (["--mesh", "x" * 50], f"--mesh {'x' * 37}... is not DATAxSEQUENCE"),
        (["--memory", "0"], "--memory must be at least 1"),
        (["--hardware", "h200"], "--hardware h200 is no file and no preset; presets are a100-nvlink"),
    ],
)
def test_bad_meshes_are_refused(more, message, capsys):
    assert cli.main([*MODEL, *more]) == 2
    assert message in capsys.readouterr().err


def test_hardware_at_its_limits_is_taken(tmp_path):
    """A rate may be as large as the largest; a time must be shorter."""
    path = tmp_path / "h.toml"
    path.write_text("[hardware]\nflops_per_second = 1e17\nbytes_per_second = 1e14\nmemory_bytes = 1e15")
    assert machine_of(str(path))[0][:2] == (1e17, 1e14)


def test_hardware_files_come_back(tmp_path):
    machine = Machine(Hardware(1.5e11, 2e9, 3e-4, 1.2e11, 1e-5, 2e-3), 4, 10**10, 'measured on "this"')
    path = tmp_path / "here.toml"
    path.write_text(as_toml(machine, ["a note"]))
    assert machine_of(str(path)) == machine._replace(source="measured on 'this'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("flops_per_second = 1e12", "has no table [hardware]"),
        ("[hardware]\nbytes_per_second = 1e9", "lacks flops_per_second"),
        ("[hardware]\nflops_per_second = 500\nbytes_per_second = 1e9", "500 seems to be in another unit"),
        ("[hardware]\nflops_per_second = 1e12\nbytes_per_second = -1e9", "-1e+09 must be positive"),
        ('[hardware]\nflops_per_second = 1e12\nbytes_per_second = "50 GB/s"', "must be a plain number of bytes"),
        ("[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\nlatency_seconds = 25", "another unit"),
        ("[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\nlatency_seconds = 0.9", "another unit"),
        ("[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\nlatency_seconds = 0.1", "5 µs are 5e-6"),
        ("[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\ncall_seconds = 5", "another unit"),
        ("[hardware]\nflops_per_second = 1e12\nbytes_per_second = 50000", "50000 seems to be in another unit"),
        ("[hardware]\nflops_per_second = 1e12\nbytes_per_second = 4e17", "bytes in a second, one way; 50 GB/s"),
        ("[hardware]\nflops_per_second = 5e17\nbytes_per_second = 1e9", "FLOPs in a second; 500 TFLOP/s are 5e14"),
        ("[hardware]\nflops_per_second = 500_000\nbytes_per_second = 1e9", "500000 seems to be in another unit"),
        ("[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\ndtype = [1]", "dtype = [1] is unknown"),
        (f"[hardware]\nflops_per_second = 1{'0' * 400}\nbytes_per_second = 1e9", "must be a plain number"),
        ("[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\nspeed = 25", "speed is unknown"),
        ("[hardware", "cannot be read"),
    ],
)
def test_hardware_files_that_cannot_be(content, message, tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r".") as refused:
        machine_of(str(path))
    assert message in str(refused.value)


def test_presets_name_their_source_and_what_has_none():
    assert all("arXiv" in machine.source for machine in PRESETS.values())
    assert all("latency not measured here" in machine.source for machine in PRESETS.values())
    assert all("no GPU has run this library" in machine.source for machine in PRESETS.values())


def test_options_that_nobody_would_read_are_refused(capsys):
    """Catches a mesh of 64 ranks that is planned as one, and a time without the rates of a machine."""
    assert cli.main([*MODEL, "--tokens", "1e9"]) == 2
    assert "--tokens asks for a time: give --hardware" in capsys.readouterr().err
    for more in (["--picture", "x"], ["--head-dim", "16"], ["--exchange", "ring"], ["--documents", "64"]):
        with pytest.raises(SystemExit):
            cli.main([*MODEL, *more])
        assert f"unrecognized arguments: {' '.join(more)}" in capsys.readouterr().err


def test_a_runs_folder_is_causal(tmp_path, capsys, monkeypatch):
    """Catches twice the attention of a run that is planned from its own folder."""
    fields = {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "num_kv_heads": None, "seq_len": 4096}
    fields |= {"segment_lengths": [4096], "dilation_rates": [1]}
    monkeypatch.setattr("ring_dilated_attention.commands.plan.model.find_checkpoint", lambda path: path)
    monkeypatch.setattr(
        "ring_dilated_attention.commands.plan.model.read_state", lambda path: {"hyperparameters": fields}
    )
    argv = ["plan", "model", "--config", str(tmp_path), "--json"]
    assert cli.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert cli.main([*argv, "--causal"]) == 0
    assert found == json.loads(capsys.readouterr().out)
