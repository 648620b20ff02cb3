"""`make mutants`: break the source on purpose, one idea at a time, and print how many cases notice.

    python -m tests.mutants                     all mutants
    python -m tests.mutants windows             those of one file
    python -m tests.mutants windows --json      for scripts

A mutant is run on a copy of the source, against the tests that it names. Each must be noticed by two cases.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from . import windows
from .mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "src/ring_dilated_attention"
ENOUGH = 2  # cases
GROUPS = {"windows": windows.MUTANTS}


def noticed(mutant: Mutant, source: Path) -> int:
    """How many cases notice a mutant; counting stops at ENOUGH."""
    path = source / PACKAGE / mutant.file
    original = path.read_text()
    if original.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {original.count(mutant.old)} times {mutant.old!r}")
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", f"--maxfail={ENOUGH}"]
        environment = os.environ | {
            "PYTHONPATH": str(source / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        ended = subprocess.run(
            [*command, "-p", "no:cacheprovider", *mutant.tests],
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(original)
    if ended.returncode not in (0, 1):  # no tests, or an error of pytest's
        raise RuntimeError(ended.stdout[-2000:] + ended.stderr[-2000:])
    return len(re.findall(r"^(?:FAILED|ERROR) ", ended.stdout, flags=re.MULTILINE))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.split("\n")[0])
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; all by default")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    arguments = parser.parse_args()
    groups = arguments.groups or list(GROUPS)
    for group in groups:
        if group not in GROUPS:
            parser.error(f"there are no mutants {group!r}; choose from {', '.join(GROUPS)}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        ignored = shutil.ignore_patterns(".*", "runs", "site", "__pycache__", "results")
        shutil.copytree(ROOT, source, ignore=ignored)
        for group in groups:
            for mutant in GROUPS[group]:
                number = noticed(mutant, source)
                rows.append(
                    {"group": group, "file": mutant.file, "idea": mutant.idea, "noticed": number}
                )
                if not arguments.json:
                    many = f"{number} or more" if number == ENOUGH else str(number)
                    print(f"{many:>9} cases  {mutant.file}: {mutant.idea}", flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    return int(any(row["noticed"] < ENOUGH for row in rows))


sys.exit(main())
