"""Defines custom ops. Unlike `torch.library.custom_op` this does not import torch's compiler."""

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
    """Define and return the op torch.ops.ring_dilated_attention.<name>. The function must neither write to an argument
    nor return one. `fake`, `backward` and `save` are as torch.library's register_fake and register_autograd take them.

    `torch.library.custom_op` tells dynamo not to trace the function. For that it imports torch._dynamo at the first
    call, which takes a second or two. This op tells dynamo only if something else has imported torch._dynamo.
    """
    untraced: list[Code] = []  # not functools.cache: dynamo would warn of it

    def run(*args: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args)
        if not untraced:
            untraced.append(torch.compiler.disable(function))
        return untraced[0](*args)

    _libraries.pop(name, None)  # made by an earlier import of the same module
    library = _libraries[name] = torch.library.Library("ring_dilated_attention", "FRAGMENT")
    schema = torch.library.infer_schema(function, mutates_args=())
    library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, run, "CompositeExplicitAutograd")
    op = getattr(torch.ops.ring_dilated_attention, name).default
    torch.library.register_fake(op, fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(op, backward, setup_context=save, lib=library)
    return op
