"""Ops of torch that do not import its compiler."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def define_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for a function that writes to none of its arguments: torch's op ring_dilated_attention::<name>.

    It is what `torch.library.custom_op` makes, but for one thing: that op's first call imports torch._dynamo, so that
    dynamo never traces the function. This takes a second or two, and is needed only where dynamo is there already.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        untraced = functools.cache(lambda: torch.compiler.disable(function))

        def run(*args: Any) -> Any:
            return (untraced() if "torch._dynamo" in sys.modules else function)(*args)

        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(f"ring_dilated_attention::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(f"ring_dilated_attention::{name}", "default", run)
        return getattr(torch.ops.ring_dilated_attention, name).default

    return decorate
