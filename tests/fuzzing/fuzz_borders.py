"""Borders of packed documents (`cu_seqlens`) on real ranks: those that differ between ranks, that cannot be, or that
are others than those of the batch.

What must hold: what is computed is what the call's borders say; else all ranks get a ValueError that names cu_seqlens,
and the next call is right.
"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_ranks
import torch
from fuzz import Trial
from fuzz_commands import broken, nothing
from fuzz_modules import by_hand, draw_module, why_unequal
from fuzz_oracle import draw_pattern
from fuzz_teams import Outcome, in_ranks, try_on_ranks, why_not_refused_at_once
from torch import Tensor

from ring_dilated_attention import ContextParallel, dilated_attention
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.plan import sharding
from ring_dilated_attention.ranks import batches, processes, ranks

Borders = tuple[int, ...]


def prepare(folder: Path) -> None:
    pass


def try_case(rng: random.Random, folder: Path) -> Trial:
    return try_on_ranks(__name__, rng)


class Desk(fuzz_ranks.Desk):
    def deeds(self) -> dict[Callable[[random.Random], Outcome], int]:
        return {
            self.one_differs: 5,
            self.all_wrong: 3,
            self.one_batch: 3,
            self.all_batches: 3,
            self.between: 4,
            self.positions: 1,
        }

    def attempts(
        self, rng: random.Random, parallel: ContextParallel, seq_len: int
    ) -> dict[str, Callable[[Any], Any]]:
        """Calls that take borders."""
        module = draw_module(rng, head_multiple=self.world_size, parallel=parallel)
        pattern = draw_pattern(rng, self.world_size)
        sizes = {"num_layers": 1, "embed_dim": 4 * self.world_size, "num_heads": self.world_size}
        x = self.rows(
            torch.randn(1, seq_len, module.embed_dim, dtype=torch.float64), parallel, seq_len
        )
        qkv = self.rows(torch.randn(1, seq_len, self.world_size, 4), parallel, seq_len)
        tokens = self.rows(torch.randint(7, (1, seq_len)), parallel, seq_len)
        model = LongNetLM(LongNetConfig((5, 9), (1, 2), vocab_size=7, **sizes), parallel=parallel)
        return {
            "call": lambda borders: dilated_attention(
                qkv, qkv, qkv, pattern, parallel=parallel, cu_seqlens=borders
            ),
            "module": lambda borders: module(x, x, x, cu_seqlens=borders),
            "model": lambda borders: model(tokens, borders),
            "loss": lambda borders: model.loss(tokens, borders),
        }

    def why_wrong_after(
        self, rng: random.Random, parallel: ContextParallel, seq_len: int
    ) -> str | None:
        """A right call on the same context."""
        return self.why_not_as_said(rng, parallel, seq_len, draw_borders(rng, seq_len), None)

    def why_not_as_said(
        self,
        rng: random.Random,
        parallel: ContextParallel,
        seq_len: int,
        borders: Borders | None,
        positions: Tensor | None,
    ) -> str | None:
        """A module's rows, given these borders and, for its rotary angles, this rank's positions."""
        module = draw_module(rng, head_multiple=self.world_size, parallel=parallel)
        x = torch.randn(1, seq_len, module.embed_dim, dtype=torch.float64)
        local = self.rows(x, parallel, seq_len)
        more = (
            {"positions": positions}
            if positions is not None and module.rotary_base is not None
            else {}
        )
        found, _ = module(local, local, local, cu_seqlens=tensor(borders), **more)
        places = within(borders, seq_len) if positions is None else parallel.unshard(positions, 0)
        expected = by_hand(module, x, places, borders)
        return why_unequal("out", found, self.rows(expected, parallel, seq_len))

    def one_differs(self, rng: random.Random) -> Outcome:
        """One rank's borders are others, right or wrong ones."""
        seq_len = rng.choice([rng.randint(1, 20), rng.randint(65, 150)])
        with self.context(rng, seq_len) as parallel:
            torch.manual_seed(rng.randrange(2**31))
            name, attempt = rng.choice([*self.attempts(rng, parallel, seq_len).items()])
            right = rng.choice([None, draw_borders(rng, seq_len), draw_borders(rng, seq_len)])
            other = draw_other(rng, right, seq_len)
            own = other() if parallel.rank == self.odd else tensor(right)
            says = ["cu_seqlens", "rank"] if parallel.rank != self.odd else ["cu_seqlens"]
            complaint = why_not_refused_at_once(lambda: attempt(own), *says)
            complaint = complaint or self.why_wrong_after(rng, parallel, seq_len)
        return (
            f"{name}: rank {self.odd} has {other()}, not {right}, {fuzz_ranks.told(parallel)}",
            complaint,
        )

    def all_wrong(self, rng: random.Random) -> Outcome:
        """All ranks have the same borders, which cannot be: those of their shards, say."""
        seq_len = rng.randint(2, 20)
        with self.context(rng, seq_len) as parallel:
            torch.manual_seed(rng.randrange(2**31))
            name, attempt = rng.choice([*self.attempts(rng, parallel, seq_len).items()])
            wrong = rng.choice(wrong_borders(seq_len))
            complaint = why_not_refused_at_once(lambda: attempt(wrong()), "cu_seqlens")
            complaint = complaint or self.why_wrong_after(rng, parallel, seq_len)
        return f"{name}: {wrong()} of {seq_len}, {fuzz_ranks.told(parallel)}", complaint

    def batch_of(self, rng: random.Random, seq_len: int, borders: Any) -> dict[str, Any]:
        batch = {"tokens": torch.arange(seq_len)[None], "cu_seqlens": borders}
        if rng.random() < 0.3:
            batch["positions"] = torch.arange(seq_len)
        return batch if rng.random() < 0.5 else dict(reversed(batch.items()))

    def one_batch(self, rng: random.Random) -> Outcome:
        """One rank's batch has other borders, or the source's are none."""
        seq_len = rng.randint(1, 20)
        with self.context(rng, seq_len) as parallel:
            right = draw_borders(rng, seq_len)
            source = rng.choice([None, None, self.odd])
            other = (
                rng.choice(wrong_borders(seq_len))
                if source is not None
                else draw_other(rng, right, seq_len)
            )
            batch = self.batch_of(rng, seq_len, tensor(right))
            if parallel.rank == self.odd:
                batch["cu_seqlens"] = other()
            complaint = why_not_refused_at_once(
                lambda: parallel.shard_batch(batch, source=source), "cu_seqlens"
            )
            complaint = complaint or self.why_wrong_after(rng, parallel, seq_len)
        return (
            f"rank {self.odd} has {other()}, not {right}, source {source}, {fuzz_ranks.told(parallel)}",
            complaint,
        )

    def all_batches(self, rng: random.Random) -> Outcome:
        """All ranks' batches have borders that cannot be."""
        seq_len = rng.randint(2, 20)
        with self.context(rng, seq_len) as parallel:
            source = rng.choice([None, 0, self.world_size - 1])
            wrong = rng.choice(wrong_borders(seq_len))
            batch = self.batch_of(rng, seq_len, wrong())
            complaint = why_not_refused_at_once(
                lambda: parallel.shard_batch(batch, source=source), "cu_seqlens"
            )
            complaint = complaint or self.why_wrong_after(rng, parallel, seq_len)
        return f"{wrong()} of {seq_len}, source {source}, {fuzz_ranks.told(parallel)}", complaint

    def between(self, rng: random.Random) -> Outcome:
        """The borders of the call are not those of the batch: the call's count, for all that is not given."""
        seq_len = rng.randint(1, 40)
        with self.context(rng, seq_len) as parallel:
            dealt, called = (rng.choice([None, draw_borders(rng, seq_len)]) for _ in range(2))
            source = rng.choice([None, rng.randrange(self.world_size)])
            batch = {"tokens": torch.arange(seq_len)[None]}
            if dealt is not None:
                batch["cu_seqlens"] = tensor(dealt)
            local = parallel.shard_batch(
                batch if source in (None, parallel.rank) else None, source=source
            )
            complaint = why_unequal(
                "positions",
                local["positions"],
                self.rows(within(dealt, seq_len), parallel, seq_len, 0),
            )
            passed = local["positions"] if rng.random() < 0.5 else None
            complaint = complaint or self.why_not_as_said(rng, parallel, seq_len, called, passed)
        return (
            f"batch {dealt}, call {called}, positions {passed is not None}, {fuzz_ranks.told(parallel)}",
            complaint,
        )

    def positions(self, rng: random.Random) -> Outcome:
        """`positions` of a context, which talks to nobody."""
        seq_len = rng.randint(1, 40)
        with self.context(rng, seq_len) as parallel:
            borders, wrong = draw_borders(rng, seq_len), rng.choice(wrong_borders(seq_len))
            found = parallel.positions(seq_len, tensor(borders))
            complaint = why_unequal(
                "positions", found, self.rows(within(borders, seq_len), parallel, seq_len, 0)
            )
            complaint = complaint or why_not_refused_at_once(
                lambda: parallel.positions(seq_len, wrong()), "cu_seqlens"
            )
        return f"{borders}, then {wrong()}, of {seq_len}, {fuzz_ranks.told(parallel)}", complaint


