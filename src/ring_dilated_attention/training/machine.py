"""The machine, the versions of packages and the memory of this process, for records. The file imports no torch."""

import math
import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "safetensors", "ring-dilated-attention")


def hardware() -> dict[str, Any]:
    return {
        "processor": next(
            _values(Path("/proc/cpuinfo"), "model name"), platform.processor() or platform.machine()
        ),
        "cores": os.cpu_count(),
        "memory_bytes": physical_bytes(),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    versions_by_name = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions_by_name[package] = version(package)
        except PackageNotFoundError:
            versions_by_name[package] = "not installed"
    return versions_by_name


def physical_bytes() -> float:
    """The memory of this machine; infinite where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return math.inf


def _resident(field: str) -> int:
    # getrusage is only the second choice: a child may inherit its parent's maximum.
    for value in _values(Path("/proc/self/status"), field):
        return int(value.split()[0]) * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


resident_bytes = partial(_resident, "VmRSS")  # outside Linux this is the peak
peak_resident_bytes = partial(_resident, "VmHWM")


def _values(path: Path, field: str) -> Iterator[str]:
    """What stands after "field:" in a file of Linux; nothing on other systems."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                yield value.strip()
