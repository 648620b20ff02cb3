"""Rules of the import graph, read from the source: who may import torch, the reference; who may send."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import ring_dilated_attention

PACKAGE = Path(ring_dilated_attention.__file__).parent
NAME = "ring_dilated_attention"

# The rooms, from the ground up: each imports only those below it (and its own files, without circles).
ROOMS = ("pattern", "plan", "reference", "kernels", "run", "ranks", "attention", "layers")
ROOMS += ("simulate", "models", "forecast", "training", "integrations", "commands")
MOST_ROOMS = 14
# Modules without torch, for people who plan on a laptop.
PURE = ("pattern", "plan")
# What any file may use of torch.distributed: it makes and describes groups, and moves no data. All else is for link.py.
HARMLESS = {
    "_process_group_name",
    "Store",
    "ProcessGroup",
    "FileStore",
    "group",
    "new_group",
    "init_process_group",
    "destroy_process_group",
}
# where ranks meet; what is waited for
HARMLESS |= {"TCPStore", "PrefixStore", "rendezvous", "Work"}
HARMLESS |= {
    "is_available",
    "is_initialized",
    "get_rank",
    "get_world_size",
    "get_backend",
    "get_process_group_ranks",
}
HARMLESS |= {"get_backend_config", "GroupMember"}
# start ranks
HARMLESS |= {
    "LaunchConfig",
    "elastic_launch",
    "DefaultLogsSpecs",
    "SignalException",
    "ChildFailedError",
}

# What imports by a string: a literal is read here as any other import, and others are for these modules alone, the
# lazy public faces and the table of commands. They list only modules of their own room.
BY_STRING = ("import_module", "__import__")
MAY_LIST = ("", "models", "commands.cli")

# The second sums over tensor parallel ranks by torch's DTensor, as torch's own parallel styles do.
# Under --fsdp, FSDP2 and torch.distributed.checkpoint send on torch's default group. `models.rank_files` sends nothing:
# each rank reads by itself.
MAY_SEND = (
    "ranks.link",
    "integrations.torch",
    "training.sharded",
    "training.checkpoint",
    "models.rank_files",
)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Module:
    """What one source file imports: at once (when it is imported), when it runs (inside functions and by string too),
    and in all (for types too). `unread` are imports by a string that is not there to be read."""

    def __init__(self, name: str, is_package: bool, tree: ast.Module, names: set[str]) -> None:
        self.name, self.tree = name, tree
        self.folder = name if is_package else name.rpartition(".")[0]
        self.names = names
        self.unread: list[str] = []
        self.at_once = set(
            self._imports(
                _walk(tree, lambda node: _is_for_types(node) or isinstance(node, FUNCTIONS))
            )
        )
        self.run = set(self._imports(_walk(tree, _is_for_types)))
        self.unread.clear()
        self.all = set(self._imports(_walk(tree, lambda node: False)))

    def _imports(self, nodes):
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute("." * node.level + (node.module or ""))
                for alias in node.names:  # a submodule, or a member
                    yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in self.names else base
            elif isinstance(node, ast.Call) and _called(node) in BY_STRING:
                if isinstance(node.args[0], ast.Constant):
                    yield self._absolute(node.args[0].value)
                else:
                    self.unread.append(ast.unparse(node))
            elif isinstance(node, ast.Constant) and node.value in self.names:
                # as `python -m` is told
                yield node.value

    def _absolute(self, name: str) -> str:
        base, level = self.folder, len(name) - len(name.lstrip("."))
        for _ in range(level - 1):
            base = base.rpartition(".")[0]
        return f"{base}.{name[level:]}".rstrip(".") if level else name


def _walk(node: ast.AST, leaves_out: Callable[[ast.AST], bool]) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not leaves_out(child):
            yield from _walk(child, leaves_out)


def _called(node: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def read(package: Path) -> dict[str, Module]:
    """All modules of a package by their dotted name, without that of the package ("" is its __init__)."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        names = path.relative_to(package).with_suffix("").parts
        files[".".join([NAME, *names]).removesuffix(".__init__")] = path
    return {
        name.removeprefix(NAME).removeprefix("."): Module(
            name, path.name == "__init__.py", ast.parse(path.read_text()), set(files)
        )
        for name, path in files.items()
    }


@cache
def ours() -> dict[str, Module]:
    """Of this package, read once: a second of work."""
    return read(PACKAGE)


