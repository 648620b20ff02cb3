"""Uses the installed package beside torch alone. install.py starts it in an empty folder, away from the sources."""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path

import torch

import ring_dilated_attention
from ring_dilated_attention import DilatedPattern, dilated_attention

NAME = "ring-dilated-attention"
SOURCES = Path(__file__).parents[2] / "src" / "ring_dilated_attention"
INSTALLED = Path(ring_dilated_attention.__file__).parent
RDA = Path(sys.executable).parent / "rda"


def rda(*arguments):
    # torch says that there is no NumPy, which it need not have
    quiet = os.environ | {"PYTHONWARNINGS": "ignore:Failed to initialize NumPy"}
    return subprocess.run([RDA, *arguments], env=quiet, capture_output=True, text=True, timeout=120, check=False)


def files(folder):
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in found}


def check_package():
    assert INSTALLED != SOURCES, f"{INSTALLED} was not installed"
    differing = files(SOURCES) ^ files(INSTALLED)
    assert not differing, f"files of the sources and of the package differ: {sorted(differing)}"
    versions = {ring_dilated_attention.__version__, version(NAME), rda("--version").stdout.strip().partition(" ")[2]}
    assert len(versions) == 1, f"there are several versions: {sorted(versions)}"
    needed = [line for line in distribution(NAME).requires or [] if "extra ==" not in line]
    assert [re.split(r"\W", line)[0] for line in needed] == ["torch"], f"it needs {needed}"


def check_call():
    query, key, value = (torch.randn(1, 100, 4, 16, requires_grad=True) for _ in range(3))
    out = dilated_attention(query, key, value, DilatedPattern.dense())
    heads_first = [x.transpose(1, 2) for x in (query, key, value)]
    dense = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-5)
    out.sum().backward()
    assert query.grad is not None and query.grad.isfinite().all()


def check_commands():
    for arguments in ("--help", "plan --help", "train --help"):
        done = rda(*arguments.split())
        assert done.returncode == 0 and done.stdout, done
    for name, extra in (("plan --seq-len 64Ki --window 8", "commands"), ("train", "train")):
        done = rda(*name.split())
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done
        assert f"pip install '{NAME}[{extra}]'" in done.stderr, done


if __name__ == "__main__":
    check_package()
    check_call()
    check_commands()
    print(f"used beside torch {torch.__version__} alone, on Python {platform.python_version()}")
