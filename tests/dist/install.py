"""Installs the wheel of dist/ into an environment with torch alone, and uses it there: install.py PYTHON TORCH

`make dist` runs it. The environment is kept as .venv-bare-*, because torch takes minutes to install.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "ring-dilated-attention"


def said(*command, folder=ROOT):
    """What a command prints. Nothing of the environment leads Python to the sources."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=kept, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stdout}")
    return done.stdout


def main():
    given, torch = sys.argv[1:]
    version = said(given, "-c", "import platform; print(platform.python_version(), end='')")
    bare = ROOT / f".venv-bare-{version}-{torch.replace('==', '-')}"
    python = bare / "bin" / "python"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    if not (bare / ".installed").exists():
        said(given, "-m", "venv", "--clear", bare)
        said(*pip, "install", torch)
        (bare / ".installed").touch()
    said(*pip, "uninstall", "--yes", NAME)
    before = set(said(*pip, "freeze").splitlines())
    [wheel] = (ROOT / "dist").glob("*.whl")
    said(*pip, "install", wheel)
    brought = {line.partition(" @")[0] for line in set(said(*pip, "freeze").splitlines()) - before}
    if brought != {NAME}:
        sys.exit(f"the wheel brought {sorted(brought)}, and is to bring itself alone")
    strict = ("-W", "error", "-W", "ignore:Failed to initialize NumPy")  # torch itself warns that numpy is missing
    mypy = (sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", bare / ".mypy_cache")
    print(said(*mypy, "--python-executable", python, ROOT / "tests" / "dist" / "typed_use.py"), end="")
    with tempfile.TemporaryDirectory() as folder:
        print(said(python, *strict, ROOT / "tests" / "dist" / "use.py", folder=Path(folder)), end="")


if __name__ == "__main__":
    main()
