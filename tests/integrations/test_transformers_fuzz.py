"""200 cases of the kind `transformers` of tests/fuzz.py, and proofs that they notice what they are there for."""

import fuzz_transformers
import pytest
from fuzz import fuzz

SEED = 20251122


def test_nothing_is_found():
    found = fuzz("transformers", SEED, range(200))
    assert found.num_cases == 200
    assert found.failures == []
    assert len(found.outcomes) > 15


@pytest.mark.parametrize("broken", fuzz_transformers.BREAKAGES)
def test_a_broken_program_is_noticed(broken):
    assert fuzz("transformers", SEED, range(200), broken=broken, most_failures=1).failures
