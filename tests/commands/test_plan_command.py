"""`rda plan` and `rda plan model`: what they print, refuse and draw."""

import json
import re

import pytest
from matplotlib.image import imread

from ring_dilated_attention.commands import cli
from ring_dilated_attention.commands.console import scaled
from ring_dilated_attention.commands.hardware import Machine, as_toml, machine_of
from ring_dilated_attention.commands.plan.picture import pairs_by_branch
from ring_dilated_attention.forecast.call_cost import Exchange, PlannedCall, forecast
from ring_dilated_attention.forecast.clock import Hardware, time_text
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.reference import multiplicity

PLAN = [
    "plan",
    "--seq-len",
    "8Ki",
    "--segment-lengths",
    "1Ki",
    "8Ki",
    "--dilation-rates",
    "1",
    "8",
    "--causal",
]
MODEL = [
    "plan",
    "model",
    "--layers",
    "3",
    "--embed-dim",
    "64",
    "--heads",
    "4",
    "--seq-len",
    "8Ki",
    "--segment-lengths",
]
MODEL += ["1Ki", "8Ki", "--dilation-rates", "1", "4"]


def printed(capsys, *argv):
    assert cli.main(list(argv)) == 0
    return capsys.readouterr().out


def refused(capsys, *argv):
    assert cli.main(list(argv)) == 2
    return capsys.readouterr().err


@pytest.fixture
def slow(tmp_path):
    """A file of hardware."""
    path = tmp_path / "slow.toml"
    path.write_text("[hardware]\nflops_per_second = 1e11\nbytes_per_second = 1e9\n")
    return str(path)


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all"])
def test_the_figures_are_the_forecasts(exchange, slow, capsys):
    """In JSON, and in the text with their units."""
    argv = [
        *PLAN,
        "--ranks",
        "4",
        "--heads",
        "8",
        "--exchange",
        exchange,
        "--hardware",
        slow,
    ]
    made = json.loads(printed(capsys, *argv, "--json"))
    call = PlannedCall(
        DilatedPattern((1024, 8192), (1, 8), is_causal=True), 8192, 4, 8, 8, Sizes(1, 64, 4)
    )
    figures = forecast(
        call.job(), Exchange(exchange), call.sizes, kernel="cpu", hardware=Hardware(1e11, 1e9)
    )
    assert made["step"]["step_seconds"] == figures.seconds
    assert made["peak_bytes"] == figures.peak_bytes
    assert [row["sent"] for row in made["ranks"]] == [rank.sent for rank in figures.ranks]
    weights = [row["weight"] for row in made["ranks"]]
    assert weights == [rank.weight._asdict() for rank in figures.ranks]
    assert made["flops"] == sum(row["flops"] for row in made["ranks"]) == figures.flops
    assert len(made["alternatives"]) == 8
    out = printed(capsys, *argv)
    assert f"modelled step: {time_text(figures.seconds)} (forward " in out
    assert "exchange           sharding" in out
    for i, rank in enumerate(figures.ranks):
        cells = (str(i), f"{rank.num_rows:,}", scaled(rank.flops, "FLOP"))
        assert re.search("^" + " +".join(cells), out, flags=re.MULTILINE)


def test_many_ranks_are_about(capsys):
    argv = [
        "plan",
        "--seq-len",
        "8Ki",
        "--segment-lengths",
        "8Ki",
        "--dilation-rates",
        "1",
        "--ranks",
        "128",
    ]
    out = printed(capsys, *argv, "--hardware", "h100")
    assert "a rank holds at most about " in out
    assert "(128 ranks; shown are those that stand out)" in out
    assert "modelled step" not in out


def test_documents_reach_the_plan(capsys):
    argv = [*PLAN, "--ranks", "2", "--documents", "5000", "3192"]
    assert {
        row["sharding"] for row in json.loads(printed(capsys, *argv, "--json"))["alternatives"]
    } == {*("contiguous", "zigzag", "zigzag_documents")}
    assert "--documents add up to 9" in refused(capsys, *PLAN, "--documents", "5", "4")


def test_the_kernel_is_that_of_the_hardware(capsys):
    argv = [*PLAN, "--json"]
    on_cpu = json.loads(printed(capsys, *argv))
    assert on_cpu["kernel"] == "cpu"
    on_gpu = json.loads(printed(capsys, *argv, "--hardware", "h100"))
    assert on_gpu["kernel"] == "sdpa"
    assert on_gpu["peak_bytes"] != on_cpu["peak_bytes"]


