"""Finds a `ContextParallel` by its key. Custom ops take the key, a string, since they cannot take the context itself.

Calls on one device import this file too. So this file must not import files that send messages.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import count
from weakref import WeakValueDictionary

import torch

from .ranks import Ranks

# The contexts of this process, by `key`. An entry is removed when its context is freed.
_contexts: "WeakValueDictionary[str, NamedContext]" = WeakValueDictionary()
_made = count()


class NamedContext:
    """The part of a `ContextParallel` that calls and custom ops use."""

    ranks: Ranks
    key: str

    def _take_key(self, name: str) -> None:
        """Make the context's `key` from its name. A later context may have the same name, but never the same key."""
        self.key = f"{name}, number {next(_made)}"
        _contexts[self.key] = self


def context_named(key: str) -> NamedContext:
    """The context with this key. Raises RuntimeError if it exists no more."""
    if key not in _contexts:
        raise RuntimeError(f"the ContextParallel {key!r} is gone. Keep it as long as it is in use.")
    return _contexts[key]


def refuse(key: str, reason: str) -> None:
    """Tell the other ranks why this rank refuses the call that they make. Raises a ValueError on all ranks."""
    context_named(key).ranks.agree(0, {}, reason)


# Make torch.compile run `refuse` while it traces, so that the other ranks learn of a refused call immediately. The
# decorator torch.compiler.assume_constant_result sets this attribute too, but imports dynamo, which is slow.
refuse.__dict__["_dynamo_marked_constant"] = True


def called_by(parallel: NamedContext | None, number: int | None) -> AbstractContextManager[None]:
    """A context manager for the calls that a module makes. It tells `parallel` the number of the module. Under
    torch.compile the context manager does nothing."""
    if parallel is None or torch.compiler.is_compiling():
        return nullcontext()
    return parallel.ranks.called_by(number)
