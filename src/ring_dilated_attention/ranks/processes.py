"""Connects several processes that share sequences: makes their process groups, and checks before each call that all
processes make the same call (the handshake)."""

import os
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha1
from itertools import pairwise
from socket import gethostname as host_name
from threading import Lock, Thread, _DummyThread, current_thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch import Tensor

from ..plan.dealing import check_dealing
from ..plan.exchange import Choice, choose_exchange
from ..plan.sharded_call import ShardedCall
from ..plan.sharding import ShardSpec, order_by_host
from ..plan.step import Sizes
from .call import Call, ForwardState, borders_field
from .failures import NOT_MADE, ExchangeError, usual_cause
from .handshake import CALLER, NUM_MODULES, agree
from .link import GroupLink, WaitTimes
from .ranks import Links, Ranks

# `_groups_named` holds this lock while it replaces the function by which torch names groups.
_naming = Lock()
# For each default group of torch: how many groups each set of ranks (a sorted tuple) has made. If the user initialises
# torch.distributed again, there is a new default group, and the counts start from 0.
_num_groups: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def _group_name(members: Sequence[int]) -> str:
    """A name for the next group of these ranks: the group's number among all groups of the same ranks, then a hash of
    the ranks. (If the group has all ranks, the name has no hash.)

    torch's own names do not work. Before torch 2.14 a new group may get the name of a closed group, and then tries to
    connect to that group's ports, which are closed. From 2.14 on torch makes the name from the number of all groups
    that a rank has made. If two ranks have made different numbers of groups, they would wait for each other under
    different names.
    """
    ranks = tuple(sorted(members))
    assert dist.group.WORLD is not None
    num_groups = _num_groups.setdefault(dist.group.WORLD, Counter())
    num_groups[ranks] += 1
    if len(ranks) == dist.get_world_size():
        return str(num_groups[ranks])
    return f"{num_groups[ranks]}-{sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()}"


@contextmanager
def _groups_named(name: str) -> Iterator[None]:
    """A context manager. While its block runs, a group that this thread makes gets this name. (torch has no option for
    the name of a group.)"""
    here = current_thread()
    with _naming:
        torch_name: Any = getattr(distributed_c10d, "_process_group_name", None)

        def name_of_group(*ranks: Any, **how: Any) -> Any:
            return name if current_thread() is here else torch_name(*ranks, **how)

        distributed_c10d._process_group_name = name_of_group
        try:
            yield
        finally:
            distributed_c10d._process_group_name = torch_name


def backends_with_cpu(default: str) -> str | None:
    """The backends for a new group: those of torch's default group, and gloo for CPU tensors. None if the default group
    already has a backend for the CPU.

    After `init_process_group("nccl")` the default group has only "cuda:nccl", which cannot send tensors on the CPU
    (token ids, masks).
    """
    devices = [pair.partition(":")[0] for pair in default.split(",")]
    if "cpu" in devices:
        return None
    return f"cpu:gloo,{default}"


def _side_by_side(members: Sequence[int], hosts: Sequence[str], inner: int) -> list[int]:
    """The members, reordered so that members on one host are neighbours. On a 2-D mesh only whole rows of the mesh
    (`inner` members each) move. hosts: the host name of each member."""
    rows = []
    hosts_of_rows = []
    for first in range(0, len(members), inner):
        rows.append(members[first : first + inner])
        hosts_of_rows.append(", ".join(hosts[first : first + inner]))
    ordered: list[int] = []
    for number in order_by_host(hosts_of_rows):
        ordered += rows[number]
    return ordered


