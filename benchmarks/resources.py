"""Compile every kernel ahead of time, without a GPU, and compare registers, spills and shared memory with a table.

    python -m benchmarks.resources            compare with resources.json beside it; 1 if they differ
    python -m benchmarks.resources --write    write it
    ... --target cuda:90 --head-dim 128 --kernel forward    only these

A kernel that spills more, or needs more shared memory than its target has, shows here before it runs anywhere. The
numbers hold for one version of triton, and for what is compiled: the table names both. While neither changes, the tests
compile one kernel for each target, and not all twelve, which takes a minute.
"""

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ring_dilated_attention.kernels.triton import backward, forward, token_kernels
from ring_dilated_attention.kernels.triton.block_sizes import config, padded

PATH = Path(__file__).with_name("resources.json")
KERNELS = Path(forward.__file__).parent
COMPILED = [KERNELS / name for name in ("backward.py", "blocks.py", "block_sizes.py", "forward.py", "token_kernels.py")]
COMPILED += [KERNELS / "configs.json", Path(__file__)]
HEAD_DIMS = (64, 128)
# Shared memory of one block, in bytes: CUDA's tables of compute capabilities; LDS of a gfx942 workgroup.
SHARED_MEMORY = {"cuda:80": 166_912, "cuda:90": 232_448, "cuda:100": 232_448, "hip:gfx942": 65_536}
TYPES = dict.fromkeys(("lse", "delta", "dlse"), "*fp32") | dict.fromkeys(("strips", "branches", "phases"), "*i32")
TYPES |= dict.fromkeys(("progress", "lengths", "units"), "*i64")
TYPES |= dict.fromkeys(("partial_out", "partial_lse"), "*fp32")
_POINTERS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "memory")
_SUMS = {"out": "*fp32", "lse": "*fp64"}
_GRADIENT_SUMS = dict.fromkeys(("dq", "dk", "dv"), "*fp32")


class Case(NamedTuple):
    """One kernel as it is launched. `types` are those of pointers that are neither the inputs' nor as in TYPES."""

    name: str
    kernel: Any
    config: str
    types: Mapping[str, str]
    constants: Mapping[str, bool | int]


