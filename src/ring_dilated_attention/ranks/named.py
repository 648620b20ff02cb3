"""Contexts by their keys, since custom ops take no objects.

A call on one device imports this file, and nothing that talks to other ranks.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import count
from weakref import WeakValueDictionary

import torch

from .ranks import Ranks

# An entry lives as long as its context.
_contexts: "WeakValueDictionary[str, NamedContext]" = WeakValueDictionary()
_made = count()


class NamedContext:
    """What calls and ops know of a `ContextParallel`."""

    ranks: Ranks
    key: str

    def _take_key(self, name: str) -> None:
        """A later context may have the same name, but never the same key."""
        self.key = f"{name}, number {next(_made)}"
        _contexts[self.key] = self


def context_named(key: str) -> NamedContext:
    """The context that an op was called with."""
    if key not in _contexts:
        raise RuntimeError(f"the ContextParallel {key!r} is gone. Keep it as long as it is in use.")
    return _contexts[key]


def refuse(key: str, reason: str) -> None:
    """Tell the other ranks why this one refuses their call. Raises a ValueError, as they do."""
    context_named(key).ranks.agree(0, {}, reason)


# torch.compile runs `refuse` while it traces: the other ranks hear of a refused call at once. This is the mark of
# torch.compiler.assume_constant_result, which would import dynamo, a second or two, also where nothing is compiled.
refuse.__dict__["_dynamo_marked_constant"] = True


def called_by(parallel: NamedContext | None, number: int | None) -> AbstractContextManager[None]:
    """In this block the module of this number calls. Compiled code does not tell."""
    if parallel is None or torch.compiler.is_compiling():
        return nullcontext()
    return parallel.ranks.called_by(number)
