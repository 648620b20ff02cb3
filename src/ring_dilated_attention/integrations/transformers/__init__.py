"""Hugging Face transformers: `attn_implementation="dilated"`, on one device or over ranks that share sequences."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import BoundedCache as BoundedCache
    from .convert import convert_to_dilated as convert_to_dilated
    from .convert import register as register
    from .ranks import context_parallel as context_parallel
    from .trainer import SameSample as SameSample

_HOME = {
    "BoundedCache": "cache",
    "SameSample": "trainer",
    "context_parallel": "ranks",
    "convert_to_dilated": "convert",
    "register": "convert",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
