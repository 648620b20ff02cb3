"""A plugin of pytest for tests that are to fail: files come in the given order. Hypothesis draws the same cases each
time, and does not look for a smaller one."""

from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

PHASES = (Phase.explicit, Phase.generate)
settings.register_profile("mutants", phases=PHASES, derandomize=True, database=None)
settings.load_profile("mutants")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """`tests/order.py` puts the longest first, for several workers."""
    in_given_order = list(items)
    yield
    items[:] = in_given_order
