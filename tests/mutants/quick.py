"""A plugin of pytest for tests that are to fail: files come in the given order. Hypothesis draws the same cases each
time, and does not look for a smaller one. The names of cases that fail go into the file that FAILED names."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

FAILED = "MUTANTS_FAILED"  # a variable of the environment
PHASES = (Phase.explicit, Phase.generate)
settings.register_profile("mutants", phases=PHASES, derandomize=True, database=None)
settings.load_profile("mutants")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """`tests/order.py` puts the longest first, for several workers."""
    in_given_order = list(items)
    yield
    items[:] = in_given_order


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    note_failure(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    note_failure(report)


def note_failure(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.failed:
        with open(os.environ[FAILED], "a") as file:
            file.write(report.nodeid.replace("\n", " ") + "\n")
