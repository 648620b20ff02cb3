"""For the tests of `rda embed`."""

import pytest
from embed_cases import make_slides, make_weights


@pytest.fixture
def weights(tmp_path):
    return make_weights(tmp_path)


@pytest.fixture
def slides(tmp_path):
    return make_slides(tmp_path)
