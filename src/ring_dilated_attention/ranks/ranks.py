"""Runs a call on ranks that share a sequence: handshake, choice of the exchange, plan, program."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import RLock
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels.choose import BACKENDS
from ..kernels.contract import BackwardRows
from ..plan.exchange import Choice, RankPlan, plan_exchange
from ..plan.job import Job
from ..plan.sharding import Borders, Cut, Shard, document_positions, documents_of
from ..plan.sizes import Sizes
from ..run import executor
from ..run.executor import Means
from ..run.link_contract import Dealer, Link
from .call import Begun, Call, shown
from .handshake import RefusedError
from .presumed import KnownCall, LengthsChanged, Presumed

# What connects a rank, in one call, with the others of its ring and with the ranks that deal heads to each other.
Links = tuple[Link | None, Dealer | None]

MOST_KEPT, KINDS_KEPT = 2**16, 64
T = TypeVar("T")


class Ranks:
    """The ranks that share sequences. This class is for one process alone; subclasses override what differs.

    rank: the number of this process. name: the context's name in errors, "" for one process. timeout: how long a rank
    waits for another. calls: the number of forwards so far, the same on every rank.
    """

    rank, world_size, name, timeout = 0, 1, "", timedelta()

    def __init__(self, cut: Cut) -> None:
        self.cut, self.calls = cut, 0
        self.last_whole: int | None = None  # the length of the sequence that was cut last
        self.last_lengths: tuple[int, ...] = ()  # of its shards
        self.dealt: dict[int, None] = {}  # hashes of the documents that were cut, the latest MOST_KEPT
        self.warned: set[str] = set()  # what `warn_once` has warned of
        self.num_modules = 0  # made with this context
        self.caller: int | None = None  # the number of the module that calls now
        self.is_closed = False
        self.known: dict[tuple[object, ...], KnownCall] = {}  # the latest KINDS_KEPT
        self.turn = RLock()  # held by the one thread that agrees with other ranks, or exchanges records
        self.kept = torch.zeros((), dtype=torch.int64, device="cpu")  # compiled calls add to it, so none is dropped

    @property
    def members(self) -> list[int]:
        """The processes' ranks in torch.distributed. None for a process alone."""
        return []

    def lengths_of(self, seq_len: int, documents: Borders = None) -> tuple[int, ...]:
        """Every rank's number of rows, if this context cuts a sequence of this length."""
        return self.cut.default_lengths(seq_len, documents)

    def shards(self, lengths: Sequence[int], documents: Borders = None) -> tuple[Shard, ...]:
        """Every process's shard, given every process's number of rows."""
        return self.cut.shards_of(lengths, documents)

    def note_cut(self, lengths: tuple[int, ...], documents: Borders) -> tuple[Shard, ...]:
        """Remember the sequence that is cut now. Returns `shards`."""
        self.last_whole, self.last_lengths = sum(lengths), lengths
        self.dealt.pop(hash(documents), None)
        self.dealt[hash(documents)] = None  # the last
        if len(self.dealt) > MOST_KEPT:
            del self.dealt[next(iter(self.dealt))]
        return self.shards(lengths, documents)

    def check_dealt(self, documents: Borders) -> None:
        """If the place of rows depends on documents: raise ValueError for documents that were not cut lately, and warn
        if others were cut after them."""
        if self.is_last(documents):
            return
        given = f"cu_seqlens={shown(documents)} is of"
        if hash(documents) not in self.dealt:
            text = f"{given} no sequence that this context has cut lately. Pass the cu_seqlens that `shard` was given."
            raise ValueError(text)
        text = f"{given} an earlier sequence than the one that this context cut last"
        self.warn_once("borders", text + ". That is right only for rows of the earlier one")

    def is_last(self, documents: Borders) -> bool:
        """False if the sharding goes by documents, and this context has since cut a sequence with others."""
        is_free = not self.cut.needs_documents or not documents or not self.dealt
        return is_free or hash(documents) == next(reversed(self.dealt))

    def positions(self, lengths: Sequence[int], borders: Borders = None) -> Tensor:
        """The positions, within their documents, of this rank's rows: (N_local,) int64 on the CPU."""
        documents = documents_of(borders, sum(lengths))
        ranges = document_positions(self.shards(lengths, documents)[self.rank], documents or (0, sum(lengths)))
        return torch.cat([torch.arange(r.start, r.stop, device="cpu") for r in (range(0), *ranges)])

    def agree(self, length: int, fields: dict[str, object], failure: str | None) -> tuple[int, ...]:
        """Every rank's number of rows, once it is clear that all make the same call (`handshake.agree`)."""
        if failure:
            raise ValueError(failure)
        return (length,)

    def handshake(self, length: int, fields: dict[str, object], failure: str | None = None) -> tuple[int, ...]:
        """`agree`, with a warning if every rank seems to have the whole sequence."""
        lengths = self.agree(length, fields, failure)
        self.notice_whole(lengths)
        return lengths

    @contextmanager
    def all_or_none(self, *agreed: type[Exception]) -> Iterator[None]:
        """An error of this rank alone (out of memory, say) breaks the connections: other ranks fail, and do not wait.

        agreed: errors that all ranks raise alike, and that break nothing.
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
        """If this rank raises an error before its handshake, tell the reason to the other ranks, which wait for it."""
        try:
            yield
        except Exception as error:
            self.agree(0, {}, str(error) or type(error).__name__)
            raise

    def notice(self, lengths: Sequence[int]) -> None:
        """Warn once if the ranks' numbers of rows look like a mistake."""

    def notice_whole(self, lengths: Sequence[int]) -> bool:
        """Warn once if each rank has as many rows as the sequence that was cut last. Returns whether each has."""
        return False

    def warn_once(self, what: str, text: str, stacklevel: int = 3) -> None:
        if what not in self.warned:
            self.warned.add(what)
            warnings.warn(text + ". This is said once.", stacklevel=stacklevel)

    def number_module(self) -> int:
        """The number of a module that is made with this context, by which ranks compare who calls (`caller`)."""
        self.num_modules += 1
        return self.num_modules

    @contextmanager
    def called_by(self, number: int | None) -> Iterator[None]:
        """In this block the module of this number calls. After it nobody does, even if the call was refused."""
        self.caller = number
        try:
            yield
        finally:
            self.caller = None

    def expect(self, lengths: Sequence[int]) -> None:
        """Do not warn of these numbers of rows: a model added rows of its own to its shards (a class token)."""

    def check_all_here(self, method: str) -> None:
        """Raise ValueError if other ranks cannot be asked: they are imagined, or this process was forked."""

    def records(self, record: Tensor, moment: str) -> list[Tensor]:
        """Every process's record, all of one shape and dtype, on the CPU."""
        return [record]

    def gather(self, x: Tensor, lengths: Sequence[int], dim: int, moment: str) -> list[Tensor]:
        """All processes' tensors, which differ only in their length along `dim`."""
        return [x]

    def scatter(self, tensors: Sequence[Tensor], sizes: Sequence[int], like: Tensor, moment: str) -> list[Tensor]:
        """Send a flat tensor to every process and receive one from each, of the given sizes. Tensors may be empty."""
        return list(tensors)

    def choose(self, job: Job, sizes: Sizes) -> Choice:
        """The exchange of a call, and why."""
        return Choice("none", "one rank: nothing to send")

    def links(self, exchange: str, job: Job) -> Links:
        """What connects this rank in a call with this exchange."""
        return None, None

    def abandon(self, reason: str) -> None:
        """Break the connections, so that other ranks fail at once instead of waiting for this one."""

    def close(self) -> None:
        """Give the connections back."""

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Begun]:
        """out (B, N, H, D), lse (B, N, H), and what the backward takes from this forward."""
        number = self.calls + 1 if self.name else 0  # one process alone agrees with nobody
        with self.all_or_none(ValueError), self.refusing():
            begun = Begun.now(number, call, query, cu_seqlens)

        def execute(rank_plan: RankPlan, means: Means, scaled: Tensor) -> tuple[Tensor, Tensor]:
            return executor.forward(rank_plan, means, scaled, key, value)

        out, lse = self.run(call, "forward", begun, query, key, execute)
        self.calls = number  # on all ranks or on none: a refused call does not count
        return out, lse, begun

    def backward(self, call: Call, begun: Begun, rows: BackwardRows) -> tuple[Tensor, Tensor, Tensor]:
        """dq (B, N, H, D), dk and dv (B, N, G, D)."""

        def execute(rank_plan: RankPlan, means: Means, scaled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            given = rows._replace(query=scaled)
            if rank_plan.dealing is not None and rows.dlse is None and call.return_lse:
                # This rank's loss need not use lse, but all ranks must deal the gradient of lse, or none.
                given = given._replace(dlse=torch.zeros_like(rows.lse))
            return executor.backward(rank_plan, means, given)

        return self.run(call, "backward", begun, rows.query, rows.key, execute)

    def run(
        self, call: Call, stage: str, begun: Begun, query: Tensor, key: Tensor,
        execute: Callable[[RankPlan, Means, Tensor], T],
    ) -> T:  # fmt: skip
        """Do the handshake, and execute the plan. If the call is known, both begin at once."""
        with self.all_or_none(ValueError), self.refusing():
            fields = self.fields(call, stage, begun, query, key)
            scaled = call.scaled(query)
        kind, presumed = (stage, call, begun[1:], query.shape, key.shape, query.dtype, query.device), None
        with suppress(LengthsChanged), self.all_or_none(RefusedError, LengthsChanged):
            if (known := self.known.get(kind)) and (presumed := self.presume(known, fields)):
                result = execute(known.rank_plan, known.means._replace(link=presumed), scaled)
                presumed.confirm()
                self.notice(known.lengths)
                return result
        with self.all_or_none(ValueError):
            lengths = self.agree(query.shape[1], fields, None) if presumed is None else presumed.found.result()
            self.notice(lengths)
            rank_plan, means = self.route(call, stage, begun, query, key, lengths)
        self.known.pop(kind, None)  # an older one with other lengths
        if means.link is not None and means.dealer is None:
            documents = documents_of(begun.borders, sum(lengths))
            self.known[kind] = KnownCall(lengths, documents, rank_plan, means)
            if len(self.known) > KINDS_KEPT:
                del self.known[next(iter(self.known))]
        with self.all_or_none():
            return execute(rank_plan, means, scaled)

    def presume(self, known: KnownCall, fields: dict[str, object]) -> Presumed | None:
        """Begin the handshake of a known call. None: do it first."""
        return None

    def route(
        self, call: Call, stage: str, begun: Begun, query: Tensor, key: Tensor, lengths: Sequence[int]
    ) -> tuple[RankPlan, Means]:
        """Choose the exchange and plan. Returns the plan, and the means by which it is carried out."""
        documents, num_kv_heads = documents_of(begun.borders, sum(lengths)), call.num_kv_heads(key.shape[2])
        if stage == "forward":
            self.check_dealt(documents)
        job = Job(call.pattern, self.shards(lengths, documents), call.num_heads, num_kv_heads, documents, call.held)
        exchange = self.choose(job, Sizes(query.shape[0], query.shape[3], query.element_size())).exchange
        rank_plan = plan_exchange(exchange, job, self.rank, self.cut.inner)
        kernel = BACKENDS[begun.kernel]
        return rank_plan, Means(kernel, call.kernel_scale, *self.links(exchange, job), call.factor)

    def fields(self, call: Call, stage: str, begun: Begun, query: Tensor, key: Tensor) -> dict[str, object]:
        """What must be the same on all ranks, by name."""
        return {}


ALONE = Ranks(Cut("contiguous", 1))
