"""Protocols of the objects that connect ranks: the methods that the executor and `DilatedCache.gather` call."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..plan.plan import Message


class Pending(Protocol):
    """Messages that a rank has started to send or to receive, and that may not have arrived yet."""

    def wait(self) -> None:
        """Return when the messages have been sent and received. A second call returns immediately."""


# Pairs (tensor, message). The tensor to send or to fill is contiguous, and the plan's `Message` describes the transfer.
Messages = Sequence[tuple[Tensor, Message]]


class Link(Protocol):
    """Sends and receives the messages of a plan."""

    def carry(self, sends: Messages, receives: Messages, moment: str) -> Pending:
        """Start to send and to receive messages. moment: the text by which an error refers to these messages."""

    def carry_apart(
        self, sends: Messages, receives: Messages, moment: str
    ) -> tuple[Pending, Pending]:
        """Like `carry`, but returns one `Pending` for the sends and one for the receives, so that the caller can wait
        for them separately."""


class Dealer(Protocol):
    """Connects ranks that exchange heads for positions."""

    def all_to_all_single(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], like: Tensor, moment: str
    ) -> list[Tensor]:
        """Send the flat tensor tensors[i] to rank i, for every rank i of the group. Tensors may be empty.

        Returns the flat tensors received from all ranks, with sizes[i] elements from rank i. like: a tensor with the
        dtype and device of the sent and received tensors. moment: the text by which an error refers to this exchange.
        """


class ContextProtocol(Protocol):
    """The part of `ContextParallel` that `DilatedCache.gather` uses."""

    ranks: Any  # an object of the class `ranks.ranks.Ranks`, which describes the methods
