"""What `mean_loss` takes, on one rank: what several ranks give each other is in `make fuzz`, kind `losses`."""

import pytest
import torch

from ring_dilated_attention import ContextParallel


@pytest.mark.parametrize("count", [2.0**24 + 1, 2**70, 1.6e308, 0.1 + 1, torch.tensor(2**40 + 1)])
def test_counts_keep_their_value(count):
    """Catches a count that becomes a float32 on its way."""
    total = torch.tensor(3.0, dtype=torch.float64)
    assert ContextParallel().mean_loss(total, count).item() == 3.0 / float(count)


def test_what_is_no_count_is_told_with_its_name():
    """Catches torch's own errors ("Could not infer dtype of NoneType"), which name no argument."""
    wrong = [None, "x", {}, [3], True, -1, 10**400, float("nan"), torch.ones(2), torch.ones(1, device="meta")]
    for count in [*wrong, torch.ones(1).to_sparse(), torch.tensor(1j)]:
        with pytest.raises(ValueError, match="local_count must be one number of at least 0"):
            ContextParallel().mean_loss(torch.ones(()), count)
    for total in (None, 3.0, torch.tensor(3), torch.ones(2), torch.ones(1, device="meta"), torch.ones(1).to_sparse()):
        with pytest.raises(ValueError, match="local_sum must be one number"):
            ContextParallel().mean_loss(total, 3)
