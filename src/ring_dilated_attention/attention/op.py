"""Defines custom ops without importing torch's compiler, which `torch.library.custom_op` would import."""

import sys
from collections.abc import Callable
from typing import Any

import torch

Code = Callable[..., Any]
# Keeps each op's Library, by the op's name, because torch forgets an op when its Library is freed.
_libraries: dict[str, torch.library.Library] = {}


def define_op(
    name: str, function: Code, fake: Code, backward: Code | None = None, save: Code | None = None
) -> Any:
    """Define and return the op torch.ops.ring_dilated_attention.<name>.

    The function must neither write to an argument nor return an argument. `fake` is what torch.library.register_fake
    takes; `backward` and `save` are what torch.library.register_autograd takes.

    `torch.library.custom_op` marks the function, so that dynamo does not trace it. For the mark it imports
    torch._dynamo at the first call, which takes a second or two. `define_op` leaves out the mark until something else
    has imported torch._dynamo.
    """
    # After the first call under dynamo, this list holds one entry: `function`, marked so that dynamo does not trace
    # it. (With functools.cache instead of a list, dynamo would give a warning.)
    untraced: list[Code] = []

    def run(*args: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args)
        if not untraced:
            untraced.append(torch.compiler.disable(function))
        return untraced[0](*args)

    # Remove an earlier op of this name. There is one if the module that calls `define_op` is imported a second time.
    _libraries.pop(name, None)
    library = _libraries[name] = torch.library.Library("ring_dilated_attention", "FRAGMENT")
    schema = torch.library.infer_schema(function, mutates_args=())
    library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, run, "CompositeExplicitAutograd")
    op = getattr(torch.ops.ring_dilated_attention, name).default
    torch.library.register_fake(op, fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(op, backward, setup_context=save, lib=library)
    return op
