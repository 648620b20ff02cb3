"""Numbers as people write and read them."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import record
from ring_dilated_attention.commands import cli, evaluate, generate, train
from ring_dilated_attention.commands.arguments import BINARY, DECIMAL, amount, count, within
from ring_dilated_attention.commands.console import scaled
from ring_dilated_attention.forecast.clock import time_text


@pytest.mark.parametrize(
    ("text", "number"),
    [("131072", 131_072), ("131,072", 131_072), ("131_072", 131_072), ("64Ki", 65_536), ("64ki", 65_536),
     ("1M", 1_000_000), ("1.5k", 1500), ("1e6", 1_000_000), ("2 Gi", 2**31), ("0", 0), ("-3", -3)],
)  # fmt: skip
def test_a_count_is_what_was_meant(text, number):
    assert count(text) == number


@given(st.integers(1, 10**6), st.sampled_from(sorted((DECIMAL | BINARY).items())))
def test_units_multiply(number, unit):
    """Catches floats in between: 2^40 times a million is not one."""
    assert count(f"{number}{unit[0]}") == number * unit[1]


@pytest.mark.parametrize(
    "text", ["", "M", "1.5", "12x", "1 2", "64KiB", "1e-3", "inf", "2048,65536", "1,32", "1,"]
)
def test_what_is_no_count_is_quoted(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"powers of 1,000"):
        count(text)


@pytest.mark.parametrize(
    "text",
    ["1e309", "-1e309", "9" * 400, "9" * 5000, "9" * 400 + ".5", "1e999999999", "1e-999999999"],
)
@pytest.mark.parametrize("kind", [count, amount])
def test_what_no_float_holds_is_refused_at_once(kind, text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is beyond 1\.8e\+308") as caught:
        kind(text)
    assert len(str(caught.value)) < 100


def test_amounts():
    assert [amount(x) for x in ("1e11", "500T", "2.5e-5")] == [1e11, 5e14, 2.5e-5]


@pytest.mark.parametrize(
    ("found", "text"),
    [(scaled(1.657e9, "B"), "1.66 GB"), (scaled(12, "B"), "12.0 B"), (scaled(999.6e9, "B"), "1,000 GB"),
     (scaled(0, "B"), "0 B"), (scaled(98.95e13, "FLOP/s"), "990 TFLOP/s"), (scaled(0.5, "B"), "0.500 B"),
     (time_text(90), "1.5 min"), (time_text(3.2e-5), "32.0 µs"), (time_text(86400 * 12.34), "12.3 days"),
     (time_text(1e12), "11,574,074.1 days"), (time_text(0), "0.0 µs"), (time_text(0.9999), "999.9 ms")],
)  # fmt: skip
def test_quantities_are_shown_with_their_unit(found, text):
    assert found == text


def test_commands_take_them(capsys):
    argv = [
        "plan",
        "--seq-len",
        "4Ki",
        "--segment-lengths",
        "1,024",
        "--dilation-rates",
        "1",
        "--ranks",
        "2",
    ]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "GFLOP" in out
    assert "holds at most" in out
    assert "|" not in out
    assert cli.main(["plan", "--seq-len", "1.5"]) == 2
    assert "'1.5' is 1.5, not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["plan", "--batch=--"], ["doctor", "--timeout=--"], ["train", "--steps=--"]]
)
def test_two_dashes_are_no_value(argv, capsys):
    """Catches argparse's empty list in the place of a number, and the traceback that follows."""
    assert cli.main(argv) == 2
    assert capsys.readouterr().err == f"rda {argv[0]}: {argv[1]}: -- is no value\n"


def test_train_takes_them():
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    argv = [
        "--seq-len",
        "32Ki",
        "--segment-lengths",
        "4Ki",
        "32,768",
        "--steps",
        "1e3",
        "--seed",
        "-1",
        "--ranks",
        "2",
    ]
    found = parser.parse_args(argv)
    assert (found.seq_len, found.segment_lengths, found.steps, found.seed) == (
        32_768,
        [4096, 32_768],
        1000,
        -1,
    )


def test_a_table_of_the_page_becomes_one_of_a_terminal():
    text = "A heading.\n\n" + record.markdown(
        ("name", "time, s"), [("long name", "1.5"), ("b", "22.0")]
    )
    assert record.for_terminal(text).splitlines() == [
        "A heading.", "", "name       time, s", "long name      1.5", "b             22.0"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (generate, ["--prompt", "a", "--tokens"]),
        (evaluate, ["text", "--context"]),
    ],
)
def test_what_reads_a_run_takes_them(command, argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    found = parser.parse_args(["runs/one", *argv, "4Ki"])
    assert vars(found)[argv[-1][2:]] == 4096


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan", "--ranks", "4"], "rda plan: the following arguments are required: --seq-len\n"),
        (
            ["plan", "--seq-len", "4Ki"],
            "rda plan: missing --segment-lengths and --dilation-rates, or --window: rda suggest --seq-len N",
        ),
        (
            ["plan", "--seq-len", "4Ki", "--segment-lengths", "8"],
            "rda plan: dilation_rates is empty. Give one entry per branch",
        ),
        (
            ["plan", "model", "--seq-len", "8", "--window", "4"],
            "rda plan model: a model needs --layers and --embed-dim, or --config\n",
        ),
        (
            ["suggest"],
            "rda suggest: the following arguments are required: --seq-len, --heads, --speedup\n",
        ),
    ],
)
def test_what_is_missing_is_said_at_once(argv, message, capsys):
    """In one sentence; and where to get a pattern."""
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.startswith(message)


@given(st.integers(-(10**30), 10**30))
def test_a_number_within_its_range_is_taken_and_no_other(number):
    kind = within(-3, 70_000)
    if -3 <= number <= 70_000:
        assert kind(str(number)) == number
    else:
        with pytest.raises(argparse.ArgumentTypeError, match=r"must be at (least|most) .*, got "):
            kind(str(number))
