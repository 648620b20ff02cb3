"""All ranks of a ring in one process: the same plans, the same programs, the same numbers, and nothing is sent.

Each rank is a thread, but only one runs at a time: it hands on when it has to wait for a message. What a message would
carry is copied from the sender's buffer into the receiver's.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..kernels.choose import BACKENDS
from ..kernels.contract import BackwardRows
from ..plan.exchange import Choice, RankPlan, plan_exchange
from ..plan.job import Job
from ..plan.plan import Message
from ..plan.sharding import Cut, Shard, documents_of, make_shards
from ..plan.sizes import Sizes
from ..ranks.arguments import cut_of
from ..ranks.call import Begun, Call
from ..ranks.context import ContextParallel
from ..ranks.ranks import Ranks
from ..run import executor
from ..run.executor import Means


class Simulated(ContextParallel):
    """A context of ranks that this process imitates. `all_ranks` and `one_rank` make it."""

    def __init__(self, ranks: Ranks) -> None:
        self.group = None
        self._take(ranks, "ring")


def all_ranks(
    num_ranks: int, *, sharding: str = "contiguous", align: int = 1, lengths: Sequence[int] | None = None
) -> Simulated:
    """A context that runs the ring of all ranks in this process, on full tensors. It sends nothing.

        parallel = simulate.all_ranks(4)
        out = dilated_attention(query, key, value, pattern, parallel=parallel)  # full tensors in, full tensors out

    Args:
        sharding, align, lengths: how the ranks share the sequence, as `ContextParallel` takes them.

    Raises:
        ValueError: for a number of ranks below 1, unknown names, and lengths that do not fit the ranks.
    """
    return Simulated(SimulatedRanks(cut_of(num_ranks, sharding, align, lengths)))


class _Stopped(RuntimeError):
    """Another rank has failed."""


class _Post:
    """One side of a message, until the other side comes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.done = tensor, threading.Event()


class Wires:
    """What the simulated ranks share: the posts that wait for their other side, and whose turn it is."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.sends: dict[tuple[int, int], deque[_Post]] = {}
        self.receives: dict[tuple[int, int], deque[_Post]] = {}
        self.waiting: list[threading.Event] = []
        self.error: BaseException | None = None
        self.bytes_sent: dict[int, int] = {}

    def post(self, pair: tuple[int, int], tensor: Tensor, is_send: bool) -> threading.Event:
        """Post one side; the message is delivered, in the order of posting, when both are there."""
        mine, theirs = (self.sends, self.receives) if is_send else (self.receives, self.sends)
        post = _Post(tensor)
        mine.setdefault(pair, deque()).append(post)
        if theirs.get(pair):
            send, receive = self.sends[pair].popleft(), self.receives[pair].popleft()
            receive.tensor.copy_(send.tensor)
            self.bytes_sent[pair[0]] = self.bytes_sent.get(pair[0], 0) + send.tensor.nbytes
            send.done.set()
            receive.done.set()
        return post.done

    def wait(self, event: threading.Event) -> None:
        """Let others run until the event is there."""
        if event.is_set():
            return
        if self.error is not None:
            raise _Stopped
        self.waiting.append(event)
        self.turn.release()
        event.wait()
        self.turn.acquire()
        self.waiting.remove(event)
        if self.error is not None:
            raise _Stopped


class SimulatedPending:
    """Messages of a simulated rank. Their tensors are kept until they are waited for, as those of a real one."""

    def __init__(self, wires: Wires, events: list[threading.Event], tensors: list[Tensor]) -> None:
        self.wires, self.events, self.tensors = wires, events, tensors

    def wait(self) -> None:
        while self.events:
            self.wires.wait(self.events.pop(0))
        self.tensors.clear()


class SimulatedLink:
    """The link of one simulated rank."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.rank = wires, rank

    @property
    def bytes_sent(self) -> int:
        return self.wires.bytes_sent.get(self.rank, 0)

    def carry(
        self, sends: Sequence[tuple[Tensor, Message]], receives: Sequence[tuple[Tensor, Message]], moment: str
    ) -> SimulatedPending:
        events = [self.wires.post((self.rank, m.peer), x, True) for x, m in sends]
        events += [self.wires.post((m.peer, self.rank), x, False) for x, m in receives]
        return SimulatedPending(self.wires, events, [x for x, _ in (*sends, *receives)])

    def carry_apart(
        self, sends: Sequence[tuple[Tensor, Message]], receives: Sequence[tuple[Tensor, Message]], moment: str
    ) -> tuple[SimulatedPending, SimulatedPending]:
        return self.carry(sends, (), moment), self.carry((), receives, moment)