def tensor(borders: Borders | None) -> Tensor | None:
    return None if borders is None else torch.tensor(borders, dtype=torch.int32)


def within(borders: Borders | None, seq_len: int) -> Tensor:
    """Positions within documents."""
    pairs = itertools.pairwise(borders or (0, seq_len))
    return torch.cat([torch.arange(stop - start) for start, stop in pairs])


def draw_borders(rng: random.Random, seq_len: int) -> Borders:
    most = rng.choice([2, 5, seq_len])
    inner = (
        {rng.randint(1, seq_len - 1) for _ in range(rng.randint(0, most))} if seq_len > 1 else set()
    )
    return (0, *sorted(inner), seq_len)


def draw_other(rng: random.Random, right: Borders | None, seq_len: int) -> Callable[[], Any]:
    """Borders that one rank may have instead: others that could be, or none that could."""
    wrong = rng.choice(wrong_borders(seq_len))
    found = rng.choice(
        [None, draw_borders(rng, seq_len), moved(rng, right, seq_len), moved(rng, right, seq_len)]
    )
    return wrong if found == right or rng.random() < 0.5 else lambda: tensor(found)


def moved(rng: random.Random, borders: Borders | None, seq_len: int) -> Borders:
    """As many borders, all but one in their places where there is room."""
    inner = list(borders[1:-1]) if borders is not None else []
    free = sorted({*range(1, seq_len)} - {*inner})
    if inner and free:
        inner[rng.randrange(len(inner))] = rng.choice(free)
    return (0, *sorted(inner), seq_len)