class Resources(NamedTuple):
    """Per thread: registers and bytes (cuda) or registers (hip) that are spilled. Per block: bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


_IN_PLACE = {"IS_CAUSAL": True, "ACCUMULATE": True}
_TOKEN = {"HAS_LENGTHS": True, "SPLITS": 16, "BM": 16, "BN": 64}
_FUSED = {"IS_CAUSAL": True, "CROSSES": False}
CASES = (
    Case("forward", forward.forward_kernel, "forward", _SUMS, {"IS_CAUSAL": True, "ACCUMULATE": False}),
    Case("forward, in place", forward.forward_kernel, "forward", _SUMS, _IN_PLACE),
    Case("delta", backward.delta_kernel, "", {}, {"HAS_DLSE": True, "BM": 64}),
    Case("query gradient", backward.query_gradient_kernel, "query_gradient", _GRADIENT_SUMS, _IN_PLACE),
    Case("key gradient", backward.key_gradient_kernel, "key_gradient", _GRADIENT_SUMS, _IN_PLACE),
    Case("fused forward", forward.fused_forward_kernel, "forward_half", {}, _FUSED),
    Case("fused forward, crossing", forward.fused_forward_kernel, "forward_half", {}, {**_FUSED, "CROSSES": True}),
    Case("fused query gradient", backward.fused_query_gradient_kernel, "query_gradient", {}, _FUSED),
    Case("fused key gradient", backward.fused_key_gradient_kernel, "key_gradient", {}, _FUSED),
    Case("token", token_kernels.token_kernel, "", {}, _TOKEN),
    Case("token, many heads", token_kernels.token_kernel, "", {}, {**_TOKEN, "BM": 32}),
    Case("token, merge", token_kernels.merge_kernel, "", dict.fromkeys(("branches", "phases"), "*i64"), _TOKEN),
)


def compile_case(case: Case, target: str, head_dim: int, element: str = "bf16") -> Resources:
    """Compile a kernel for inputs of a type, and strides that are multiples of 16."""
    kind, _, arch = target.partition(":")
    constants: dict[str, object] = {
        "D": head_dim,
        "BD": padded(head_dim),
        "HEADS": 1,
        "PRECISION": "ieee",
        **case.constants,
    }
    options = {"num_warps": 4}
    if case.config:
        chosen = config(case.config, head_dim, 4 if element == "fp32" else 2, target)
        constants |= {"BM": chosen.block_m, "BN": chosen.block_n}
        options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    names = case.kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else _type(name, element, case.types) for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (name.startswith("stride_") and not name.startswith("stride_l"))
    }
    gpu = GPUTarget(kind, int(arch), 32) if kind == "cuda" else GPUTarget(kind, arch, 64)
    source = ASTSource(case.kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=gpu, options=options)
    used = _cuda(compiled.asm["cubin"]) if kind == "cuda" else _hip(compiled.asm["amdgcn"])
    return Resources(*used, compiled.metadata.shared)


def _type(name: str, element: str, types: Mapping[str, str]) -> str:
    if name == "scale":
        return "fp32"
    if name.startswith("stride_"):
        return "i64"
    if name in _POINTERS:
        return types.get(name, "*" + element)
    return types.get(name) or TYPES.get(name, "i32")


def _cuda(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack, which hold what is spilled, from the tool that comes with triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage named no registers: {text!r}")
    return int(found[1]), int(found[2])


def _hip(assembly: str) -> tuple[int, int]:
    registers, spilled = (re.search(rf"\.{name}:\s+(\d+)", assembly) for name in ("vgpr_count", "vgpr_spill_count"))
    if registers is None or spilled is None:
        raise RuntimeError("the assembly names no .vgpr_count or no .vgpr_spill_count.")
    return int(registers[1]), int(spilled[1])


def fingerprint() -> str:
    """Of all files that say what is compiled. Docstrings do not."""
    return hashlib.sha256("\0".join(map(_without_docstrings, COMPILED)).encode()).hexdigest()


def _without_docstrings(path: Path) -> str:
    text = path.read_text()
    if path.suffix != ".py":
        return text
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
            lines[first:last] = [""] * (last - first)
    return "\n".join(filter(None, lines))


def measure(
    targets: Sequence[str], head_dims: Sequence[int], kernels: Sequence[str]
) -> Iterator[tuple[str, Resources]]:
    """Compile what was chosen, for bfloat16; yields "target, kernel, head dim" and what it takes."""
    for target in targets:
        for case in CASES:
            for head_dim in head_dims:
                if case.name in kernels:
                    yield f"{target}, {case.name}, {head_dim}", compile_case(case, target, head_dim)


def complaints(measured: dict[str, Resources], recorded: dict[str, list[int]]) -> list[str]:
    """What is worse than recorded, or cannot be launched."""
    found = []
    for name, used in measured.items():
        limit = SHARED_MEMORY[name.partition(",")[0]]
        if used.shared > limit:
            found.append(f"{name}: {used.shared} bytes of shared memory, and the target has {limit}.")
        if name not in recorded:
            found.append(f"{name}: not recorded. Run with --write.")
        elif used != Resources(*recorded[name]):
            found.append(f"{name}: {used}, recorded are {Resources(*recorded[name])}.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write resources.json instead of comparing with it")
    parser.add_argument("--target", action="append", choices=SHARED_MEMORY)
    parser.add_argument("--head-dim", action="append", type=int, choices=HEAD_DIMS)
    parser.add_argument("--kernel", action="append", choices=[case.name for case in CASES])
    options = parser.parse_args(arguments)
    measured = {}
    kernels = options.kernel or [case.name for case in CASES]
    for name, used in measure(options.target or tuple(SHARED_MEMORY), options.head_dim or HEAD_DIMS, kernels):
        measured[name] = used
        print(f"{name}: {used.registers} registers, {used.spilled} spilled, {used.shared} bytes of shared memory")
    table = json.loads(PATH.read_text()) if PATH.exists() else {"triton": triton.__version__, "resources": {}}
    if options.write:
        table["resources"] |= measured
        lines = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in table["resources"].items())
        compiled = fingerprint() if measured.keys() == table["resources"].keys() else "some of them"
        head = f'"triton": {json.dumps(triton.__version__)},\n  "compiled": {json.dumps(compiled)}'
        PATH.write_text(f'{{\n  {head},\n  "resources": {{\n{lines}\n  }}\n}}\n')
        return 0
    if table["triton"] != triton.__version__:
        print(f"recorded with triton {table['triton']}, this is {triton.__version__}: counts differ between versions.")
    found = complaints(measured, table["resources"])
    print("\n".join(found) or "nothing differs from the table")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