def test_the_dtype_is_that_of_the_hardware(slow, capsys):
    held = {}
    for hardware in ("h100", slow):
        plan = json.loads(printed(capsys, *PLAN, "--hardware", hardware, "--json"))
        held[hardware] = plan["ranks"][0]["num_rows"], plan["peak_bytes"]
    assert held[slow][1] > held["h100"][1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--memory", "80"],
            "--memory 80.0 must be from 1e+06 to 1e+15 bytes; 80 GB are 8e10: which unit",
        ),
        (
            ["--latency", "4"],
            "--latency 4.0 must be from 0 to 0.1 seconds; 5 µs are 5e-6: which unit",
        ),
        (["--bandwidth", "50"], "--bandwidth 50.0 must be from 1e+06 to 1e+14 bytes in a second"),
        (["--ranks", "2Mi"], "argument --ranks: must be at most 1,048,576, got 2097152"),
        (["--sharding", "zigzag_documents"], "needs --documents"),
        (["--picture", "x.png"], "--picture shows at most 128 positions, and --seq-len is 8,192"),
    ],
)
def test_what_cannot_be_meant_is_refused(more, message, capsys):
    argv = [*PLAN, "--hardware", "h100"]
    assert message in " ".join(refused(capsys, *argv, *more).split())


def test_a_bandwidth_alone_is_no_hardware(capsys):
    assert "give --hardware too" in refused(capsys, *PLAN, "--bandwidth", "1e9")


def test_a_bandwidth_replaces_that_of_all_networks(capsys):
    argv = [*PLAN, "--ranks", "8", "--hardware", "h100", "--json"]
    given = json.loads(printed(capsys, *argv, "--bandwidth", "1G"))["hardware"]
    assert given["bytes_per_second"] == 1e9
    assert "host_bytes_per_second" not in given
    late = json.loads(printed(capsys, *argv, "--latency", "1e-5"))["hardware"]
    assert late["latency_seconds"] == late["host_latency_seconds"] == 1e-5


def test_all_meshes_are_ranked(capsys):
    made = json.loads(printed(capsys, *MODEL, "--gpus", "4", "--json"))
    meshes = [(row["mesh"]["data"], row["mesh"]["sequence"]) for row in made["meshes"]]
    assert sorted(meshes) == [(1, 4), (2, 2), (4, 1)]
    speeds = [row["tokens_per_second"] for row in made["meshes"]]
    assert speeds == sorted(speeds, reverse=True)
    assert made["kernel"] == "sdpa"


def test_the_first_line_is_the_answer(capsys):
    out = printed(capsys, *MODEL, "--gpus", "4")
    assert " ".join(out.split()).startswith(
        "No sharing of sequences is needed: each of 4 GPUs trains on sequences of its"
    )
    assert "tokens/s" in out
    assert "One GPU is enough" in printed(capsys, *MODEL)
    long = [*MODEL, "--seq-len", "1Mi", "--memory"]
    assert "GPUs share each sequence, by " in " ".join(
        printed(capsys, *long, "1G", "--gpus", "8").split()
    )
    assert "It does not fit on 2 x 20.0 MB: the least, mesh " in printed(
        capsys, *long, "20M", "--gpus", "2"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--embed-dim", "65"], "embed_dim=65 over num_heads=4"),
        (["--layers", "1e12"], "argument --layers: must be at most 16,777,216"),
        (["--memory", "80"], "80 GB are 8e10"),
        (["--not-causal", "--kv-heads", "2"], "a LongNetEncoder, which has no --kv-heads"),
        (["--config", "nowhere"], "leave out --layers, --embed-dim, --heads\n"),
    ],
)
def test_models_that_cannot_be_are_refused(more, message, capsys):
    assert message in refused(capsys, *MODEL, *more)


def test_an_encoder_is_planned_as_such(capsys):
    causal, encoder = printed(capsys, *MODEL), printed(capsys, *MODEL, "--not-causal")
    assert "a LongNetLM of" in causal
    assert "a LongNetEncoder of" in encoder