def run_in_turn(world_size: int, work: Callable[[int, SimulatedLink], Any]) -> list[Any]:
    """work(rank, link) for every rank; the results in the order of ranks."""
    wires, results = Wires(), [None] * world_size
    # A thread begins with the first device and its default stream, which waits for no other.
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def one(rank: int) -> None:
        with wires.turn, torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            try:
                if wires.error is None:
                    results[rank] = work(rank, SimulatedLink(wires, rank))
            except _Stopped:
                pass
            except BaseException as error:  # noqa: BLE001  raised again below, on the caller's thread
                wires.error = error
                for event in wires.waiting:
                    event.set()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wires.error is not None:
        raise wires.error
    return results


# What is done around a rank's part of a call, which begins with these rows.
Around = Callable[[SimulatedLink, Sequence[Tensor | None]], AbstractContextManager[Any]]


class SimulatedRanks(Ranks):
    """All ranks in this process, on full tensors."""

    name = "simulated"

    def __init__(self, cut: Cut) -> None:
        super().__init__(cut)
        self.around: Around = lambda link, rows: nullcontext()

    def lengths_of(self, seq_len: int) -> tuple[int, ...]:
        return (seq_len,)

    def shards(self, lengths: Sequence[int]) -> tuple[Shard, ...]:
        return make_shards("contiguous", lengths)

    def choose(self, job: Job, sizes: Sizes) -> Choice:
        return Choice("ring", "all ranks are simulated in this process")

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Begun]:
        begun = Begun.now(0, call, query, cu_seqlens)
        shards, plans, means = self.plan(call, begun, query, key)
        query = call.scaled(query)

        def work(rank: int, link: SimulatedLink) -> tuple[Tensor, Tensor]:
            given = [_rows_of(x, shards[rank]) for x in (query, key, value)]
            with self.around(link, given):
                return executor.forward(plans[rank], means._replace(link=link), *given)

        parts = run_in_turn(len(shards), work)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = parts[0][1].new_empty(query.shape[:3])
        for shard, (out_k, lse_k) in zip(shards, parts, strict=True):
            _place(out, shard, out_k)
            _place(lse, shard, lse_k)
        return out, lse, begun

    def backward(self, call: Call, begun: Begun, rows: BackwardRows) -> tuple[Tensor, Tensor, Tensor]:
        shards, plans, means = self.plan(call, begun, rows.query, rows.key)
        rows = rows._replace(query=call.scaled(rows.query))

        def work(rank: int, link: SimulatedLink) -> tuple[Tensor, Tensor, Tensor]:
            parts = {name: _rows_of(x, shards[rank]) for name, x in rows._asdict().items() if x is not None}
            given = rows._replace(**parts)
            with self.around(link, given):
                return executor.backward(plans[rank], means._replace(link=link), given)

        wholes = (rows.query, rows.key, rows.value)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in wholes)
        for shard, parts in zip(shards, run_in_turn(len(shards), work), strict=True):
            for full, part in zip((dq, dk, dv), parts, strict=True):
                _place(full, shard, part)
        return dq, dk, dv

    def plan(
        self, call: Call, begun: Begun, query: Tensor, key: Tensor
    ) -> tuple[tuple[Shard, ...], list[RankPlan], Means]:
        means = Means(BACKENDS[begun.kernel], call.kernel_scale, factor=call.factor)
        documents = documents_of(begun.borders, query.shape[1])
        shards = self.cut.shards_of(self.cut.default_lengths(query.shape[1]))
        job = Job(call.pattern, shards, call.num_heads, call.num_kv_heads(key.shape[2]), documents, call.held)
        return shards, [plan_exchange("ring", job, rank) for rank in range(len(shards))], means


def _rows_of(x: Tensor, shard: Shard) -> Tensor:
    """A simulated rank's rows of a full (B, N, ...) tensor, laid out as a rank's own: fewer calls are made then.

    A view if they are one span of a batch of 1.
    """
    if len(shard) == 1:
        return x[:, shard[0].start : shard[0].stop].contiguous()
    return torch.cat([x[:, :0], *(x[:, start:stop] for start, stop in shard)], dim=1)


def _place(full: Tensor, shard: Shard, rows: Tensor) -> None:
    row = 0
    for start, stop in shard:
        full[:, start:stop] = rows[:, row : row + stop - start]
        row += stop - start
