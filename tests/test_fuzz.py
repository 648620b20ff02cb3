"""200 cases of every kind of `make fuzz`, and proofs that cases notice what they are there for."""

import pytest
from fuzz import KINDS, fuzz

SEED = 20251122


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found(kind):
    found = fuzz(kind, SEED, range(200))
    assert found.num_cases == 200
    assert found.failures == []
    assert len(found.outcomes) > 5  # cases of many sorts, and not 200 times the same refusal


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("commands", "numbers are not checked"),
        ("commands", "the lock stays"),
        ("files", "no digests"),
        ("files", "states are not checked"),
        ("files", "tensors are not checked"),
    ],
)
def test_a_broken_program_is_noticed(kind, broken):
    """Those that few cases notice; `make fuzz` has more, and takes longer."""
    assert fuzz(kind, SEED, range(200), broken=broken, most_failures=1).failures


def test_a_case_can_be_made_again():
    first = fuzz("files", SEED, range(20, 25))
    again = fuzz("files", SEED, range(22, 25))
    assert again.outcomes <= first.outcomes
    assert sum(again.outcomes.values()) == 3
