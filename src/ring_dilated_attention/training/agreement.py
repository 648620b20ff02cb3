"""How the ranks of a training run connect, exchange values, and agree on whether to train.

Ranks of `rda train --ranks` connect through a file in the launcher's folder. Ranks under torchrun or srun connect
through the address that they receive.

If one rank gets an error that the user can fix, all ranks raise an error. The first rank of each launcher reports the
reason.
"""

import ctypes
import json
import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ..ranks.context import ContextParallel
from .files import in_words
from .rank_launcher import RESTART, started
from .run_folder import are_by_torchrun

JOIN_TIME = timedelta(seconds=300)  # how long a rank waits for all ranks to start
T = TypeVar("T")


def join_ranks(folder: Path | None, timeout: timedelta) -> None:
    """Join the process group, if there are several ranks.

    folder: the folder through which the ranks of `rda train --ranks` connect; None under torchrun or srun.

    timeout: the time limit for each of DDP's messages between ranks.
    """
    rank, num_ranks = started()
    if dist.is_initialized() or num_ranks == 1:
        return
    if folder is not None:
        store: dist.Store = dist.FileStore(str(folder / f"ranks-{os.environ[RESTART]}"), num_ranks)
        # Never destroy this store. Its destructor locks the file, without a limit of time. A rank that is stopped while
        # it holds the lock would keep a rank that has failed from ending. The launcher removes the file.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    else:
        store = store_of_launcher(rank, num_ranks)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(num_ranks)], JOIN_TIME)
    dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=num_ranks)


def store_of_launcher(rank: int, num_ranks: int) -> dist.Store:
    """The key-value store through which the ranks connect under torchrun or srun.

    torchrun may start failed ranks again. torch 2.13 keeps the same store after a restart, with the addresses of ranks
    that have ended. So the name of each entry begins with the number of restarts, and ranks read only entries that were
    written since the last restart.

    With several torchruns (one on each host) these numbers may differ, because each torchrun counts only its own
    restarts. Then each start needs a new store. If torchrun would keep its store, a ValueError says how to get new
    stores.
    """
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_torchruns and are_by_torchrun() and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise ValueError(
            "after a restart, ranks would read the addresses of ranks that have ended: export "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for each torchrun"
        )
    # If the host of the store is dead, torch tries twice to connect, each time for as long as `timeout` says.
    connect_time = JOIN_TIME / 2
    store: dist.Store = next(dist.rendezvous("env://", rank, num_ranks, timeout=connect_time))[0]
    return dist.PrefixStore(f"start-{os.environ[RESTART]}", store) if is_torchruns else store


class Refusal(ValueError):
    """Raised on every rank if one rank refuses the run. The text is the reason.

    The text is empty on a rank if another rank of the same launcher reports the reason.
    """


def together(parallel: ContextParallel, action: Callable[[], T]) -> T:
    """Call action() on every rank. Returns this rank's result.

    If action() raises a ValueError or an OSError on one of several ranks, all ranks raise a Refusal.
    """
    refusal, result = "", None
    try:
        result = action()
    except Refusal:
        raise
    except (ValueError, OSError) as error:
        if parallel.world_size == 1:
            raise
        refusal = in_words(error)
    for rank, reason in values_of_all(parallel, (name_of_rank(), refusal)):
        if reason:
            refuse(f"{rank}: {reason}")
    return result  # type: ignore[return-value]  # no rank refused, so `result` is set


def on_first(parallel: ContextParallel, action: Callable[[], Any]) -> Any:
    """Call action() on the first rank only. Returns the result on every rank. Raises what `together` raises.

    json.dumps must accept the result.
    """
    result = together(parallel, action if parallel.rank == 0 else lambda: None)
    return values_of_all(parallel, result)[0]


def check_alike(parallel: ContextParallel, fields: Mapping[str, str]) -> None:
    """Raise a Refusal on every rank unless `fields` have the same values on all ranks."""
    answers = values_of_all(parallel, (name_of_rank(), fields))
    first, fields_of_first = answers[0]
    for rank, fields_of_rank in answers:
        differences = []
        for name, value in fields_of_rank.items():
            if value != fields_of_first[name]:
                differences.append(f"{name} ({first}: {fields_of_first[name]}, {rank}: {value})")
        if differences:
            refuse(
                f"the ranks would not train the same run: they differ in {'; '.join(differences)}"
            )


def values_of_all(parallel: ContextParallel, value: Any) -> list[Any]:
    """The values that all ranks pass, in the order of ranks. json.dumps must accept each value."""
    moment = "the exchange of what ranks are doing"
    content = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = parallel.ranks.agree(len(content), {"call": moment})
    with parallel.ranks.all_or_none():
        rows = parallel.ranks.gather(content, lengths, 0, moment)
    return [json.loads(bytes(row.tolist())) for row in rows]


def name_of_rank() -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"rank {rank} on host {socket.gethostname()}"


def refuse(reason: str) -> NoReturn:
    """Raise a Refusal on this rank.

    The ranks of a launcher write to one terminal, so only the first rank raises the reason, and the other ranks raise
    an empty text. Ranks that were started one by one may have different terminals, so each of them raises the reason.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    raise Refusal(reason if is_first else "")