def inside(imports: set[str], modules: dict[str, Module]) -> set[str]:
    """The modules of the package among imports. Importing a.b also imports a."""
    found = set()
    for name in imports:
        if name == NAME or name.startswith(NAME + "."):
            names = name.removeprefix(NAME).removeprefix(".").split(".")
            found |= {".".join(names[: i + 1]) for i in range(len(names))}
    return found & set(modules)


def reachable(start: str, modules: dict[str, Module]) -> set[str]:
    """All that importing a module imports at once, directly or not, by full name."""
    seen, todo, found = {start}, [start], set()
    while todo:
        found |= modules[todo[-1]].at_once
        for name in inside(modules[todo.pop()].at_once, modules) - seen:
            seen.add(name)
            todo.append(name)
    return found


def top(imports: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in imports}


def pure_modules_with_torch(modules):
    pure = [name for name in modules if name.partition(".")[0] in PURE]
    return {name for name in pure if {"torch", "numpy", "triton"} & top(reachable(name, modules))}


def modules_with_triton(modules):
    """All but the file of its kernels, which is imported where they are launched."""
    found = {name for name, module in modules.items() if "triton" in top(module.all)}
    return found - {"kernels.row_kernels"}


def modules_with_the_reference(modules):
    """Also through what compares with it: no fast path may import that either."""

    def compares(name: str) -> bool:
        return name in (
            "reference",
            "commands.errors",
            "commands.check",
        )

    found = set()
    for name, module in modules.items():
        if name != "commands.cli" and not compares(name):
            found |= {name for other in inside(module.all, modules) if compares(other)}
    return found


def modules_that_send(modules):
    """Modules that use more of torch.distributed than groups and meshes, under whatever name they import it."""
    found = set()
    for name, module in modules.items():
        if name in MAY_SEND:
            continue
        aliases = {"torch.distributed"}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                aliases |= {
                    a.asname
                    for a in node.names
                    if a.name.startswith("torch.distributed") and a.asname
                }
            elif isinstance(node, ast.ImportFrom) and node.module == "torch":
                aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "torch.distributed"
            ):
                is_harmless = {a.name for a in node.names} <= HARMLESS or node.module.endswith(
                    ".device_mesh"
                )
                found |= set() if is_harmless else {name}
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.Attribute)
                and ast.unparse(node.value) in aliases
                and node.attr not in HARMLESS
            ):
                found.add(name)
    return found


def cycles(modules):
    """Modules that import themselves, directly or not, inside functions and by string too, but not for types alone. A
    member may import from its package what that does not import from it."""

    def direct(name: str) -> set[str]:
        return {other.removeprefix(NAME).removeprefix(".") for other in modules[name].run} & set(
            modules
        ) - {""}

    found = set()
    for name in modules:
        seen: set[str] = set()
        todo = [name]
        while todo:
            new = direct(todo.pop()) - seen
            seen |= new
            todo += new
        if name in seen:
            found.add(name)
    return found


def modules_that_hide_imports(modules):
    """Imports by a string that is made when it runs: no rule could see what they name."""
    return {
        f"{name}: {call}"
        for name, module in modules.items()
        for call in module.unread
        if name not in MAY_LIST
    }


def room(name: str) -> str:
    return name.partition(".")[0]


def modules_in_no_room(modules):
    """Files and folders at the top that are not among the rooms, but for what `python -m` runs; and too many rooms."""
    found = {room(name) for name in modules if name} - {*ROOMS, "__main__"}
    return found | ({"too many rooms"} if len(ROOMS) > MOST_ROOMS else set())


def imports_upwards(modules):
    """Imports of a room above, wherever they stand: also in functions, for types, and by string."""
    height = {name: i for i, name in enumerate(ROOMS)}
    return {
        f"{name} -> {other}"
        for name, module in modules.items()
        if name
        for other in inside(module.all, modules)
        if other and height.get(room(other), 0) > height.get(room(name), MOST_ROOMS)
    }


def calls_with_forecasts(modules):
    """Modules that a call or a model's step runs in, and that import what predicts or imitates one."""
    running = [n for n in modules if room(n) in ("attention", "layers", "models", "integrations")]
    others = {n: {room(o) for o in inside(modules[n].all, modules)} for n in running}
    return {n for n, rooms in others.items() if rooms & {"simulate", "forecast"}}


def modules_with_benchmarks(modules):
    return {name for name, module in modules.items() if "benchmarks" in top(module.all)}


