"""The order of packages, what a call imports, and private names of others: read from the source, or asked of Python."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ring_dilated_attention

PACKAGE = Path(ring_dilated_attention.__file__).parent
NAME = "ring_dilated_attention"

# The rooms, from the ground up: each imports only those below it, and its own files.
ROOMS = ("pattern", "plan", "reference", "kernels", "run", "ranks", "attention", "layers")
ROOMS += ("simulate", "models", "forecast", "training", "integrations", "pictures", "commands")
# A call or a model's step runs in these. They predict and imitate nothing.
RUNNING = ("attention", "layers", "models", "integrations")
# Modules without torch, for people who plan on a laptop.
PURE = ("pattern", "plan")
SENDING = re.compile(
    r"\bdist(?:ributed)?\.(?:i?send|i?recv|barrier|broadcast|gather|scatter|all_\w+)\("
)


def imported(path):
    """What a file of the package imports, by its name within the package: in functions, for types and by string too."""
    folder = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = [base] if node.module else [base + alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if re.fullmatch(rf"\.+[\w.]+|{NAME}\.[\w.]+", node.value) else []
        for name in names:
            level = len(name) - len(name.lstrip("."))
            if level:
                yield ".".join((*folder[: len(folder) + 1 - level], name[level:]))
            elif name.startswith(NAME + "."):
                yield name.removeprefix(NAME + ".")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_those_below(room):
    """Catches an application in the core, a forecast in what a call executes, and a file that belongs to no room."""
    paths = [*(PACKAGE / room).rglob("*.py")] or [PACKAGE / f"{room}.py"]
    below = set(ROOMS[: ROOMS.index(room) + 1])
    if room in RUNNING:
        below -= {"simulate", "forecast"}
    if room != "commands":  # `rda check` compares with the definition: the fast path never reads it
        below -= {"reference"} - {room}
    for path in paths:
        assert {name.partition(".")[0] for name in imported(path)} & set(ROOMS) <= below, path


def test_no_files_import_each_other():
    """Also in functions; in rooms as between them."""
    imports = {}
    for path in PACKAGE.rglob("*.py"):
        names = path.relative_to(PACKAGE).with_suffix("").parts
        imports[".".join(names).removesuffix(".__init__")] = set(imported(path))
    tuple(TopologicalSorter(imports).static_order())  # a CycleError names the files


def test_every_file_is_in_a_room():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert found <= {*ROOMS, "__init__", "__main__", "__pycache__"}


def test_only_one_file_sends():
    """Catches messages beside those that the handshake covers."""
    sending = [path.name for path in PACKAGE.rglob("*.py") if SENDING.search(path.read_text())]
    assert sending == ["link.py"]


def private_names(package):
    """Names with one underscore that a package's files use, also as strings; and those that they define."""
    # public, but for their names; and an ending
    used, defined = (set(), {"_replace", "_asdict", "_fields", "_exit", "_token_id"})
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(ast.Name("self"), name, ast.Store()) | ast.Name(
                    name, ast.Store()
                ):
                    defined.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    defined.add(name)
                case ast.Attribute(attr=name):
                    used.add(name)
                case ast.Constant(str(name)) if name.isidentifier():
                    used.add(name)
                case ast.ImportFrom(module=str(module), level=0):
                    used |= {*module.split("."), *(alias.name for alias in node.names)}
    return {name for name in used if re.match("_[a-zA-Z]", name)}, defined


def test_private_names_of_others_are_listed():
    """Catches a private name of torch that is used and not listed, and one that is listed and not used."""
    page = (PACKAGE.parents[1] / "docs/platforms.md").read_text()
    listed = set(
        re.findall(r"\b_[a-zA-Z]\w*", page.partition("## Private names")[2].partition("\n## ")[0])
    )
    used, defined = private_names(PACKAGE)
    assert used - defined <= listed
    assert listed <= used


def test_a_call_imports_few_files_and_no_compiler():
    """Catches an import of what talks to other ranks, or of an application; and of torch._dynamo, which takes ten times
    as long as all of ours: by a first call, its backward, or a context. (`refuse` has the mark of torch's function that
    imports it.) And modules that cannot be reloaded, or imported once more after Ctrl-C; and plans that need torch. And
    an op that is not found where torch is imported after us, and looked for before that, as packages do that ask
    whether it is there."""
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")]
    pure = [".".join((NAME, *path.parts)) for path in paths if path.parts[0] in PURE]
    code = f"""if True:
        import importlib.util, sys, {", ".join(pure)}
        assert 'torch' not in sys.modules
        for name in [name for name in sys.modules if name.startswith("{NAME}.")]:
            del sys.modules[name]
        importlib.util.find_spec('torch')
        import torch
        names = [name for name in sys.modules if name.startswith("{NAME}.")]
        assert set(names) <= {{"{NAME}.pattern"}}, names
        torch.ops.{NAME}.forward.default
        from {NAME} import DilatedPattern, dilated_attention
        rows = torch.randn(1, 8, 1, 4, requires_grad=True)
        dilated_attention(rows, rows, rows, DilatedPattern((4,), (1,))).sum().backward()
        names = [name for name in sys.modules if name.startswith("{NAME}")]
        assert len(names) <= 45 and "{NAME}.ranks.link" not in names, names
        import {NAME}.layers
        from {NAME} import ContextParallel
        from {NAME}.ranks.named import refuse
        parallel = ContextParallel()
        dilated_attention(rows, rows, rows, DilatedPattern((4,), (1,)), parallel=parallel).sum().backward()
        assert 'torch._dynamo' not in sys.modules, 'dynamo was imported'
        marked = torch.compiler.assume_constant_result(lambda: None)
        assert marked.__dict__ == refuse.__dict__, 'torch marks functions otherwise'
        import importlib, {NAME}.attention.attention as module, {NAME}.layers.rotary
        for _ in range(2):  # an op that is defined once more takes the place of the former one
            importlib.reload(module), importlib.reload({NAME}.layers.rotary)
            module.dilated_attention(rows, rows, rows, DilatedPattern((4,), (1,))).sum().backward()
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_the_public_face():
    """Catches a name in __all__ that does not exist, and one that is missing from dir()."""
    assert dir(ring_dilated_attention) == sorted(ring_dilated_attention.__all__)
    for name in ring_dilated_attention.__all__:
        assert getattr(ring_dilated_attention, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'dilated_atention'"):
        _ = ring_dilated_attention.dilated_atention
