"""What a simulated rank sends and holds, measured while it runs."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Use(NamedTuple):
    """The bytes that a rank sent in all, and the most that it held at once."""

    rank: int
    world_size: int
    sent_bytes: int = 0
    peak_bytes: int = 0

    def __str__(self) -> str:
        held, sent = f"{self.peak_bytes:,}", f"{self.sent_bytes:,}"
        return f"rank {self.rank} of {self.world_size}: held {held} bytes at most, sent {sent}"

    def after(self, sent_bytes: int, peak_bytes: int) -> "Use":
        """With one more call."""
        return self._replace(sent_bytes=self.sent_bytes + sent_bytes, peak_bytes=max(self.peak_bytes, peak_bytes))


class Held(TorchDispatchMode):
    """Bytes of the given rows, and of every storage that an op of this thread returns, for as long as it lives.

    What an op makes and frees by itself (a kernel's scratch, the cast of what it adds to another dtype) is not seen.
    """

    def __init__(self, rows: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.num_bytes = self.peak_bytes = sum(x.nbytes for x in rows if x is not None)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(results):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known:  # else a view, or written in place
                known.add(x.untyped_storage()._cdata)
                self._hold(x.untyped_storage().nbytes())
                weakref.finalize(x.untyped_storage(), self._hold, -x.untyped_storage().nbytes()).atexit = False
        return results

    def _hold(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