RULES = [
    modules_in_no_room,
    imports_upwards,
    calls_with_forecasts,
    modules_with_benchmarks,
    pure_modules_with_torch,
    modules_with_triton,
    modules_with_the_reference,
    modules_that_send,
    modules_that_hide_imports,
    cycles,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule):
    """Catches an import that makes planning need torch, the fast path the reference, or a second file that sends."""
    assert rule(ours()) == set()


@pytest.mark.parametrize(
    "name",
    [
        "plan/rows.py",
        "kernels/choose.py",
        "attention/explain.py",
        "simulate/one_rank.py",
        "models/a.py",
    ],
)
def test_what_a_call_executes_knows_no_forecast(name, tmp_path):
    """Proof that the order of rooms keeps forecasts out of a call, also where the import stands in a function."""
    for file in ("__init__.py", "forecast/__init__.py", "forecast/clock.py", name):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    dots = "." * (name.count("/") + 1)
    (tmp_path / name).write_text(f"def f():\n    from {dots}forecast.clock import Hardware")
    assert imports_upwards(read(tmp_path)) >= {f"{name[:-3].replace('/', '.')} -> forecast"}


BREACHES = {
    modules_in_no_room: {"utils.py": "x = 1"},
    imports_upwards: {"plan/rows.py": "def f():\n    from ..run.merge import merge_"},
    calls_with_forecasts: {
        "simulate/a.py": "",
        "simulate/__init__.py": "",
        "models/a.py": "from ..simulate import a",
    },
    modules_with_benchmarks: {"commands/bench.py": "def f():\n    import benchmarks.command"},
    pure_modules_with_torch: {"plan.py": "from .pattern import x", "pattern.py": "import torch.nn"},
    modules_with_triton: {"kernels/sdpa.py": "def f():\n    import triton.language as tl"},
    modules_with_the_reference: {"layers.py": "def f():\n    from . import reference"},
    modules_that_send: {
        "models/longnet.py": "import torch.distributed as dist\ndist.all_reduce(x)"
    },
    modules_that_hide_imports: {
        "run/a.py": "from importlib import import_module\nimport_module(f'..{x}')"
    },
    cycles: {
        "run/a.py": "from . import b",
        "run/b.py": "from .c import x",
        "run/c.py": "from .a import y",
    },
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_can_fail(rule, tmp_path):
    """Proof that each rule sees a breach, in a package that is made for it; and that the package is fine without."""
    packages = ("", "models/", "ranks/", "run/", "plan/", "commands/")
    tree = {
        f"{folder}__init__.py": ""
        for folder in packages
        if folder != "plan/" or "plan.py" not in BREACHES[rule]
    }
    tree |= {"reference.py": "", "ranks/link.py": "", "run/merge.py": "", **BREACHES[rule]}
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert rule(read(tmp_path)) != set()
    for name in BREACHES[rule]:
        (tmp_path / name).write_text("")
        if rule is modules_in_no_room:
            (tmp_path / name).unlink()
    assert rule(read(tmp_path)) == set()


@pytest.mark.parametrize(
    "statement",
    [
        "from torch.distributed import all_reduce",
        "import torch.distributed\ntorch.distributed.barrier()",
        "from torch import distributed as d\nd.isend(x)",
        "from torch.distributed._functional_collectives import permute_tensor",
    ],
)
def test_sending_is_seen_however_it_is_written(statement, tmp_path):
    """Catches a reading of calls that misses one way of writing them."""
    (tmp_path / "models.py").write_text(statement)
    assert modules_that_send(read(tmp_path)) == {"models"}


@pytest.mark.parametrize(
    "statement", ["import torch", "from torch import Tensor", "import torch.nn as t"]
)
def test_torch_is_seen_however_it_is_imported(statement, tmp_path):
    """Catches a reading of imports that misses one way of writing them; types alone are free."""
    (tmp_path / "plan.py").write_text(f"try:\n    {statement}\nexcept ImportError:\n    pass")
    assert pure_modules_with_torch(read(tmp_path)) == {"plan"}
    (tmp_path / "plan.py").write_text(
        f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {statement}"
    )
    assert pure_modules_with_torch(read(tmp_path)) == set()


@pytest.mark.parametrize(
    "statement",
    [
        "from ..training import load",
        "def f():\n    from ..training.load import x",
        "def f():\n    return import_module('..training.load', __package__)",
        "class A:\n    def f(self):\n        import importlib\n        importlib.import_module('{NAME}.training.load')",
        "if TYPE_CHECKING:\n    from ..training.load import x",
        "def f():\n    subprocess.run([sys.executable, '-m', '{NAME}.training.load'])",
    ],
)
def test_a_room_above_is_seen_however_it_is_imported(statement, tmp_path):
    """Catches a reading of imports that misses one way to a room above; and a circle that closes inside a function."""
    files = {
        "training/load.py": "from ..models import longnet",
        "models/longnet.py": statement.replace("{NAME}", NAME),
    }
    for name, text in {
        "__init__.py": "",
        "training/__init__.py": "",
        "models/__init__.py": "",
        **files,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    modules = read(tmp_path)
    assert "models.longnet -> training.load" in imports_upwards(modules)
    is_for_types = "TYPE_CHECKING" in statement
    assert cycles(modules) == (set() if is_for_types else {"models.longnet", "training.load"})


def test_lazy_faces_list_modules_of_their_own_room():
    """Catches a room above that is listed where strings are not read: in a lazy `__init__`, or among the commands."""
    modules = read(PACKAGE)
    for name in MAY_LIST:
        texts = [
            node.value for node in ast.walk(modules[name].tree) if isinstance(node, ast.Constant)
        ]
        assert len(modules[name].unread) == 1
        assert not [
            text for text in texts if isinstance(text, str) and text.startswith((NAME, ".."))
        ]


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_leave_torch_alone(name):
    """The same rule, asked of Python itself."""
    names = [f"{NAME}.{other}" for other in ours() if other.partition(".")[0] == name]
    code = (
        f"import {', '.join(names)}, sys; assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def private_names(package: Path) -> tuple[set[str], set[str]]:
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


def test_private_names_of_others_are_listed(tmp_path):
    """Catches a private name of torch that is used and not listed, and one that is listed and not used."""
    page = (PACKAGE.parents[1] / "docs/platforms.md").read_text()
    listed = set(
        re.findall(r"\b_[a-zA-Z]\w*", page.partition("## Private names")[2].partition("\n## ")[0])
    )
    used, defined = private_names(PACKAGE)
    assert used - defined <= listed
    assert listed <= used
    (tmp_path / "a.py").write_text(
        "from torch._utils import y\n"
        "class A:\n  def _b(self): self._b, torch._c, d._e, z, x['_f'], 'of _g', '_b'"
    )
    used, defined = private_names(tmp_path)
    assert used - defined == {"_utils", "_c", "_e", "_f"}


def test_a_call_on_one_device_imports_few_files():
    """Catches an import of what talks to other ranks, or of an application."""
    code = f"""if True:
        import sys, torch
        from {NAME} import DilatedPattern, dilated_attention
        rows = torch.randn(1, 8, 1, 4, requires_grad=True)
        dilated_attention(rows, rows, rows, DilatedPattern((4,), (1,))).sum().backward()
        print(*(name for name in sys.modules if name.startswith("{NAME}")))
    """
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    imported = ended.stdout.split()
    assert len(imported) <= 45
    assert f"{NAME}.ranks.link" not in imported


def test_a_call_does_not_import_the_compiler():
    """Catches an import of torch._dynamo, which takes ten times as long as all of ours: by a first call, its backward,
    or a context. (`refuse` has the mark of torch's function that imports it.) And modules that cannot be reloaded, or
    imported once more after Ctrl-C."""
    code = f"""if True:
        import sys, torch, {NAME}.layers
        from {NAME} import ContextParallel, DilatedPattern, dilated_attention
        from {NAME}.ranks.named import refuse
        rows = torch.randn(1, 8, 1, 4, requires_grad=True)
        for parallel in None, ContextParallel():
            dilated_attention(rows, rows, rows, DilatedPattern((4,), (1,)), parallel=parallel).sum().backward()
        assert 'torch._dynamo' not in sys.modules, 'dynamo was imported'
        marked = torch.compiler.assume_constant_result(lambda: None)
        assert marked.__dict__ == refuse.__dict__, 'torch marks functions otherwise'
        import importlib, {NAME}.attention.attention as module, {NAME}.layers.rotary
        for _ in range(2):  # an op that is defined once more takes the place of the former one
            importlib.reload(module), importlib.reload({NAME}.layers.rotary)
            module.dilated_attention(rows, rows, rows, DilatedPattern((4,), (1,))).sum().backward()
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_the_public_face():
    """Catches a name in __all__ that does not exist, and one that is missing from dir()."""
    assert dir(ring_dilated_attention) == sorted(ring_dilated_attention.__all__)
    for name in ring_dilated_attention.__all__:
        assert getattr(ring_dilated_attention, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'dilated_atention'"):
        _ = ring_dilated_attention.dilated_atention