class Processes(Ranks):
    """The processes of a group. They make their own communicators, so that a failed message does not break the user's
    communicators.

    control: connects all ranks, for handshakes over gloo.
    all: connects all ranks, for data on any device.
    inner: on a 2-D mesh, connects the ranks that exchange heads for positions (plan/dealing.py).
    outer: connects the ranks that send each other keys and values.
    """

    def __init__(self, members: list[int], timeout: timedelta) -> None:
        """Make the control group. A rank with bad arguments makes this group too, so that `connect` can report the
        error to the other ranks."""
        super().__init__(ShardSpec("contiguous", len(members)))
        self.timeout = timeout
        self.world_size = len(members)
        # All links of the context: if a link fails, `GroupLink.fail` breaks all links.
        self.opened: list[GroupLink] = []
        self.owner: Thread | None = None
        self.process = os.getpid()
        # The lengths passed to `expect_lengths`, one for each rank: `warn_of_uneven` does not warn of these lengths.
        self.expected_lengths: deque[tuple[int, ...]] = deque(maxlen=16)
        self.control = self._open("control", "gloo", members)

    @property
    def members(self) -> list[int]:
        return self.control.members

    def connect(self, cut: ShardSpec | None, exchange: str, failure: str | None) -> None:
        """Check that all ranks passed the same arguments, and make the groups that send data.

        Raises:
            ValueError: on every rank, if any rank has bad arguments, or if arguments differ between ranks.
        """
        try:
            fields: dict[str, object] = {"call": "making a ContextParallel"}
            if cut is not None:
                fields |= {
                    "mesh": f"{cut.num_shards // cut.inner} x {cut.inner}",
                    "sharding": cut.sharding,
                    "align": cut.align,
                    "lengths": cut.lengths,
                    "exchange": exchange,
                }
            agree(self.control, 0, fields, failure)
        except ValueError:
            self.close()
            raise
        assert cut is not None
        self.cut = cut
        self.exchange = exchange
        members = _side_by_side(self.control.members, self._hosts(), cut.inner)
        self.control.reorder(members)
        backends = backends_with_cpu(dist.get_backend_config())
        self.all = self._open("data", backends, members)
        self.rank = self.all.rank
        self.inner: GroupLink | None = None
        self.outer: GroupLink | None = self.all
        if cut.inner > 1:
            row, column = divmod(self.rank, cut.inner)
            self.inner = self._open("heads", backends, members[row * cut.inner :][: cut.inner])
            chunks = members[column :: cut.inner]
            self.outer = self._open("chunks", backends, chunks) if len(chunks) > 1 else None
        # Wait until all ranks have made their groups. Otherwise a fast rank might close its context while a slow rank
        # is still connecting to it.
        agree(self.control, 0, {"call": "the end of making a ContextParallel"}, None)

    def _hosts(self) -> list[str]:
        """Every rank's host name. Also closes the contexts that all ranks have dropped without `close`.

        To find these contexts, each rank sends the others the names of the contexts that it has dropped. All ranks must
        close a group together, because NCCL ends a communicator by a collective call.
        """
        hosts = []
        dropped_by_rank = []
        for text in self.control.texts(
            "\n".join([host_name(), *_dropped]), "the exchange of host names"
        ):
            host, *dropped = text.split("\n")
            hosts.append(host)
            dropped_by_rank.append(set(dropped))
        for name in set.intersection(*dropped_by_rank):
            for link in _dropped.pop(name, []):
                link.close()
        return hosts

    def _open(self, purpose: str, backend: str | None, members: list[int]) -> GroupLink:
        """Make a communicator of these global ranks, in this order. Returns its link."""
        name = _group_name(members)
        try:
            with _groups_named(f"ring_dilated_attention:{name}"):
                group = dist.new_group(
                    members,
                    timeout=self.timeout,
                    backend=backend,
                    use_local_synchronization=len(members) != dist.get_world_size(),
                    group_desc=f"ring_dilated_attention:{purpose}",
                )
            assert isinstance(group, dist.ProcessGroup)  # because this rank is a member
            self.name = self.name or f"context {name[:12]}"
            link = GroupLink(group, f"{purpose} of {self.name}", members, self.opened)
            link.open()
        except RuntimeError as error:
            raise ExchangeError(
                f"making a ContextParallel: some of the ranks {members} did not make it (group {purpose!r}, "
                f"rank {dist.get_rank()}): {error}.{usual_cause(NOT_MADE, str(error))}"
            ) from error
        return link

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy of the context in a forked process. The copy has no threads. It must not use or close
        the connections, which belong to the process that made the context."""
        return os.getpid() != self.process

    def check_all_here(self, method: str) -> None:
        if self.is_forked:
            raise ValueError(
                f"{method}: process {os.getpid()} was forked from process {self.process}, which made {self.name}, and "
                "cannot use its connections. A worker of a DataLoader may call only `positions`. Make other calls "
                "in the training loop, on what the DataLoader returns, or set num_workers=0"
            )

    def agree(
        self, length: int, fields: dict[str, object], failure: str | None = None
    ) -> tuple[int, ...]:
        # Raise in a forked process before it takes the lock `turn`. If another thread held the lock at the fork, the
        # forked process would wait for the lock for ever.
        self.check_all_here(str(fields.get("call", "a call")))
        # Let only one thread send at a time. A thread that may not make the call sends too: it tells the others why.
        with self.turn:
            failure = self._why_other_thread() or failure
            owner = {
                "the name of the calling thread (Thread(name=...) sets it)": self.owner
                and self.owner.name
            }
            return agree(self.control, length, fields | owner, failure)

    def _why_other_thread(self) -> str | None:
        """Why this thread may not make a call, or None if it may.

        Only the owner (the thread that made the first call) may make calls, because calls of two threads would receive
        each other's messages. A thread of autograd may make calls too, because the owner waits for it in the backward.
        """
        here = current_thread()
        self.owner = self.owner or here
        if here is self.owner or (
            isinstance(here, _DummyThread) and torch._C._current_graph_task_id() != -1
        ):
            return None
        return (
            f"thread {here.name!r} made a call of {self.name}, which belongs to the thread of its first call, "
            f"{self.owner.name!r}, until close(). Make all calls in that thread, or a ContextParallel for each thread"
        )

    def expect_lengths(self, lengths: Sequence[int]) -> None:
        self.expected_lengths.append(tuple(lengths))

    def warn_of_uneven(self, lengths: Sequence[int]) -> None:
        lengths = tuple(lengths)
        seq_len = sum(lengths)
        if self.cut.lengths is not None or self.cut.needs_documents:
            return
        if lengths in self.expected_lengths or self.warn_of_whole(lengths):
            return
        near_equal = self.cut.default_lengths(seq_len)
        # Also accept the lengths of the chunks that torch.chunk would make. If torch.chunk makes fewer chunks than
        # there are ranks, the last ranks have length 0.
        size = max(-(-seq_len // self.world_size), 1)
        starts = [min(rank * size, seq_len) for rank in range(self.world_size + 1)]
        chunked = tuple(stop - start for start, stop in pairwise(starts))
        if lengths not in (near_equal, chunked):
            self.warn_once(
                "cut",
                f"ranks have {lengths} positions; a near-equal cut of one sequence of {seq_len} gives {near_equal}. If "
                "yours are meant, say so: ContextParallel(lengths=...)",
            )

    def warn_of_whole(self, lengths: Sequence[int]) -> bool:
        whole = sum(self.lengths_cut_last)
        if not sum(lengths) or set(lengths) != {whole}:
            return False
        self.warn_once(
            "whole",
            f"every rank has {whole} positions, as many as the sequence that was cut last: they count as one sequence "
            f"of {sum(lengths)}. Pass what `shard` returns",
        )
        return True

    def fields(
        self, call: Call, stage: str, state: ForwardState, query: Tensor, key: Tensor
    ) -> dict[str, object]:
        batch, _, num_heads, head_dim = query.shape
        fields = {
            "call": f"{stage} {state.number}",
            "pattern": call.pattern,
            "shape": f"batch {batch}, {num_heads} heads, {key.shape[2]} key/value heads, head dim {head_dim}",
            "heads held": f"{call.heads} of {call.num_heads}",
            "dtype": query.dtype,
            "device": query.device.type,
            "scale": call.scale,
            "cu_seqlens": borders_field(state.borders),
            "gradients": call.needs_grad or "none",
            "return_lse": call.return_lse,
            "sinks": "given" if call.has_sinks else "none",
        }
        if stage == "forward" and self.control.counts_modules:
            fields[NUM_MODULES] = None if self.caller is None else self.num_modules
            fields[CALLER] = self.caller
        return fields

    def records(self, record: Tensor, moment: str) -> list[Tensor]:
        self.check_all_here(moment)
        return self.control.records(record, moment)

    def gather(self, x: Tensor, lengths: Sequence[int], dim: int, moment: str) -> list[Tensor]:
        return self.all.all_gather(x, lengths, dim, moment)

    def scatter(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], like: Tensor, moment: str
    ) -> list[Tensor]:
        return self.all.all_to_all_single(tensors, sizes, like, moment)

    def choose(self, sharded_call: ShardedCall, sizes: Sizes) -> Choice:
        if self.cut.inner > 1:
            check_dealing(sharded_call.num_kv_held, self.cut.inner)
        if self.exchange == "all_to_all":
            check_dealing(sharded_call.num_kv_held, self.world_size)
        if self.exchange != "auto":
            return Choice(self.exchange, "asked for")
        if self.cut.inner > 1:
            return Choice("ring", "the outer axis of a 2-D mesh; the inner one deals heads")
        return choose_exchange(sharded_call, sizes)

    def links(self, exchange: str, sharded_call: ShardedCall) -> Links:
        if exchange == "all_to_all":
            return None, self.all
        return self.outer, self.inner

    def abandon(self, reason: str) -> None:
        if self.is_forked:
            return
        for link in self.opened:
            link.abandon(reason)

    def close(self) -> None:
        self.is_closed = True
        if self.is_forked:
            return
        for link in self.opened:
            link.close()
        self.opened.clear()


# The links of contexts that were dropped without `close`, by the context's name.
_dropped: dict[str, list[GroupLink]] = {}


def note_dropped(opened: list[GroupLink], name: str, process: int) -> None:
    """Called when a context is freed. If the context was not closed, warn, and keep its links until all ranks make the
    next context."""
    if not opened:
        return
    _dropped[name] = opened
    if os.getpid() == process:
        warnings.warn(
            f"{name} was dropped without close(): its connections and threads are kept until all ranks make another "
            "ContextParallel",
            ResourceWarning,
            stacklevel=2,
        )


@contextmanager
def recorded_waits(ranks: Ranks) -> Iterator[list[WaitTimes]]:
    """A context manager that yields a list. While its block runs, each wait of this rank for messages is appended to
    the list, including waits in handshakes."""
    waits: list[WaitTimes] = []
    links = ranks.opened if isinstance(ranks, Processes) else []
    for link in links:
        link.waits = waits
    try:
        yield waits
    finally:
        for link in links:
            link.waits = None
