"""What the executor asks of whatever connects ranks."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..plan.plan import Message


class Pending(Protocol):
    """Messages in flight."""

    def wait(self) -> None:
        """Return when they have been sent and received; at once if asked again."""


class Link(Protocol):
    """Carries the messages of a plan, each a contiguous tensor."""

    def carry(
        self, sends: Sequence[tuple[Tensor, Message]], receives: Sequence[tuple[Tensor, Message]], moment: str
    ) -> Pending:
        """Start sending and receiving. `moment` is quoted in errors."""

    def carry_apart(
        self, sends: Sequence[tuple[Tensor, Message]], receives: Sequence[tuple[Tensor, Message]], moment: str
    ) -> tuple[Pending, Pending]:
        """The same, to wait apart for what is sent and for what is received."""


class Dealer(Protocol):
    """Connects ranks that deal heads for positions."""

    def all_to_all_single(
        self, parts: Sequence[Tensor], sizes: Sequence[int], like: Tensor, moment: str
    ) -> list[Tensor]:
        """Send a flat part to every rank (parts may be empty) and receive one from each, of the given sizes."""
