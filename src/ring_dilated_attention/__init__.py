"""Exact dilated attention (LongNet) on one device, and the same call over many by ring attention.

The package imports its members when they are first used, so that the pure modules (`pattern`, `plan`) can
be used without importing torch.
"""

from importlib import import_module
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
