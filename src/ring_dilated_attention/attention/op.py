"""Ops of torch that do not import its compiler."""

import sys
from collections.abc import Callable
from typing import Any

import torch


def define_op(function: Callable[..., Any]) -> Any:
    """Decorator: an op with the name of the function, which writes to none of its arguments and returns none.

    The first call of a `torch.library.custom_op` imports torch._dynamo, a second or two, so that dynamo never traces
    the function. Here this is done only where dynamo has been imported.
    """
    name, schema = function.__name__.strip("_"), torch.library.infer_schema(function, mutates_args=())
    untraced: list[Callable[..., Any]] = []  # not functools.cache, of which dynamo warns

    def run(*args: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args)
        if not untraced:
            untraced.append(torch.compiler.disable(function))
        return untraced[0](*args)

    torch.library.define(f"ring_dilated_attention::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"ring_dilated_attention::{name}", "default", run)
    return getattr(torch.ops.ring_dilated_attention, name).default
