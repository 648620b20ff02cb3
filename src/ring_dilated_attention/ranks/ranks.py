"""Runs an attention call on ranks that share a sequence.

First the ranks check that all of them make the same call (the handshake). Then each rank chooses how keys and values
travel (the exchange), makes its plan, and carries it out.
"""

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from ..kernels.choose import BACKENDS
from ..kernels.contract import BackwardRows
from ..plan.exchange import Choice, RankPlan, plan_exchange
from ..plan.sharded_call import ShardedCall
from ..plan.sharding import Borders, Shard, ShardSpec, document_positions, documents_of
from ..plan.step import Sizes
from ..run import executor
from ..run.executor import ExecutorOptions
from ..run.link_contract import Dealer, Link
from .call import Call, ForwardState

# A rank's connections in one call. The link connects the rank with the ranks of its ring. The dealer connects the rank
# with its partners in the exchange of heads for positions (plan/dealing.py). A connection that the call does not need
# is None.
Links = tuple[Link | None, Dealer | None]


class Ranks:
    """The ranks that share sequences. This class handles a single process; subclasses handle several.

    rank: the number of this process. name: the context's name in errors, "" for one process. calls: the number of
    forwards that have run (a refused forward does not count), which is the same on every rank.
    """

    rank = 0
    world_size = 1
    name = ""

    def __init__(self, cut: ShardSpec) -> None:
        self.cut = cut
        self.calls = 0
        # For the sequence that was cut last: the length of every rank's shard.
        self.lengths_cut_last: tuple[int, ...] = ()
        self.warned: set[str] = set()  # the kinds of warnings that `warn_once` has given
        self.num_modules = 0  # the number of modules made with this context
        self.caller: int | None = None  # the number of the module that calls now
        self.is_closed = False
        # A thread holds this lock while it compares values with other ranks, so that only one thread sends at a time.
        self.turn = RLock()
        # A compiled call adds one of its results to this tensor, because torch.compile drops a call if nothing uses its
        # results.
        self.compiled_calls = torch.zeros((), dtype=torch.int64, device="cpu")

    @property
    def members(self) -> list[int]:
        """The processes' ranks in torch.distributed; [] for one process alone."""
        return []

    # Cutting a sequence into shards.

    def lengths_of(self, seq_len: int, documents: Borders = None) -> tuple[int, ...]:
        """How many rows of a sequence of this length each rank gets. documents: the borders of packed documents, or
        None."""
        return self.cut.default_lengths(seq_len, documents)

    def shards(self, lengths: Sequence[int], documents: Borders = None) -> tuple[Shard, ...]:
        """Every process's shard (the positions that it holds), given every process's number of rows."""
        return self.cut.shards_of(lengths, documents)

    def note_cut(self, lengths: tuple[int, ...], documents: Borders) -> tuple[Shard, ...]:
        """Remember the lengths into which a sequence is cut, for later warnings. Returns the shards."""
        self.lengths_cut_last = lengths
        shards = self.shards(lengths, documents)
        if len(shards) > 1:
            _sharing.add(self)
        return shards

    def positions(self, lengths: Sequence[int], borders: Borders = None) -> Tensor:
        """The position of each of this rank's rows within its document: (N_local,) int64 on the CPU."""
        seq_len = sum(lengths)
        documents = documents_of(borders, seq_len)
        shards = self.shards(lengths, documents)
        return positions_of(shards[self.rank], documents or (0, seq_len))

    # Agreeing with the other ranks before a call.

    def agree(
        self, length: int, fields: dict[str, object], failure: str | None = None
    ) -> tuple[int, ...]:
        """Check that all ranks make the same call (`handshake.agree`). Returns every rank's number of rows."""
        if failure:
            raise ValueError(failure)
        return (length,)

    def handshake(
        self, length: int, fields: dict[str, object], failure: str | None = None
    ) -> tuple[int, ...]:
        """Do what `agree` does, and warn if every rank seems to have the whole sequence."""
        lengths = self.agree(length, fields, failure)
        self.warn_of_whole(lengths)
        return lengths

    @contextmanager
    def all_or_none(self, *agreed: type[Exception]) -> Iterator[None]:
        """A context manager. If an error is raised in its block (out of memory, say), break the connections, so that
        other ranks fail immediately.

        agreed: types of errors that all ranks raise together. Such an error does not break the connections.
        """
        try:
            yield
        except agreed:
            raise
        except BaseException as error:
            self.abandon(f"{type(error).__name__}: {error}")
            raise

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """A context manager for checks before a handshake. If a check fails, this rank tells the reason to the other
        ranks, which wait in the handshake and raise an error too."""
        try:
            yield
        except Exception as error:
            self.agree(0, {}, str(error) or type(error).__name__)
            raise

    def check_all_here(self, method: str) -> None:
        """Raise ValueError if other ranks cannot take part in a call, either because `simulate.one_rank` runs this rank
        alone, or because this process was forked. method: the call's name, for the error."""

    # Warnings of lengths that look like a mistake.

    def warn_of_uneven(self, lengths: Sequence[int]) -> None:
        """Warn once if the ranks' shards do not have the lengths of a near-equal cut."""

    def warn_of_whole(self, lengths: Sequence[int]) -> bool:
        """Warn once if each rank has as many rows as the sequence that was cut last. Returns True if so."""
        return False

    def expect_lengths(self, lengths: Sequence[int]) -> None:
        """Make `warn_of_uneven` accept shards of these lengths. A model that adds rows to its shards (a class token)
        calls this."""

    def warn_once(self, what: str, text: str, stacklevel: int = 3) -> None:
        if what not in self.warned:
            self.warned.add(what)
            warnings.warn(text + ". This is said once.", stacklevel=stacklevel)

    # Numbering the modules that call.

    def number_module(self) -> int:
        """A number for a new module of this context. Ranks compare the numbers of the modules that make a call."""
        self.num_modules += 1
        return self.num_modules

    @contextmanager
    def called_by(self, number: int | None) -> Iterator[None]:
        """A context manager that sets `caller`, the number of the calling module, and resets it to None afterwards."""
        self.caller = number
        try:
            yield
        finally:
            self.caller = None

    # Sending tensors to other ranks.

    def records(self, record: Tensor, moment: str) -> list[Tensor]:
        """Send this process's record to all other processes, and return every process's record. A record is a tensor on
        the CPU, of the same shape and dtype in all processes."""
        return [record]

    def gather(self, x: Tensor, lengths: Sequence[int], dim: int, moment: str) -> list[Tensor]:
        """Send this process's tensor to all other processes, and return every process's tensor. Tensors may differ only
        in their length along `dim`, which is `lengths[k]` in process k."""
        return [x]

    def scatter(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], like: Tensor, moment: str
    ) -> list[Tensor]:
        """Send the flat tensor `tensors[k]` to each process k, and receive a tensor of `sizes[k]` entries from
        process k. Tensors may be empty."""
        return list(tensors)

    def choose(self, sharded_call: ShardedCall, sizes: Sizes) -> Choice:
        """The exchange of a call (how keys and values travel), and why it was chosen."""
        return Choice("none", "one rank: nothing to send")

    def links(self, exchange: str, sharded_call: ShardedCall) -> Links:
        """The link and the dealer that this rank uses in a call with this exchange (see `Links`)."""
        return None, None

    def abandon(self, reason: str) -> None:
        """Break the connections, so that other ranks fail immediately and do not wait for this rank."""

    def close(self) -> None:
        """Close the connections."""

    # Running a call.

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, ForwardState]:
        """out (B, N, H, D), lse (B, N, H), and the state that the backward needs."""
        # Number the forward, so that ranks can compare the numbers. A single process needs no number.
        number = self.calls + 1 if self.name else 0
        with self.all_or_none(ValueError), self.refusing():
            state = ForwardState.of(number, call, query, cu_seqlens)
        tensors = {"query": query, "key": key, "value": value}
        out, lse = self.run(call, "forward", state, tensors)
        # Count the call after `run`, so that a refused call counts on no rank.
        self.calls = number
        return out, lse, state

    def backward(
        self, call: Call, state: ForwardState, rows: BackwardRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq (B, N, H, D), dk and dv (B, N, G, D)."""
        dq, dk, dv = self.run(call, "backward", state, rows._asdict())
        return dq, dk, dv

    def run(
        self, call: Call, stage: str, state: ForwardState, tensors: dict[str, Any]
    ) -> Sequence[Tensor]:
        """Do the handshake, then plan the call, and carry out the plan.

        stage: "forward" or "backward". tensors: the tensors by name. A forward has query, key and value, and a backward
        has all fields of `BackwardRows`. Returns out and lse in a forward, and dq, dk and dv in a backward.
        """
        query = tensors["query"]
        key = tensors["key"]
        with self.all_or_none(ValueError), self.refusing():
            fields = self.fields(call, stage, state, query, key)
            tensors = tensors | {"query": call.scaled(query)}
        with self.all_or_none(ValueError):
            lengths = self.agree(query.shape[1], fields)
            self.warn_of_uneven(lengths)
            rank_plan, options = self.route(call, state, query, key, lengths)
        with self.all_or_none():
            if stage == "forward":
                return executor.forward(rank_plan, options, **tensors)
            uses_lse = call.return_lse or call.has_sinks
            if rank_plan.dealing is not None and tensors["dlse"] is None and uses_lse:
                # If this rank's loss does not use lse, dlse is None. Use zeros instead: if another rank's loss uses
                # lse, every rank must take part in the exchange of dlse.
                tensors["dlse"] = torch.zeros_like(tensors["lse"])
            return executor.backward(rank_plan, options, BackwardRows(**tensors))

    def route(
        self, call: Call, state: ForwardState, query: Tensor, key: Tensor, lengths: Sequence[int]
    ) -> tuple[RankPlan, ExecutorOptions]:
        """Choose the exchange, and make the plan. Returns the plan, and the options that the executor takes."""
        documents = documents_of(state.borders, sum(lengths))
        num_kv_heads = call.num_kv_heads(key.shape[2])
        shards = self.shards(lengths, documents)
        sharded_call = ShardedCall(
            call.pattern, shards, call.num_heads, num_kv_heads, documents, call.heads_held
        )
        sizes = Sizes(query.shape[0], query.shape[3], query.element_size())
        exchange = self.choose(sharded_call, sizes).exchange
        rank_plan = plan_exchange(exchange, sharded_call, self.rank, self.cut.inner)
        link, dealer = self.links(exchange, sharded_call)
        kernel = BACKENDS[state.kernel]
        return rank_plan, ExecutorOptions(kernel, call.kernel_scale, link, dealer, call.factor)

    def fields(
        self, call: Call, stage: str, state: ForwardState, query: Tensor, key: Tensor
    ) -> dict[str, object]:
        """The fields of a call for the handshake: values that must be the same on all ranks, by name."""
        return {}


def positions_of(shard: Shard, borders: Sequence[int]) -> Tensor:
    """The position of each row of a shard within its document: (N_local,) int64 on the CPU."""
    positions = [torch.arange(0, device="cpu")]
    for span in document_positions(shard, borders):
        positions.append(torch.arange(span.start, span.stop, device="cpu"))
    return torch.cat(positions)


ALONE = Ranks(ShardSpec("contiguous", 1))
# The `Ranks` of every context in this process that has cut a sequence. `warn_of_forgotten_parallel` reads this set.
_sharing: "weakref.WeakSet[Ranks]" = weakref.WeakSet()


def warn_of_forgotten_parallel(num_rows: int) -> None:
    """Warn once if a call without `parallel` has as many rows as this rank's shard of the sequence that was cut last.

    Sequences that a closed context has cut are ignored.
    """
    if torch.compiler.is_compiling():
        return
    for ranks in _sharing:
        whole = sum(ranks.lengths_cut_last)
        is_shard = num_rows == ranks.lengths_cut_last[ranks.rank] and num_rows not in (0, whole)
        if is_shard and not ranks.is_closed:
            ranks.warn_once(
                "forgotten",
                f"a call without parallel= has {num_rows} positions, as many as rank {ranks.rank}'s shard of the "
                f"{whole} positions that were cut last: they are taken for a whole sequence. If they are a shard, pass "
                "parallel= to the call, or to the module that makes it",
                stacklevel=4,
            )
