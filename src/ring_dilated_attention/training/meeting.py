"""How the ranks of a run join one process group, by the launcher's folder or by the variables of torchrun or srun."""

import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from .rank_launcher import check_meeting, started
from .restarts import RESTART, are_by_torchrun

JOIN_TIME = timedelta(seconds=300)  # that ranks may start apart


def join_ranks(folder: Path | None, timeout: timedelta) -> None:
    """Join the process group. folder: the launcher's, or None. timeout: of the messages that torch sends for DDP."""
    if dist.is_initialized():
        return
    rank, num_ranks = started()
    store = dist.FileStore(str(folder / "store"), num_ranks) if folder else store_of_launcher(rank, num_ranks)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(num_ranks)], JOIN_TIME)
    dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=num_ranks)


def store_of_launcher(rank: int, num_ranks: int) -> dist.Store:
    """Where the ranks of this start meet under torchrun or srun, apart from those of earlier starts.

    torch 2.13 has one store for all starts of a torchrun, with the addresses of dead ranks. Each torchrun counts its
    own restarts, so several torchruns need a new store from torch for each start.
    """
    check_meeting()
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_torchruns and are_by_torchrun() and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        remedy = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for each torchrun"
        raise ValueError(f"--max-restarts of several torchruns: ranks would find the addresses of dead ones: {remedy}")
    store: dist.Store = next(dist.rendezvous("env://", rank, num_ranks, timeout=JOIN_TIME))[0]
    return dist.PrefixStore(f"start-{os.environ[RESTART]}", store) if is_torchruns else store
