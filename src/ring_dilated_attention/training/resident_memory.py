"""Resident memory of this process, in bytes. No torch."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """What is resident now; where the system does not say (not Linux), the most that ever was."""
    return _from_status("VmRSS") or _largest()


def peak_resident_bytes() -> int:
    return _from_status("VmHWM") or _largest()


def _from_status(field: str) -> int | None:
    # Not getrusage where it can be helped: its maximum survives exec, so a child may show its parent's.
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)


def _largest() -> int:
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
