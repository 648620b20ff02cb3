"""Uses the installed package beside torch alone. install.py starts it in an empty folder, away from the sources."""

import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution, version
from pathlib import Path

import torch

import ring_dilated_attention
from ring_dilated_attention import DilatedPattern, dilated_attention

NAME = "ring-dilated-attention"
SOURCES = Path(__file__).parents[2] / "src" / "ring_dilated_attention"
INSTALLED = Path(ring_dilated_attention.__file__).parent
RDA = Path(sys.executable).parent / "rda"


def rda(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RDA, *arguments], capture_output=True, text=True, timeout=120, check=False)


def files(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in found}


def faults_of_the_package() -> Iterator[str]:
    if INSTALLED == SOURCES:
        yield f"{INSTALLED} was not installed"
    if differing := files(SOURCES) ^ files(INSTALLED):
        yield f"files of the sources and of the package differ: {sorted(differing)}"
    versions = {ring_dilated_attention.__version__, version(NAME), rda("--version").stdout.strip().partition(" ")[2]}
    if len(versions) > 1:
        yield f"there are several versions: {sorted(versions)}"
    needed = [line for line in distribution(NAME).requires or [] if "extra ==" not in line]
    if [re.split(r"\W", line)[0] for line in needed] != ["torch"]:
        yield f"it needs {needed}"


def faults_of_a_call() -> Iterator[str]:
    query, key, value = (torch.randn(1, 100, 4, 16, requires_grad=True) for _ in range(3))
    out = dilated_attention(query, key, value, DilatedPattern.dense())
    heads_first = [x.transpose(1, 2) for x in (query, key, value)]
    dense = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
    if not torch.allclose(out, dense, atol=1e-5):
        yield "a dense call does not give dense attention"
    out.sum().backward()
    if query.grad is None or not query.grad.isfinite().all():
        yield "a call has no gradient"


def faults_of_commands() -> Iterator[str]:
    for arguments in ("--help", "plan --help", "train --help"):
        done = rda(*arguments.split())
        if done.returncode or not done.stdout:
            yield f"rda {arguments} ended with {done.returncode}: {done.stderr}"
    for name, extra in (("plan --seq-len 64Ki --window 8", "commands"), ("train", "train")):
        done, remedy = rda(*name.split()), f"pip install '{NAME}[{extra}]'"
        if done.returncode != 2 or remedy not in done.stderr or len(done.stderr.splitlines()) != 1:
            yield f"rda {name} ended with {done.returncode} and without {remedy}: {done.stderr}"


if __name__ == "__main__":
    found = [*faults_of_the_package(), *faults_of_a_call(), *faults_of_commands()]
    if found:
        sys.exit("\n".join(found))
    print(f"used beside torch {torch.__version__} alone, on Python {platform.python_version()}")
