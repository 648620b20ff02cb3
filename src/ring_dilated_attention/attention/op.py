"""Ops of torch that do not import its compiler."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def define_op(function: Callable[..., Any]) -> Any:
    """Decorator: an op with the name of the function, which writes to none of its arguments.

    `torch.library.custom_op` makes the same. But its first call imports torch._dynamo, a second or two, so that dynamo
    never traces the function, and this is needed only where dynamo has been imported.
    """
    name, schema = function.__name__.strip("_"), torch.library.infer_schema(function, mutates_args=())
    untraced = functools.cache(lambda: torch.compiler.disable(function))

    def run(*args: Any) -> Any:
        return (untraced() if "torch._dynamo" in sys.modules else function)(*args)

    torch.library.define(f"ring_dilated_attention::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"ring_dilated_attention::{name}", "default", run)
    return getattr(torch.ops.ring_dilated_attention, name).default
