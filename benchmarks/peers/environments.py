"""The Python environments of peers, in benchmarks/.environments: made by pip, or links that a user has put there."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .catalogue import ENVIRONMENTS, TORCH_VERSION

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / ".environments"


class NotThereError(Exception):
    """A peer cannot be installed or run. The message is the reason."""


def python_of(name: str) -> str:
    """The path of an environment's Python. The environment is made if it does not exist.

    Raises:
        NotThereError: if it cannot be made, with the last line of the error.
    """
    if not name:
        return sys.executable
    place = FOLDER / name
    python = place / "bin" / "python"
    if python.exists() and not (place / "unfinished").exists():
        return str(python)
    try:
        _run(sys.executable, "-m", "venv", str(place))
        (place / "unfinished").touch()
        for arguments in (f"torch=={TORCH_VERSION}", *ENVIRONMENTS[name].installs):
            _run(str(python), "-m", "pip", "install", "--quiet", *arguments.split())
        (place / "unfinished").unlink()
    except OSError as error:
        raise NotThereError(str(error)) from error
    return str(python)


def variables_of(name: str) -> dict[str, str]:
    """The variables for a process in an environment. Python then finds this clone, and a checkout if there is one."""
    checkout = os.environ.get(ENVIRONMENTS[name].checkout, "")
    folders = [str(ROOT / "src"), str(ROOT), *filter(None, [checkout])]
    place = FOLDER / name
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(folders),
        "PATH": os.pathsep.join([str(place / "bin"), os.environ.get("PATH", "")]),
        # Compiled extensions go to a folder of ours, not into an environment that is only linked.
        "TORCH_EXTENSIONS_DIR": str(FOLDER / "extensions"),
    }


def last_line(text: str) -> str:
    """The last line of a text that names an exception, or else its last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines or ["died without a word"])[-1]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise NotThereError(
            f"{' '.join(Path(x).name for x in command)}: {last_line(done.stderr or done.stdout)}"
        )


def run_in(name: str, arguments: Sequence[str], seconds: float) -> str:
    """Run Python with these arguments in an environment. Returns what it prints.

    Raises:
        NotThereError: if it fails or takes longer than `seconds`, with the last line of the error.
    """
    try:
        done = subprocess.run(
            [python_of(name), *arguments],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=variables_of(name),
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired:
        raise NotThereError(f"no end within {seconds:.0f} s") from None
    if done.returncode:
        raise NotThereError(last_line(done.stderr or done.stdout))
    return done.stdout
