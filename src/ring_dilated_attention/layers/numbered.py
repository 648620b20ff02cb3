"""Gives each module of a `ContextParallel` a number, so that ranks can check that they all call the same module."""

from typing import Any

from torch import nn

from ..ranks.context import ContextParallel


class NumberedModule(nn.Module):
    """A module that several ranks call together. Each module has a number. Before a call the ranks compare the numbers
    of the modules that they call, and raise an error if these numbers differ."""

    parallel: ContextParallel | None = None
    _number: int | None = None

    def share(self, parallel: ContextParallel | None) -> None:
        """Set `parallel`: from now on inputs and outputs are shards of sequences that these ranks share."""
        self.parallel = parallel
        self._number = None if parallel is None else parallel.ranks.number_module()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give a copy of the module its own number."""
        super().__setstate__(state)
        self.share(self.parallel)
