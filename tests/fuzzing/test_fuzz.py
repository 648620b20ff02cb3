"""100 cases of every kind of `make fuzz`, fewer of slow ones, and proofs that cases notice what they are there for."""

import pytest
import torch
from fuzz import KINDS, fuzz
from fuzz_oracle import why_off

SEED = 20251122
# Of slow kinds. Those of `ranks` are where all its nine outcomes lie close together: calls, refusals and means of two,
# three and four ranks. Of `commands` the last one notices an error of the system that nobody catches.
FEWER = dict.fromkeys(("simulated", "caches", "torchscale"), range(50))
FEWER |= {"ranks": range(1813, 1837), "commands": range(22)}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found(kind):
    found = fuzz(kind, SEED, FEWER.get(kind, range(100)))
    assert not found.failures
    assert len(found.outcomes) > 2  # cases of several sorts, and not 100 times the same refusal


@pytest.mark.parametrize(("rounding", "is_wrong"), [(1e-9, False), (0.25, True)])
def test_a_gradient_that_cancels_is_judged_by_its_terms(rounding, is_wrong):
    """Catches an error that is divided by a true gradient of nearly 0: processors round such sums differently."""
    value, size = torch.full((3,), 1e-30, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    found = torch.full((3,), rounding)
    complaint = why_off("dk", found, value, size, torch.float32, torch.bfloat16)
    assert (complaint is not None) == is_wrong


def test_a_case_can_be_made_again():
    first = fuzz("calls", SEED, range(20, 25))
    again = fuzz("calls", SEED, range(22, 25))
    assert again.outcomes <= first.outcomes
    assert again.outcomes.total() == 3
