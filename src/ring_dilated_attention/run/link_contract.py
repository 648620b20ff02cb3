"""The methods that the executor and `DilatedCache.gather` call on the objects that connect ranks."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..plan.plan import Message


class Pending(Protocol):
    """Messages that have been started and may not have arrived."""

    def wait(self) -> None:
        """Return when the messages have been sent and received. A second call returns at once."""


Messages = Sequence[tuple[Tensor, Message]]  # each message of a plan with its contiguous tensor


class Link(Protocol):
    """Carries the messages of a plan."""

    def carry(self, sends: Messages, receives: Messages, moment: str) -> Pending:
        """Start sending and receiving. `moment` is quoted in errors."""

    def carry_apart(
        self, sends: Messages, receives: Messages, moment: str
    ) -> tuple[Pending, Pending]:
        """As `carry`, but returns two: the messages that are sent, and those that are received."""


class Dealer(Protocol):
    """Connects ranks that deal heads for positions."""

    def all_to_all_single(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], like: Tensor, moment: str
    ) -> list[Tensor]:
        """Send a flat tensor to every rank and receive one from each, of the given sizes. Tensors may be empty."""


class ContextProtocol(Protocol):
    """The part of `ContextParallel` that `DilatedCache.gather` uses."""

    ranks: Any  # the class `ranks.ranks.Ranks` says what each method does
