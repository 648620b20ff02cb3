"""Runs all ranks of a sequence in one process, with the plans and programs of real ranks. Nothing is sent.

Each rank is a thread. Only one thread runs at a time, until it has to wait for a message. A message is delivered as a
copy from the sender's buffer to the receiver's buffer.
"""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..kernels.choose import BACKENDS
from ..kernels.contract import BackwardRows
from ..plan.exchange import Choice, plan_exchange
from ..plan.sharded_call import ShardedCall
from ..plan.sharding import Borders, Shard, ShardSpec, documents_of, make_shards
from ..plan.step import Sizes
from ..ranks.arguments import cut_of
from ..ranks.call import Call, ForwardState
from ..ranks.context import ContextParallel
from ..ranks.ranks import Ranks
from ..ranks.reshard import whole_of
from ..run import executor
from ..run.executor import ExecutorOptions
from ..run.link_contract import Messages, Pending

# A rank's rows of the tensors in a call. A forward has query, key and value. A backward has all tensors in
# `BackwardRows`.
Given = Sequence[Tensor | None]


class Simulated(ContextParallel):
    """A context of ranks that this process imitates, made by `all_ranks` or `one_rank`."""

    def __init__(self, ranks: Ranks) -> None:
        self.group = None
        self._take(ranks, "ring")


def all_ranks(
    num_ranks: int,
    *,
    sharding: str = "contiguous",
    align: int = 1,
    lengths: Sequence[int] | None = None,
) -> Simulated:
    """A context that runs all ranks in this process, on full tensors. It sends nothing.

        parallel = simulate.all_ranks(4)
        out = dilated_attention(query, key, value, pattern, parallel=parallel)  # full tensors in, full tensors out

    Args:
        sharding, align, lengths: how the sequence is divided among the ranks, as in `ContextParallel`.

    Raises:
        ValueError: for a number of ranks below 1, an unknown sharding, and lengths that do not fit the ranks.
    """
    return Simulated(SimulatedRanks(cut_of(num_ranks, sharding, align, lengths)))


# For each pair (sender, receiver): tensors that wait for delivery, each with an event that is set on delivery.
Posted = defaultdict[tuple[int, int], deque[tuple[Tensor, threading.Event]]]


class _Stopped(RuntimeError):
    """Stops the thread of a rank because another rank has failed."""


