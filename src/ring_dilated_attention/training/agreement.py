"""All ranks go on, or none does: what one refuses, or has otherwise than the others, all learn before they go on.

Every rank that refuses says why, once for all ranks of its machine that refuse for the same reason, with rank and host;
the others say which rank refused.
"""

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TypeVar

import torch
import torch.distributed as dist

from ..ranks.context import ContextParallel
from ..ranks.reduce import all_reduce
from .files import in_words

T = TypeVar("T")


class Refusal(ValueError):
    """What some rank refuses, raised on all of them. Empty where another rank on this machine says it."""


@dataclass(frozen=True)
class Account:
    """What one rank tells the others.

    Args:
        machine: the same for ranks whose output a reader sees in one place.
        refusal: why it cannot go on; "" if it can.
        fields: what must be alike on all ranks, by name.
    """

    rank: int
    host: str
    machine: str
    refusal: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)


def together(parallel: ContextParallel, action: Callable[[], T]) -> T:
    """action()'s result, on every rank. A ValueError or OSError of one rank is a Refusal on all of them."""
    refusal, result = "", None
    try:
        result = action()
    except Refusal:
        raise
    except (ValueError, OSError) as error:
        if parallel.world_size == 1:
            raise
        refusal = in_words(error)
    table = _exchange(parallel, refusal, {})
    if any(account.refusal for account in table):
        raise Refusal(words_of_refusal(table, parallel.rank))
    return result  # type: ignore[return-value]  # no rank refused, so this one has a result


def agree(parallel: ContextParallel, fields: Mapping[str, str]) -> None:
    """Raise a Refusal on every rank unless all have the same fields."""
    table = _exchange(parallel, "", fields)
    if any(account.fields != table[0].fields for account in table):
        raise Refusal(words_of_difference(table, parallel.rank))


def told_by_first(parallel: ContextParallel, text: str) -> str:
    """The first rank's text, on every rank."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return str(json.loads(max(_all_texts(parallel, json.dumps(text) if is_first else ""))))


def words_of_refusal(table: Sequence[Account], me: int) -> str:
    """What a rank says of those that refuse; "" where another says it."""
    mine = table[me]
    refusing = [account for account in table if account.refusal]
    if mine.refusal:
        alike = [x for x in refusing if (x.refusal, x.machine) == (mine.refusal, mine.machine)]
        return f"{_named(alike)}: {mine.refusal}" if mine is alike[0] else ""
    if any(x.machine == mine.machine and not x.refusal for x in table[:me]):
        return ""
    # On another machine the reason stands in another terminal.
    reasons = {x.refusal for x in refusing if x.machine != mine.machine}
    why = f": {'; '.join(sorted(reasons))}" if reasons else ""
    return f"{_named([mine])} does not go on, since {_named(refusing)} refused{why}"


def words_of_difference(table: Sequence[Account], me: int) -> str:
    """What the ranks have otherwise than each other; "" where another rank on this machine says it."""
    if any(account.machine == table[me].machine for account in table[:me]):
        return ""
    names = dict.fromkeys(name for account in table for name in account.fields)
    different = []
    for name in names:
        by_value: dict[str, list[Account]] = {}
        for account in table:
            by_value.setdefault(account.fields.get(name, "nothing"), []).append(account)
        if len(by_value) > 1:
            had = ", ".join(f"{_named(having)}: {value}" for value, having in by_value.items())
            different.append(f"{name} ({had})")
    return f"the ranks would not train the same run: they differ in {'; '.join(different)}"


def _named(accounts: Sequence[Account]) -> str:
    """Ranks and their hosts: "ranks 0-3 on host a and rank 4 on host b"."""
    hosts = groupby(accounts, key=lambda account: account.host)
    return " and ".join(f"{_numbers([account.rank for account in some])} on host {host}" for host, some in hosts)


def _numbers(ranks: Sequence[int]) -> str:
    stretches: list[list[int]] = []
    for rank in sorted(ranks):
        if stretches and stretches[-1][-1] == rank - 1:
            stretches[-1] = [stretches[-1][0], rank]
        else:
            stretches.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} {', '.join('-'.join(map(str, x)) for x in stretches)}"


def _exchange(parallel: ContextParallel, refusal: str, fields: Mapping[str, str]) -> list[Account]:
    """Every rank's account, in the order of places."""
    host, rank = socket.gethostname(), dist.get_rank() if dist.is_initialized() else 0
    # torchrun numbers its machines. Processes that somebody started one by one may be anywhere.
    machine = f"{host} {os.environ.get('GROUP_RANK', '')}" if "LOCAL_RANK" in os.environ else f"rank {rank}"
    texts = _all_texts(parallel, json.dumps(asdict(Account(rank, host, machine, refusal, fields))))
    return [Account(**json.loads(text)) for text in texts]


def _all_texts(parallel: ContextParallel, text: str) -> list[str]:
    """Every rank's text (ASCII), by sums of tensors in which each has a row."""
    content = torch.tensor(list(text.encode("ascii")), dtype=torch.uint8)
    lengths = torch.zeros(parallel.world_size, dtype=torch.int64)
    lengths[parallel.rank] = len(content)
    lengths = all_reduce(parallel.ranks, lengths)
    table = torch.zeros(parallel.world_size, int(lengths.max()), dtype=torch.uint8)
    table[parallel.rank, : len(content)] = content
    rows = all_reduce(parallel.ranks, table)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths.tolist(), strict=True)]
