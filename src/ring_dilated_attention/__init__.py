"""Exact dilated attention (LongNet), on one device or, by ring attention, on many devices.

Each name in `__all__` is imported when it is first used. So the modules `pattern` and `plan`, which need no torch, can
be used without importing torch.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import dilated_attention as dilated_attention
    from .attention import save_attention as save_attention
    from .attention.explain import explain as explain
    from .layers import MultiheadDilatedAttention as MultiheadDilatedAttention
    from .pattern import DilatedPattern as DilatedPattern
    from .ranks.context import ContextParallel as ContextParallel
    from .run.dilated_cache import DilatedCache as DilatedCache

__version__ = "0.1.0"

_HOME = {
    "ContextParallel": "ranks.context",
    "DilatedCache": "run.dilated_cache",
    "DilatedPattern": "pattern",
    "MultiheadDilatedAttention": "layers",
    "dilated_attention": "attention",
    "explain": "attention.explain",
    "save_attention": "attention",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Ops:
    """A placeholder at `torch.ops.ring_dilated_attention`. When an op is first looked up there, the placeholder is
    removed and the modules that register the ops are imported.

    So a program that has imported only `ring_dilated_attention` can load files that torch.export saved.
    """

    def __getattr__(self, name: str) -> Any:
        ops = sys.modules["torch"].ops
        vars(ops).pop(__name__, None)
        import_module(".attention", __name__)
        return getattr(getattr(ops, __name__), name)


def _prepare(torch: Any) -> None:
    """Make `torch.ops` find the package's ops, and let `torch.load(weights_only=True)` load patterns."""
    from .pattern import DilatedPattern

    vars(torch.ops).setdefault(__name__, _Ops())
    torch.serialization.add_safe_globals([DilatedPattern])


class _AfterTorch:
    """Waits for torch to be imported, and then calls `_prepare`. Used if this package is imported before torch.

    The class is a finder in sys.meta_path. It stays there until torch's code has run, because a program may ask for
    torch's spec (importlib.util.find_spec) without importing torch.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, cls)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_prepare(module: Any) -> None:
                execute(module)
                if cls in sys.meta_path:
                    sys.meta_path.remove(cls)
                _prepare(module)

            spec.loader.exec_module = execute_and_prepare  # type: ignore[method-assign]
        return spec


if "torch" in sys.modules:
    _prepare(sys.modules["torch"])
else:
    sys.meta_path.insert(0, _AfterTorch)
