"""Two networks, inside a host and between hosts: models, meshes, hardware files and what the commands say."""

import json
from dataclasses import replace
from math import gcd

import pytest

from ring_dilated_attention.commands import cli
from ring_dilated_attention.commands.hardware import PRESETS, as_toml, machine_of
from ring_dilated_attention.forecast import training_cost as planned
from ring_dilated_attention.forecast.clock import Hardware
from ring_dilated_attention.kernels.traits import TRAITS
from ring_dilated_attention.pattern import DilatedPattern

MODEL = ["plan", "model", "--layers", "2", "--embed-dim", "64", "--heads", "4", "--seq-len", "4Ki", "--causal"]
MODEL += ["--segment-lengths", "256", "4Ki", "--dilation-rates", "1", "8"]
HOSTS = Hardware(1e12, 1e9, 1e-5, gpus_per_host=8, host_bytes_per_second=1e10, host_latency_seconds=1e-6)


def test_gradients_are_summed_in_hosts_first():
    """By hand, 64 ranks in hosts of 8: a pass moves 7/8 of the bytes inside and (1/8 - 1/64) between; 3 hosts of 6."""
    assert planned.seconds_a_byte(64, HOSTS) == pytest.approx(7 / 8 / 1e10 + 7 / 64 / 1e9)
    assert planned.seconds_a_byte(18, HOSTS._replace(gpus_per_host=6)) == pytest.approx(5 / 6 / 1e10 + 2 / 18 / 1e9)
    for num_ranks in (1, 5, 8):
        assert planned.seconds_a_byte(num_ranks, HOSTS) == planned.seconds_a_byte(num_ranks, Hardware(1e12, 1e10))
    for num_ranks in (1, 5, 64):
        one = HOSTS._replace(gpus_per_host=None)
        assert planned.seconds_a_byte(num_ranks, one) == (1 - 1 / num_ranks) / 1e9
        same = HOSTS._replace(host_bytes_per_second=1e9)
        assert planned.seconds_a_byte(num_ranks, same) == pytest.approx((1 - 1 / num_ranks) / 1e9)


def test_latency_inside_hosts_is_at_most_that_between(tmp_path):
    """Catches a file that does not say it, and plans 0 s."""
    file = tmp_path / "hosts.toml"
    network = "bytes_per_second = 1e9\nlatency_seconds = 1e-5\ngpus_per_host = 8\nhost_bytes_per_second = 1e10\n"
    file.write_text(f"[hardware]\nflops_per_second = 1e12\n{network}")
    assert machine_of(str(file)).hardware.network(0, 7) == (1e10, 1e-5)


@pytest.mark.parametrize(
    ("mesh", "inside", "between"),
    [
        ((4, 12, 1), 2 * 7 / 8, 2 * (1 / 8 - 1 / 48)),
        ((4, 12, 4), 3 * 3 / 4 + 2 / 4 * 1 / 2, 2 / 4 * (1 / 2 - 1 / 12)),  # two of a shard's twelve ranks on a host
        ((4, 12, 16), 3 * 7 / 8, 3 * (1 / 8 - 1 / 16) + 2 / 16 * (1 - 1 / 3)),
        ((4, 12, 48), 3 * 7 / 8, 3 * (1 / 8 - 1 / 48)),
        ((2, 3, 3), 3 * 2 / 3 + 2 / 3 * 1 / 2, 0),  # all on one host
    ],
)
def test_states_are_gathered_where_they_are_cut(mesh, inside, between):
    """By hand, over hosts of 8. Catches gathers over all ranks where fewer share the states."""
    shape = planned.Shape(1, 8, 8, 8, 1, 1)
    job = planned.ModelJob(shape, DilatedPattern((64,), (1,)), 64, 1, planned.Mesh(*mesh))
    expected = 4 * shape.num_parameters * (inside / 1e10 + between / 1e9)
    assert planned.gradient_seconds(job, HOSTS) == pytest.approx(expected)
    one = Hardware(1e12, 1e9)
    shards, others = mesh[2], mesh[0] * mesh[1] // mesh[2]
    passes = 3 * (1 - 1 / shards) + 2 / shards * (1 - 1 / others)
    assert planned.gradient_seconds(job, one) == pytest.approx(4 * shape.num_parameters * passes / 1e9)


@pytest.mark.parametrize(
    ("mesh", "size"),
    [((1, 12), 8), ((4, 8), 8), ((4, 16), 8), ((4, 4), 4), ((4, 12), 4), ((4, 3), 1), ((2, 3), 8), ((2, 4), 8)],
)
def test_ranks_of_a_sequence_share_hosts_where_all_sequences_do(mesh, size):
    """Sequences one after another over hosts of 8: of 12 ranks each, all begin at a half of a host, and so on. Catches
    a sequence that is timed as if it lay inside a host, when another one lies across two."""
    job = planned.ModelJob(planned.Shape(1, 8, 8, 8, 1, 1), DilatedPattern((64,), (1,)), 64, 1, planned.Mesh(*mesh))
    found = planned.of_a_group(job.mesh.sequence, job.mesh, HOSTS)
    assert found.gpus_per_host == size
    data, ranks = mesh
    for a in range(ranks):
        for b in range(ranks):
            slowest = min(HOSTS.network(ranks * i + a, ranks * i + b)[0] for i in range(data))
            assert found.network(a, b)[0] <= slowest
    assert planned.attention_of(job, hardware=HOSTS).time == planned.attention_of(job, hardware=found).time


