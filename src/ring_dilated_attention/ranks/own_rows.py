"""A process that holds its own rows: handshake -> plan -> program. One alone, of several, or of a larger job."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.choose import choose
from ..kernels.contract import BackwardRows
from ..plan.exchange import Choice, RankPlan, plan_exchange
from ..plan.memory import Sizes
from ..plan.sharding import Cut, Shard, check_documents
from ..run import executor
from ..run.executor import Means
from ..run.link import Dealer, Link
from .contract import Call
from .handshake import all_or_none


class Links(NamedTuple):
    """What connects a rank in one call: with the others of its ring, and with those that deal heads to each other."""

    ring: Link | None
    heads: Dealer | None


class OwnRows:
    """What all kinds of processes that hold their own rows have in common; this one is alone."""

    rank, world_size, name = 0, 1, ""

    def __init__(self, cut: Cut) -> None:
        self.cut, self.calls = cut, 0

    def lengths_of(self, seq_len: int) -> tuple[int, ...]:
        return self.cut.default_lengths(seq_len)

    def shards(self, lengths: Sequence[int]) -> tuple[Shard, ...]:
        return self.cut.shards(lengths)

    def agree(self, length: int, fields: dict[str, object], failure: str | None) -> tuple[int, ...]:
        if failure:
            raise ValueError(failure)
        return (length,)

    def check_all_here(self, method: str) -> None:
        pass

    def records(self, record: Tensor, moment: str) -> list[Tensor]:
        return [record]

    def gather(self, x: Tensor, lengths: Sequence[int], dim: int, moment: str) -> list[Tensor]:
        return [x]

    def choose(
        self,
        call: Call,
        lengths: Sequence[int],
        num_kv_heads: int,
        sizes: Sizes,
        documents: tuple[int, ...] | None,
    ) -> Choice:
        return Choice("none", "one rank: nothing to send")

    def links(self, exchange: str, plan_arguments: tuple) -> Links:
        """What connects this rank under an exchange. plan_arguments: of `make_plan`."""
        return Links(None, None)

    def abandon(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, int]:
        number = self.calls + 1 if self.name else 0  # alone there is nobody to agree with
        with all_or_none(self, ValueError):
            rank_plan, means = self.route(call, "forward", number, query, key, cu_seqlens)
        self.calls = number  # on all ranks or on none: a call that one rank refused has no number
        with all_or_none(self):
            return *executor.forward(rank_plan, means, query, key, value), number

    def backward(
        self, call: Call, number: int, rows: BackwardRows, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        with all_or_none(self, ValueError):
            rank_plan, means = self.route(call, "backward", number, rows.query, rows.key, cu_seqlens)
        with all_or_none(self):
            if rank_plan.dealing is not None and rows.dlse is None and call.return_lse:
                # The loss of a rank may not use lse: all deal its gradient, or none.
                rows = rows._replace(dlse=torch.zeros_like(rows.lse))
            return executor.backward(rank_plan, means, rows)

    def route(
        self, call: Call, stage: str, number: int, query: Tensor, key: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[RankPlan, Means]:
        """What this rank does, and by what means: handshake, choose the exchange, plan."""
        try:
            kernel = choose(call.backend, query)
            fields = self.fields(call, stage, number, query, key, cu_seqlens)
        except Exception as error:
            self.agree(0, {}, str(error) or type(error).__name__)  # the others are told at once
            raise
        lengths = self.agree(query.shape[1], fields, None)
        documents = documents_of(cu_seqlens, sum(lengths))
        num_kv_heads = call.num_kv_heads(key.shape[2])
        sizes = Sizes(query.shape[0], query.shape[3], query.element_size())
        exchange = self.choose(call, lengths, num_kv_heads, sizes, documents).exchange
        arguments = (call.pattern, self.shards(lengths), self.rank, call.num_heads, num_kv_heads, documents, call.held)
        rank_plan = plan_exchange(exchange, *arguments, self.cut.inner)
        links = self.links(exchange, arguments)
        whole = None
        if kernel.choose_pass is not None and exchange == "none" and call.held is None and query.numel():
            borders = documents or (0, query.shape[1])
            whole = kernel.choose_pass(call.pattern, borders, query, num_kv_heads, stage == "backward").found
        return rank_plan, Means(kernel, call.kernel_scale, links.ring, links.heads, whole)

    def fields(
        self, call: Call, stage: str, number: int, query: Tensor, key: Tensor, cu_seqlens: Tensor | None
    ) -> dict[str, object]:
        """What must agree between ranks, by name."""
        return {}


def call_fields(
    call: Call, stage: str, number: int, query: Tensor, key: Tensor, cu_seqlens: Tensor | None
) -> dict[str, object]:
    """A call in the words of an error about it."""
    batch, _, num_heads, head_dim = query.shape
    given = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
    return {
        "call": f"{stage} {number}",
        "pattern": call.pattern,
        "shape": f"batch {batch}, {num_heads} heads, {key.shape[2]} key/value heads, head dim {head_dim}",
        "heads held": f"{call.heads} of {call.num_heads}",
        "dtype": query.dtype,
        "device": query.device.type,
        "scale": call.scale,
        "cu_seqlens": given if given is None or len(given) <= 64 else (len(given), hash(given)),
        "gradients": call.needs_grad or "none",
        "return_lse": call.return_lse,
    }


def documents_of(cu_seqlens: Tensor | None, seq_len: int) -> tuple[int, ...] | None:
    """The borders as integers, checked against the length of the whole sequence."""
    if cu_seqlens is None:
        return None
    borders = tuple(cu_seqlens.tolist())
    check_documents(borders, seq_len)
    return borders
