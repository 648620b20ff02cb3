"""What the executor, and the hand-over of a cache, ask of whatever connects ranks."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ..plan.plan import Message
from ..plan.sharding import Shard


class Pending(Protocol):
    """Messages in flight."""

    def wait(self) -> None:
        """Return when they have been sent and received; at once if asked again."""


Messages = Sequence[tuple[Tensor, Message]]  # of a plan, each with its contiguous tensor


class Link(Protocol):
    """Carries the messages of a plan."""

    def carry(self, sends: Messages, receives: Messages, moment: str) -> Pending:
        """Start sending and receiving. `moment` is quoted in errors."""

    def carry_apart(self, sends: Messages, receives: Messages, moment: str) -> tuple[Pending, Pending]:
        """The same, to wait apart for what is sent and for what is received."""


class Dealer(Protocol):
    """Connects ranks that deal heads for positions."""

    def all_to_all_single(
        self, parts: Sequence[Tensor], sizes: Sequence[int], like: Tensor, moment: str
    ) -> list[Tensor]:
        """Send a flat part to every rank (parts may be empty) and receive one from each, of the given sizes."""


class Owners(Protocol):
    """The ranks that hold a sequence together (`ranks.Ranks` says what each method does)."""

    rank: int
    world_size: int

    def agree(self, length: int, fields: dict[str, object], failure: str | None) -> tuple[int, ...]: ...

    def check_all_here(self, method: str) -> None: ...

    def shards(self, lengths: Sequence[int]) -> tuple[Shard, ...]: ...

    def deliver(
        self, make_parts: Callable[[], Sequence[Tensor]], sizes: Sequence[int], like: Tensor, moment: str
    ) -> list[Tensor]: ...


class Parallel(Protocol):
    """What knows them: a ContextParallel."""

    ranks: Owners
