"""Tests against the real packages. `make test-integrations` installs them; what needs one that is missing is left out,
and the end of the run says so. `make test` has transformers alone, for an example."""

from importlib.util import find_spec

import distributed
import pytest

# By the beginning of a file's name, what it needs.
NEEDS = {
    "test_transformers": ("transformers", "accelerate"),
    "test_deepspeed": ("deepspeed", "transformers"),
    "test_lightning": ("lightning",),
}
MISSING = sorted({name for names in NEEDS.values() for name in names if find_spec(name) is None})
collect_ignore_glob = [f"{test}*.py" for test, names in NEEDS.items() if set(names) & set(MISSING)]

# Ranks are forked from a server that has imported these: some seconds once, and not for each rank.
if not {"transformers", "accelerate"} & set(MISSING):
    distributed.preload(
        "transformers.trainer",
        *[f"transformers.models.{n}.modeling_{n}" for n in ("llama", "bert")],
    )


def pytest_collection_modifyitems(items):
    for item in items:
        is_ours = item.path.name == "test_torch_conventions.py"
        # others' warnings are theirs to mend
        if "tests/integrations" in item.path.as_posix() and not is_ours:
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_terminal_summary(terminalreporter):
    if MISSING:
        terminalreporter.write_line(
            f"tests/integrations: {', '.join(MISSING)} not installed, so that tests with them were left out; "
            "make test-integrations installs and runs all of it"
        )
