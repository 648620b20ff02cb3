"""For all tests of training."""

from collections.abc import Iterator

import pytest
from helpers import quick_ends


@pytest.fixture(scope="module", autouse=True)
def short_samples_here() -> Iterator[None]:
    with quick_ends():
        yield