def wrong_borders(seq_len: int) -> list[Callable[[], Any]]:
    """What cannot be borders of a sequence of this length, made anew each time."""
    n = seq_len
    lists = [
        (0, n + 1),
        (0, n - 1),
        (1, n),
        (-1, n),
        (0, n, n),
        (0, 0, n),
        (n, 0),
        (0, n + 3, n),
        (0,),
        (n,),
        (),
        (0, -n),
    ]
    int32: list[Callable[[], Any]] = [lambda x=x: torch.tensor(x, dtype=torch.int32) for x in lists]
    dtypes = [
        torch.int64,
        torch.float32,
        torch.float64,
        torch.bool,
        torch.int16,
        torch.complex64,
        torch.uint8,
    ]
    others: list[Callable[[], Any]] = [lambda d=d: torch.tensor([0, n]).to(d) for d in dtypes]
    more: list[Callable[[], Any]] = [
        lambda: torch.tensor([[0, n]], dtype=torch.int32),
        lambda: torch.tensor(n, dtype=torch.int32),
        lambda: torch.tensor([0, n], dtype=torch.int32, device="meta"),
        lambda: torch.tensor([0, n], dtype=torch.int32).to_sparse(),
        lambda: [0, n],
        lambda: (0, n),
        lambda: n,
        lambda: "x",
    ]
    return int32 + others + more


def _fields_without_borders(*args: Any) -> dict[str, object]:
    return {name: value for name, value in _fields(*args).items() if name != "cu_seqlens"}


def _one_document(shard: Any, borders: Any) -> Any:
    return _document_positions(shard, [0, borders[-1]])


_fields, _document_positions = processes.Processes.fields, sharding.document_positions
RANK_BREAKAGES: dict[str, Callable[[], Any]] = {
    "borders are not compared": broken("fields", _fields_without_borders, processes.Processes),
    "borders lead anywhere": broken("check_documents", nothing, sharding, batches, ranks),
    "borders of any dtype are taken": broken("validate_cu_seqlens", nothing, ranks),
    "batches are not compared": broken("fingerprint", lambda x: 0, batches),
    "positions count on over borders": broken("document_positions", _one_document, ranks),
}
BREAKAGES = in_ranks(RANK_BREAKAGES)
