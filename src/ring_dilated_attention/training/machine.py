"""Finds out, for records: the machine, the versions of packages, the memory of this process. Imports no torch."""

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "safetensors", "ring-dilated-attention")


def hardware() -> dict[str, Any]:
    return {
        "processor": next(_values(Path("/proc/cpuinfo"), "model name"), platform.machine()),
        "cores": os.cpu_count(),
        "memory_bytes": physical_bytes(),
        "system": platform.platform(),
    }


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply in bfloat16. If so, bfloat16 takes less than half the time of
    float32 in matrix products."""
    # The flags of such CPUs contain avx512_bf16 or amx_bf16.
    return "bf16" in next(_values(Path("/proc/cpuinfo"), "flags"), "")


def versions() -> dict[str, str]:
    versions_by_name = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions_by_name[package] = version(package)
        except PackageNotFoundError:
            versions_by_name[package] = "not installed"
    return versions_by_name


def physical_bytes() -> int:
    """The bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _resident(field: str) -> int:
    """The bytes that this process has in memory (field "VmRSS"), or the most that it has had so far ("VmHWM"). Only on
    Linux.

    getrusage also reports a maximum, but that may be the parent process's maximum.
    """
    kilobytes = next(_values(Path("/proc/self/status"), field)).split()[0]
    return int(kilobytes) * 1024


resident_bytes = partial(_resident, "VmRSS")
peak_resident_bytes = partial(_resident, "VmHWM")


def _values(path: Path, field: str) -> Iterator[str]:
    """Yield the value of each line "field: value" in a file of /proc. Yields nothing on systems without /proc."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                yield value.strip()
