"""Checks the arguments of a `ContextParallel`."""

import os
import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..plan.exchange import EXCHANGES
from ..plan.sharding import ShardSpec, sharding_of

# The limits of a timeout. torch counts timeouts in milliseconds, and ten years are as good as no timeout.
LEAST_TIMEOUT, MOST_TIMEOUT = timedelta(milliseconds=1), timedelta(days=3650)


def check_arguments(mesh: DeviceMesh | None, exchange: str, timeout: timedelta) -> None:
    if exchange not in ("auto", *EXCHANGES):
        raise ValueError(f"exchange={exchange!r} is unknown; choose one of {('auto', *EXCHANGES)}.")
    if mesh is not None and mesh.ndim == 2 and exchange not in ("auto", "ring", "all_gather"):
        raise ValueError(
            f"exchange={exchange!r} cannot run on a 2-D mesh: the ranks along its last axis trade heads for positions "
            "already. Choose how keys and values travel along the first axis: 'auto', 'ring' or 'all_gather'."
        )
    if not isinstance(timeout, timedelta) or not LEAST_TIMEOUT <= timeout <= MOST_TIMEOUT:
        raise ValueError(
            "timeout must be a positive datetime.timedelta, from a millisecond to ten years, got "
            f"{timeout!r}."
        )


def cut_of(
    num_ranks: int, sharding: str, align: int, lengths: Sequence[int] | None, inner: int = 1
) -> ShardSpec:
    """The rule that cuts a sequence into shards, one for each rank. inner: the length of the last axis of a 2-D mesh,
    or 1 if there is no such mesh.

    Raises:
        ValueError: for an unknown `sharding`, an `align` below 1, and lengths that do not fit the ranks.
    """
    for name, number in (("the number of ranks", num_ranks), ("align", align)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {number!r}.")
    if not sharding_of(sharding).takes_lengths and (align != 1 or lengths is not None):
        raise ValueError(
            f"{sharding} shards are near-equal by definition; align and lengths are for contiguous shards."
        )
    if lengths is not None:
        if len(lengths) != num_ranks or any(not isinstance(n, int) or n < 0 for n in lengths):
            raise ValueError(
                f"lengths must hold {num_ranks} integers of at least 0, one for each rank, got {lengths}."
            )
        if align != 1:
            raise ValueError(f"give either align={align} or lengths={lengths}, not both.")
    return ShardSpec(sharding, num_ranks, align, None if lengths is None else tuple(lengths), inner)


def _not_a_member(of: str) -> str:
    return (
        f"this rank, {dist.get_rank()}, is not in {of}. Make the ContextParallel on the ranks of the group alone: "
        "`if rank in ranks:`."
    )


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            names = group.mesh_dim_names
            raise ValueError(
                f"the DeviceMesh has {group.ndim} axes {names}; name one or two, as in mesh['cp']."
            )
        if group.get_coordinate() is None:
            raise ValueError(
                _not_a_member(f"the DeviceMesh of the ranks {group.mesh.flatten().tolist()}")
            )
        group = group.get_group(0)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            _not_a_member("the group (new_group gave it GroupMember.NON_GROUP_MEMBER)")
        )
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        if os.environ.get("WORLD_SIZE", "1") != "1":
            warnings.warn(
                f"{os.environ['WORLD_SIZE']} processes were started (WORLD_SIZE), but torch.distributed is not "
                "initialised, so this one computes alone. Call torch.distributed.init_process_group() first.",
                stacklevel=3,
            )
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a ProcessGroup, a DeviceMesh or None, got {group!r}.")
    return group