class Wires:
    """The state that the threads of the simulated ranks share. A thread runs only while it holds the lock `turn`.

    sends: tensors that the sender has started to send, but the receiver has not started to receive. receives: tensors
    that the receiver has started to receive, but the sender has not started to send. waiting: the events for which
    threads wait. error: the error of a rank that failed, or None. bytes_sent: how many bytes each rank has sent.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.sends: Posted = defaultdict(deque)
        self.receives: Posted = defaultdict(deque)
        self.waiting: list[threading.Event] = []
        self.error: BaseException | None = None
        self.bytes_sent: Counter[int] = Counter()

    def post(self, pair: tuple[int, int], tensor: Tensor, is_send: bool) -> threading.Event:
        """Start a send or a receive of `tensor` between `pair` (sender, receiver). Returns an event, set on delivery.

        For each pair, the tensor of the k-th send is copied to the tensor of the k-th receive, as soon as this send and
        this receive have started.
        """
        sends = self.sends[pair]
        receives = self.receives[pair]
        done = threading.Event()
        (sends if is_send else receives).append((tensor, done))
        if sends and receives:
            (sent, is_sent), (received, is_received) = sends.popleft(), receives.popleft()
            received.copy_(sent)
            self.bytes_sent[pair[0]] += sent.nbytes
            is_sent.set()
            is_received.set()
        return done

    def wait(self, event: threading.Event) -> None:
        """Return when the event is set. Until then the threads of other ranks run."""
        if event.is_set():
            return
        if self.error is None:
            self.waiting.append(event)
            self.turn.release()
            event.wait()
            self.turn.acquire()
            self.waiting.remove(event)
        if self.error is not None:
            raise _Stopped


class SimulatedPending:
    """Messages that a simulated rank has started. The messages' tensors are kept alive until `wait` returns, as on a
    real rank."""

    def __init__(self, wires: Wires, events: list[threading.Event], tensors: list[Tensor]) -> None:
        self.wires = wires
        self.events = events
        self.tensors = tensors

    def wait(self) -> None:
        while self.events:
            self.wires.wait(self.events.pop(0))
        self.tensors.clear()


class SimulatedLink:
    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires = wires
        self.rank = rank

    def carry(self, sends: Messages, receives: Messages, moment: str) -> SimulatedPending:
        events = [self.wires.post((self.rank, m.peer), x, True) for x, m in sends]
        events += [self.wires.post((m.peer, self.rank), x, False) for x, m in receives]
        return SimulatedPending(self.wires, events, [x for x, _ in (*sends, *receives)])

    def carry_apart(
        self, sends: Messages, receives: Messages, moment: str
    ) -> tuple[Pending, Pending]:
        return self.carry(sends, (), moment), self.carry((), receives, moment)


@contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """A context manager that runs its block on a stream, in a thread that `run_in_turn` started.

    After the block the thread stays on the stream's GPU. The thread began on GPU 0, but does not return to GPU 0,
    because that would open a CUDA context of half a GB. (No GPU has run this.)
    """
    torch.cuda.set_device(stream.device)
    with torch.cuda.stream(stream):
        yield


def run_in_turn(world_size: int, work: Callable[[int, SimulatedLink], Any]) -> list[Any]:
    """Call work(rank, link) for every rank, each in a thread. Returns the results in the order of ranks."""
    wires = Wires()
    results = [None] * world_size
    # Run the threads on the caller's stream, because a new thread would use the default stream of the first GPU, which
    # does not wait for the caller's stream.
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def one(rank: int) -> None:
        with wires.turn, torch.no_grad(), nullcontext() if stream is None else _on_stream(stream):
            try:
                if wires.error is None:
                    results[rank] = work(rank, SimulatedLink(wires, rank))
            except _Stopped:
                pass
            except BaseException as error:  # noqa: BLE001  raised again below, by the caller
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


class SimulatedRanks(Ranks):
    """Runs all ranks in this process. Calls take and return full tensors, and each rank computes with its own rows of
    these tensors."""

    name = "simulated"

    def __init__(self, cut: ShardSpec) -> None:
        super().__init__(cut)
        # A function of a rank's link and rows. It returns a context manager, in which the rank runs its part of a call.
        self.around: Callable[[SimulatedLink, Given], AbstractContextManager[Any]] = (
            lambda link, rows: nullcontext()
        )

    def lengths_of(self, seq_len: int, documents: Borders = None) -> tuple[int, ...]:
        return (seq_len,)

    def shards(self, lengths: Sequence[int], documents: Borders = None) -> tuple[Shard, ...]:
        return make_shards("contiguous", lengths)

    def choose(self, sharded_call: ShardedCall, sizes: Sizes) -> Choice:
        return Choice("ring", "all ranks are simulated in this process")

    def run(
        self, call: Call, stage: str, state: ForwardState, tensors: dict[str, Any]
    ) -> list[Tensor]:
        """Run a stage ("forward" or "backward") on every rank, with the rank's rows of the tensors. Returns the results
        for all positions."""
        key = tensors["key"]
        seq_len = key.shape[1]
        tensors = tensors | {"query": call.scaled(tensors["query"])}
        options = ExecutorOptions(BACKENDS[state.kernel], call.kernel_scale, factor=call.factor)
        documents = documents_of(state.borders, seq_len)
        shards = self.cut.shards_of(self.cut.default_lengths(seq_len, documents), documents)
        num_kv_heads = call.num_kv_heads(key.shape[2])
        sharded_call = ShardedCall(
            call.pattern, shards, call.num_heads, num_kv_heads, documents, call.heads_held
        )
        plans = [plan_exchange("ring", sharded_call, rank) for rank in range(len(shards))]

        def work(rank: int, link: SimulatedLink) -> tuple[Tensor, ...]:
            rows: dict[str, Any] = {}
            for name, x in tensors.items():
                rows[name] = None if x is None else _rows_of(x, shards[rank])
            with self.around(link, list(rows.values())):
                if stage == "forward":
                    return executor.forward(plans[rank], options._replace(link=link), **rows)
                backward_rows = BackwardRows(**rows)
                return executor.backward(plans[rank], options._replace(link=link), backward_rows)

        results_of_ranks = run_in_turn(len(shards), work)
        return [
            whole_of(of_ranks, shards, dim=1) for of_ranks in zip(*results_of_ranks, strict=True)
        ]


def _rows_of(x: Tensor, shard: Shard) -> Tensor:
    """A rank's rows of a full (B, N, ...) tensor: a view if the rows are one span of a batch of 1, else a copy.

    The result is contiguous, as a real rank's tensors are. Otherwise some kernels would be called once for each batch
    entry (`views.folds`), more often than on a real rank.
    """
    if len(shard) == 1:
        return x[:, shard[0].start : shard[0].stop].contiguous()
    return torch.cat([x[:, :0], *(x[:, start:stop] for start, stop in shard)], dim=1)
