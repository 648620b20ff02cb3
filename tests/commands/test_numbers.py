"""Numbers as people write and read them."""

import argparse

import pytest

from ring_dilated_attention.commands.arguments import amount, count
from ring_dilated_attention.commands.console import scaled
from ring_dilated_attention.forecast.clock import time_text


@pytest.mark.parametrize(
    ("text", "number"),
    [("131072", 131_072), ("131,072", 131_072), ("64Ki", 65_536), ("64ki", 65_536),
     ("1.5k", 1500), ("1e6", 1_000_000), ("2 Gi", 2**31), ("0", 0)],
)  # fmt: skip
def test_a_count_is_what_was_meant(text, number):
    assert count(text) == number


@pytest.mark.parametrize("text", ["", "M", "1.5", "12x", "64KiB", "inf", "2048,65536", "1,32"])
def test_what_is_no_count_is_quoted(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"powers of 1,000"):
        count(text)


@pytest.mark.parametrize(
    "text",
    ["1e309", "-1e309", "9" * 400, "9" * 5000, "1e999999999", "1e-999999999"],
)
@pytest.mark.parametrize("kind", [count, amount])
def test_what_no_float_holds_is_refused_at_once(kind, text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is beyond 1\.8e\+308") as caught:
        kind(text)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(
    ("found", "text"),
    [(scaled(1.657e9, "B"), "1.66 GB"), (scaled(999.6e9, "B"), "1,000 GB"),
     (scaled(0, "B"), "0 B"), (scaled(98.95e13, "FLOP/s"), "990 TFLOP/s"), (scaled(0.5, "B"), "0.500 B"),
     (time_text(90), "1.5 min"), (time_text(3.2e-5), "32.0 µs"),
     (time_text(1e12), "11,574,074.1 days"), (time_text(0), "0.0 µs"), (time_text(0.9999), "999.9 ms")],
)  # fmt: skip
def test_quantities_are_shown_with_their_unit(found, text):
    assert found == text
