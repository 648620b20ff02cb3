"""What tests of simulated and weighed ranks share."""

import pytest

from ring_dilated_attention.kernels import cpu


@pytest.fixture(autouse=True)
def without_a_matrix_unit(monkeypatch):
    """Weights are those of a CPU that copies 16-bit rows, so what is measured here must copy them, on any CPU."""
    monkeypatch.setattr(cpu, "takes_short_rows", lambda dtype: False)
