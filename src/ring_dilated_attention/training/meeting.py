"""How the ranks of a run join one process group, by the launcher's folder or by the variables of torchrun or srun."""

import json
import os
import secrets
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from .rank_launcher import check_meeting, started

POLL_SECONDS = 0.2
JOIN_SECONDS = 300  # that ranks may start apart


def join_ranks(folder: Path | None, timeout: timedelta) -> None:
    """Join the process group. folder: the launcher's, or None. timeout: of the messages that torch sends for DDP."""
    if dist.is_initialized():
        return
    store: dist.Store | None = None
    rank, num_ranks = started()
    if folder is not None:
        store = dist.FileStore(str(folder / "store"), num_ranks)
    else:
        check_meeting()
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _of_this_start(rank, num_ranks)
    dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=num_ranks)


def _of_this_start(rank: int, num_ranks: int) -> dist.Store:
    """A part of the agents' store that no earlier start has written to. torch 2.13 keeps the store over restarts, and
    ranks would find the addresses of dead ones there.

    The first rank names the part, and lists who came to it. Another rank comes to the part that is named last, until it
    is on the list: there may be a part that an earlier start named, but that start's ranks are on its list.
    """
    joining = timedelta(seconds=JOIN_SECONDS)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=joining)
    own, deadline = secrets.token_hex(8), time.monotonic() + JOIN_SECONDS
    if rank == 0:
        store.set("rda/named", own)
        came = {str(other): store.get(f"rda/{own}/{other}").decode() for other in range(1, num_ranks)}
        store.set(f"rda/{own}/list", json.dumps(came))
        return dist.PrefixStore(f"rda/{own}", store)
    while time.monotonic() < deadline:
        name = store.get("rda/named").decode()
        store.set(f"rda/{name}/{rank}", own)
        is_listed = store.check([f"rda/{name}/list"])
        if is_listed and json.loads(store.get(f"rda/{name}/list")).get(str(rank)) == own:
            return dist.PrefixStore(f"rda/{name}", store)
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"timed out: rank 0 did not list this one within {JOIN_SECONDS} s")
