"""Ops of torch that do not import its compiler."""

import sys
from collections.abc import Callable
from typing import Any

import torch

Code = Callable[..., Any]
# by the op's name; kept, because what is registered for an op lasts only as long as its Library
_libraries: dict[str, torch.library.Library] = {}


def define_op(
    name: str, function: Code, fake: Code, backward: Code | None = None, save: Code | None = None
) -> Any:
    """torch.ops.ring_dilated_attention.<name>, for a function that neither writes to an argument nor returns one.
    `fake`, `backward` and `save` are as torch.library's register_fake and register_autograd take them.

    `torch.library.custom_op` keeps dynamo from tracing the function, and therefore imports torch._dynamo at the first
    call, a second or two. Here that is done only where something else has imported dynamo.
    """
    untraced: list[Code] = []  # not functools.cache, of which dynamo warns

    def run(*args: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args)
        if not untraced:
            untraced.append(torch.compiler.disable(function))
        return untraced[0](*args)

    _libraries.pop(name, None)  # of a module that is imported once more
    library = _libraries[name] = torch.library.Library("ring_dilated_attention", "FRAGMENT")
    schema = torch.library.infer_schema(function, mutates_args=())
    library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, run, "CompositeExplicitAutograd")
    op = getattr(torch.ops.ring_dilated_attention, name).default
    torch.library.register_fake(op, fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(op, backward, setup_context=save, lib=library)
    return op
