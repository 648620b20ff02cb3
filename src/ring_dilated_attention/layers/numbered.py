"""Modules that ranks can tell apart."""

from typing import Any

from torch import nn

from ..ranks.context import ContextParallel


class NumberedModule(nn.Module):
    """A module that makes calls over ranks. By its number ranks compare which module calls."""

    parallel: ContextParallel | None = None
    _number: int | None = None

    def share(self, parallel: ContextParallel | None) -> None:
        """From now on inputs and outputs are shards of sequences that these ranks share."""
        self.parallel = parallel
        self._number = None if parallel is None else parallel.ranks.number_module()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is another module: it gets a number of its own."""
        super().__setstate__(state)
        self.share(self.parallel)