@pytest.mark.parametrize(
    "pattern",
    [
        DilatedPattern((8, 16, 32), (1, 2, 4), is_causal=True),
        DilatedPattern((5, 20), (3, 4), phase="blocked"),
        DilatedPattern((7, 24), (2, 3), heads="split"),
    ],
)
def test_cells_of_a_picture_are_the_definition(pattern):
    expected = multiplicity(pattern, 29, 4)
    for head in range(4):
        assert pairs_by_branch(pattern, 29, 4, head).sum(0).tolist() == expected[head].tolist()


def test_pictures_are_made_and_nothing_is_overwritten(tmp_path, capsys):
    argv = [*PLAN, "--seq-len", "32", "--picture"]
    printed(capsys, *argv, str(tmp_path / "new.png"))
    assert imread(tmp_path / "new.png").std() > 0.1
    (tmp_path / "mine.png").write_bytes(b"mine")
    refused(capsys, *argv, str(tmp_path / "mine.png"))
    assert (tmp_path / "mine.png").read_bytes() == b"mine"


def test_hardware_files_come_back(tmp_path):
    machine = Machine(
        Hardware(1.5e11, 2e9, 3e-4, 1.2e11, 1e-5, 2e-3),
        "float32",
        10**10,
        'measured on "this"',
        "sdpa",
    )
    path = tmp_path / "here.toml"
    path.write_text(as_toml(machine))
    assert machine_of(str(path)) == machine._replace(source="measured on 'this'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("flops_per_second = 1e12", "has no table [hardware]"),
        ("[hardware]\nbytes_per_second = 1e9", "flops_per_second is missing"),
        (
            "[hardware]\nflops_per_second = 500\nbytes_per_second = 1e9",
            "flops_per_second = 500 must be from 1e+06 to 1e+17 FLOPs in a second",
        ),
        (
            "[hardware]\nflops_per_second = 1e12\nbytes_per_second = -1e9",
            "-1000000000.0 must be from 1e+06",
        ),
        (
            '[hardware]\nflops_per_second = 1e12\nbytes_per_second = "50 GB/s"',
            "'50 GB/s' must be from 1e+06 to 1e+14 bytes",
        ),
        (
            "[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\nlatency_seconds = 0.11",
            "5 µs are 5e-6",
        ),
        (
            "[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\ncall_seconds = 5",
            "which unit is meant?",
        ),
        (
            "[hardware]\nflops_per_second = 1e12\nbytes_per_second = 4e17",
            "bytes in a second, one way; 50 GB/s",
        ),
        (
            "[hardware]\nflops_per_second = 5e17\nbytes_per_second = 1e9",
            "FLOPs in a second; 500 TFLOP/s are 5e14",
        ),
        (
            "[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\ndtype = [1]",
            "dtype = [1] is unknown",
        ),
        (
            f"[hardware]\nflops_per_second = 1{'0' * 400}\nbytes_per_second = 1e9",
            "... must be from",
        ),
        (
            "[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\nspeed = 25",
            "speed is unknown",
        ),
        ("[hardware]\nflops_per_second = 1e12", "bytes_per_second is missing"),
        (
            "[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\ngpus_per_host = 8",
            "give both gpus_per_host and host_bytes_per_second",
        ),
        (
            "[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\nkernel = 'gpu'",
            "kernel = 'gpu' is unknown",
        ),
        ("[hardware", "cannot be read"),
    ],
)
def test_hardware_files_that_cannot_be(content, message, tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r".") as refused:
        machine_of(str(path))
    assert message in str(refused.value)


def test_a_model_of_a_config(tmp_path, capsys):
    """With the pattern of the options. Catches one that the config has, and is taken instead."""
    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "vocab_size": 99}
    saved = {"segment_lengths": [64], "dilation_rates": [4]}
    fields = sizes | {"model_type": "llama", "num_attention_heads": 8, "dilated_attention": saved}
    fields["attn_implementation"] = "dilated"  # as a model with a pattern saves it
    path = tmp_path / "config.json"
    words = ["plan", "model", "--config", str(path), "--seq-len", "256", "--window", "16"]
    assert f"--config {path}: there is no such file" in refused(capsys, *words)
    path.write_text("{")
    assert "is not a valid JSON file" in refused(capsys, *words)
    path.write_text(json.dumps(fields))
    out = " ".join(printed(capsys, *words).split())
    assert "transformers' llama of " in out
    assert "pattern: a sliding window of 16" in out
