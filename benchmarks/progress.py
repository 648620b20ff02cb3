"""A progress bar for what names its steps as it begins them."""

import itertools
from collections.abc import Callable
from typing import Any


def stepper(bar: Any) -> Callable[[str], None]:
    """Called before each step with its name; the bar counts those that are done."""
    num_done = itertools.count()

    def step(text: str) -> None:
        if next(num_done):
            bar.update()
        bar.set_postfix_str(text)

    return step
