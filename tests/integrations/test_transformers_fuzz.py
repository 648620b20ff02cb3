"""200 cases of the kind `transformers` of tests/fuzzing/fuzz.py, and a proof that they notice what they are there for.
The rest of the proofs, and 2,000 cases, are a command of `make test-integrations`."""

from fuzz import fuzz

SEED = 20251122


def test_nothing_is_found():
    found = fuzz("transformers", SEED, range(200))
    assert found.num_cases == 200
    assert found.failures == []
    assert len(found.outcomes) > 15


def test_a_broken_program_is_noticed():
    """Documents that a layer forgets when it is computed once more, within backward, are seen in gradients alone."""
    broken = "documents are forgotten when a layer is computed again"
    assert fuzz("transformers", SEED, range(200), broken=broken, most_failures=1).failures
