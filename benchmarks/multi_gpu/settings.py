"""The sizes, exchanges and limits of the benchmark of several GPUs, and tiny ones (QUICK) for two CPU ranks."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.commands.local_ranks import Launch, run_ranks

from ..measure import Sizes

KILLED = "is killed"
KILLED_WAITING = "is killed, and the others wait for their device"
RAISES = "raises"


# What tells a rank its GPU (see `Launch`) where the group is made as in most users' scripts.
TOLD_BY = ("device_id", "set_device", "LOCAL_RANK")


class Settings(NamedTuple):
    """What a run measures, and with which sizes."""

    num_ranks: int
    has_gpus: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)  # timed calls take the last
    seq_len: int = 251  # the length of calls that are compared with the definition: a prime
    head_dim: int = 64
    # Timed calls have at least so many heads. The number is rounded up to a multiple of the number of ranks.
    least_heads: int = 12
    length: int = 16_384  # the positions of each rank in timed calls
    message_bytes: int = 2**28
    # The positions of each rank when a rank fails. Its keys and values, 16 heads of 64 in float32, then have 64 MiB.
    fault_rows: int = 8192
    timeout: float = 10  # in seconds, of the ContextParallel when a rank fails
    ways: tuple[str, ...] = ("ring", "all_gather", "all_to_all", "2-D mesh")
    # each kind of fault, with the limit of its part in seconds
    faults: tuple[tuple[str, float], ...] = ((KILLED, 35), (KILLED_WAITING, 60), (RAISES, 35))

    @property
    def sizes(self) -> Sizes:
        """The sizes of timed calls."""
        heads_of_rank = -(-self.least_heads // self.num_ranks)
        num_heads = self.num_ranks * heads_of_rank
        return Sizes(self.num_ranks * self.length, num_heads, self.head_dim, self.dtypes[-1])

    @property
    def device_type(self) -> str:
        return "cuda" if self.has_gpus else "cpu"

    def device(self, rank: int) -> str:
        """The device of a rank's tensors."""
        return f"cuda:{rank}" if self.has_gpus else "cpu"

    @property
    def usual_transport(self) -> str:
        """The backend of a group as most users make it: such a group cannot send CPU tensors.

        Without GPUs a group with the backend "cuda:gloo" cannot send them either.
        """
        return "nccl" if self.has_gpus else "cuda:gloo"

    def run_ranks(
        self,
        seconds: float,
        function: Callable[..., Any],
        *args: Any,
        transport: str | None = None,
        told_by: str = "set_device",
        **options: Any,
    ) -> list[Any]:
        """Call function(worker, settings, *args) on every rank. Returns the results, in the order of ranks.

        seconds: the limit. Raises RankFailedError if a rank fails, or if the time is up.
        """
        num_threads = 1
        if self.has_gpus:
            num_threads = max(1, (os.cpu_count() or 1) // self.num_ranks)
        launch = Launch(
            self.num_ranks,
            num_threads,
            has_gpus=self.has_gpus,
            transport=transport,
            told_by=told_by,
            seconds=seconds,
        )
        return run_ranks(launch, function, self, *args, **options)


QUICK = Settings(
    num_ranks=2,
    has_gpus=False,
    dtypes=(torch.float32,),
    seq_len=37,
    head_dim=8,
    least_heads=2,
    length=64,
    message_bytes=2**16,
    fault_rows=64,
    ways=("ring", "all_to_all"),
    faults=((KILLED, 40), (RAISES, 40)),
)
