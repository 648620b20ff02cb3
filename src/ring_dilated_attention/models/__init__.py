"""The transformer built on dilated attention. Its members are imported when they are first used (see the package)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import LongNetConfig
    from .longnet import LongNetLM, NextTokenLoss

__all__ = ["LongNetConfig", "LongNetLM", "NextTokenLoss"]

_HOME = {"LongNetConfig": "config", "LongNetLM": "longnet", "NextTokenLoss": "longnet"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
