"""For all tests of training."""

from collections.abc import Iterator

import pytest
from helpers import short_samples


@pytest.fixture(scope="module", autouse=True)
def short_samples_here() -> Iterator[None]:
    with short_samples():
        yield
