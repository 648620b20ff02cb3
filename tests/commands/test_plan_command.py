"""`rda plan` and `rda plan model`: what they print, refuse and draw."""

import json
import re
import shutil
from shlex import split

import pytest
from matplotlib.image import imread
from transcripts import PREPARED, SESSIONS, made_up, play

from ring_dilated_attention.commands import cli
from ring_dilated_attention.commands.console import scaled
from ring_dilated_attention.commands.hardware import Machine, as_toml, machine_of
from ring_dilated_attention.forecast import meshes
from ring_dilated_attention.forecast.call_cost import Exchange, PlannedCall, forecast
from ring_dilated_attention.forecast.clock import Hardware
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.pictures import pairs_by_branch
from ring_dilated_attention.plan.sharding import SHARDINGS, WITHOUT_DOCUMENTS
from ring_dilated_attention.plan.step import Sizes
from ring_dilated_attention.reference import multiplicity

PLAN = split("plan --seq-len 8Ki --segment-lengths 1Ki 8Ki --dilation-rates 1 8 --causal")


def printed(capsys, *argv):
    assert cli.main(list(argv)) == 0
    return capsys.readouterr().out


@pytest.fixture
def slow(tmp_path):
    """A file of hardware."""
    path = tmp_path / "slow.toml"
    path.write_text("[hardware]\nflops_per_second = 1e11\nbytes_per_second = 1e9\n")
    return str(path)


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all"])
def test_the_figures_are_the_forecasts(exchange, slow, capsys):
    """In JSON, and in the text with their units."""
    argv = [*PLAN, *split(f"--ranks 4 --heads 8 --exchange {exchange} --hardware {slow}")]
    made = json.loads(printed(capsys, *argv, "--json"))
    pattern = DilatedPattern((1024, 8192), (1, 8), is_causal=True)
    call = PlannedCall(pattern, 8192, 4, 8, 8, Sizes(1, 64, 4))
    hardware = Hardware(1e11, 1e9)
    figures = forecast(
        call.sharded_call(), Exchange(exchange), call.sizes, kernel="cpu", hardware=hardware
    )
    assert made["step"]["step_seconds"] == figures.seconds
    assert made["peak_bytes"] == figures.peak_bytes
    for row, rank in zip(made["ranks"], figures.ranks, strict=True):
        assert (row["sent"], row["weight"]) == (rank.sent, rank.weight._asdict())
    assert made["flops"] == sum(row["flops"] for row in made["ranks"]) == figures.flops
    assert len(made["alternatives"]) == 4 * len(WITHOUT_DOCUMENTS)
    out = printed(capsys, *argv)
    for i, rank in enumerate(figures.ranks):
        cells = (str(i), f"{rank.num_rows:,}", scaled(rank.flops, "FLOP"))
        assert re.search("^" + " +".join(cells), out, flags=re.MULTILINE)


def planned(capsys, line):
    return json.loads(printed(capsys, *PLAN, *line.split(), "--json"))


def test_documents_reach_the_plan(capsys):
    rows = planned(capsys, "--ranks 2 --documents 5000 3192")["alternatives"]
    assert {row["sharding"] for row in rows} == set(SHARDINGS)


def test_hardware_and_its_options_reach_the_plan(slow, capsys):
    """Its kernel and dtype. A bandwidth, or a latency, replaces those of all networks."""
    lines = ("", "--hardware h100", f"--hardware {slow}")
    _, h100, slow = plans = [planned(capsys, line) for line in lines]
    assert [plan["kernel"] for plan in plans] == ["cpu", "sdpa", "cpu"]
    assert slow["peak_bytes"] > h100["peak_bytes"]
    given = planned(capsys, "--ranks 8 --hardware h100 --bandwidth 1G")["hardware"]
    assert given["bytes_per_second"] == 1e9
    assert "host_bytes_per_second" not in given
    late = planned(capsys, "--ranks 8 --hardware h100 --latency 1e-5")["hardware"]
    assert late["latency_seconds"] == late["host_latency_seconds"] == 1e-5


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


def test_pictures_are_made(tmp_path, capsys):
    picture = tmp_path / "folder" / "B\u00fccher.png"
    assert printed(capsys, *PLAN, "--seq-len", "32", "--picture", str(picture)).isascii()
    image = imread(picture)
    assert image.std() > 0.1
    assert image.shape[1] > 3 * image.shape[0]  # four heads, side by side


def test_hardware_files_come_back(tmp_path):
    hardware = Hardware(1.5e11, 2e9, 3e-4, 1.2e11, 1e-5, 2e-3)
    machine = Machine(hardware, "float32", 10**10, 'measured on "this"', "sdpa")
    path = tmp_path / "here.toml"
    path.write_text(as_toml(machine))
    assert machine_of(str(path)) == machine._replace(source="measured on 'this'")


BOTH = "[hardware]\nflops_per_second = 1e12\nbytes_per_second = 1e9\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("flops_per_second = 1e12", "has no table [hardware]"),
        ("[hardware]\nflops_per_second = 1e12", "bytes_per_second is missing"),
        (BOTH.replace("1e12", "1" + "0" * 400), "... must be from 1e+06 to 1e+17 FLOPs in a sec"),
        (BOTH.replace("1e9", '"50 GB/s"'), "'50 GB/s' must be from 1e+06 to 1e+14 bytes"),
        (BOTH + "latency_seconds = 0.11", "5 µs are 5e-6: which unit is meant?"),
        (BOTH + "dtype = [1]", "dtype = [1] is unknown"),
        (BOTH + "speed = 25", "speed is unknown"),
        (BOTH + "gpus_per_host = 8", "give both gpus_per_host and host_bytes_per_second"),
        ("[hardware", "cannot be read"),
    ],
)
def test_hardware_files_that_cannot_be(content, message, tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        machine_of(str(path))


def test_a_model_of_a_config(tmp_path, monkeypatch, capsys):
    """Its activations are weighed. That they are so many is made up."""
    weigh = meshes.weigh_activations
    monkeypatch.setattr(meshes, "weigh_activations", lambda *args: weigh(*args) and made_up(*args))
    monkeypatch.chdir(shutil.copytree(SESSIONS / "files", tmp_path / "here"))
    play(PREPARED / "plan_config.txt", capsys)