def test_the_fewest_ranks_fill_hosts():
    """Whatever the mesh and the memory: the ranks are whole hosts, they fit, and one host fewer does not."""
    shape, traits = planned.Shape(2, 64, 256, 256, 4, 4), TRAITS["cpu"]
    for mesh, room in (((1, 1, 1), 3e6), ((3, 2, 1), 3e6), ((2, 1, 2), 2e6), ((2, 1, 2), 7e5), ((4, 4, 16), 7e5)):
        job = planned.ModelJob(shape, DilatedPattern((64, 1024), (1, 8)), 1024, 1, planned.Mesh(*mesh))
        free, full = (planned.smallest_mesh(job, "checkpointed", traits, int(room), size) for size in (1, 8))
        assert full.num_ranks % 8 == 0
        assert full.num_ranks >= free.num_ranks
        assert planned.model_memory(replace(job, mesh=full), "checkpointed", traits).total <= room
        unit = 8 // gcd(8, mesh[0])
        assert full.sequence == -(-free.sequence // unit) * unit


def test_two_networks_by_the_command(tmp_path, capsys):
    """h100 has both; in one host it is h100-nvlink, and in hosts of one GPU h100-infiniband."""
    argv = [*MODEL, "--dtype", "bfloat16", "--json", "--mesh", "2x4", "--hardware"]

    def steps(*more):
        assert cli.main([*argv, *more]) == 0
        return [row["step"] for row in json.loads(capsys.readouterr().out)["memory"].values()]

    assert steps("h100") == steps("h100-nvlink")
    assert steps("h100", "--gpus-per-host", "1") == steps("h100-infiniband")
    assert steps("h100-nvlink") != steps("h100", "--gpus-per-host", "4") != steps("h100-infiniband")
    file = tmp_path / "hosts.toml"
    file.write_text(as_toml(PRESETS["h100"], []))
    assert machine_of(str(file)).hardware == PRESETS["h100"].hardware
    assert steps(str(file)) == steps("h100")
    assert cli.main([*argv[:-4], "--mesh", "2x4x8", "--hardware", "h100", "--gpus-per-host", "4"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    words = " ".join(out.split())
    assert "360 GB/s one way inside hosts of 4 GPUs, latency 4 µs, 40.0 GB/s one way between hosts, latency 4 " in words
    assert "sum of gradients: with the gathers of parameters (FSDP)" in words
    assert "parameters, gradients and optimiser in float32, activations in bfloat16" in words
    assert cli.main([*MODEL, "--mesh", "2x4", "--dtype", "float64", "--flops", "1e12", "--bandwidth", "1e9"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "parameters, gradients and optimiser in float64, activations in float64" in words
    assert "gathers of parameters" not in words
    assert "hosts" not in words


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--hardware", "h100-nvlink", "--gpus-per-host", "4"],
            "gpus_per_host 4 and host_bytes_per_second None: a file of",
        ),
        (
            ["--flops", "1T", "--bandwidth", "1G", "--gpus-per-host", "4"],
            "a file of --hardware gives both, as h100 does, or",
        ),
        (["--hardware", "h100", "--gpus-per-host", "0"], "--gpus-per-host 0 must be from 1 to 1e+06 GPUs on a host"),
        (
            ["--hardware", "file", "host_bytes_per_second = 1e10"],
            "gpus_per_host None and host_bytes_per_second 1",
        ),
        (["--hardware", "file", "gpus_per_host = 8"], "gpus_per_host 8 and host_bytes_per_second None"),
        (["--hardware", "file", "gpus_per_host = 2.5"], "gpus_per_host = 2.5 must be a plain number of GPUs on a host"),
        (["--hardware", "file", "gpus_per_host = true"], "gpus_per_host = True must be a plain number"),
        (["--hardware", "file", "gpus_per_host = 0"], "gpus_per_host = 0 must be positive"),
        (["--hardware", "file", "host_latency_seconds = 4"], "host_latency_seconds = 4 seems to be in another unit"),
    ],
)
def test_half_of_two_networks_is_refused(more, message, tmp_path, capsys):
    if more[1] == "file":
        (tmp_path / "h.toml").write_text(f"[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\n{more[2]}\n")
        more = ["--hardware", str(tmp_path / "h.toml"), "--dtype", "float32"]
    assert cli.main([*MODEL, "--dtype", "bfloat16", "--mesh", "2x4", *more]) == 2
    assert message in capsys.readouterr().err
