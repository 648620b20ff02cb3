"""Verifies one rank's share of a job against direct evaluation, row by row.

What is compared with what; the right side is always `direct.Direct`, which knows no plan and no rank:

- out, lse and dq of rows of this rank: from the library's forward and backward of this rank.
- This rank's *contribution* to dK and dV. Of other ranks' keys: what leaves with the gradients of their chunks. Of its
  own keys: what backward returns while nothing comes home. Against the queries of this rank that see the key.
- The *complete* dK and dV of rows of this rank: what backward returns while the gradients of its chunks come home. They
  are the sums of what each rank that meets the chunks contributes, and each was run by the library, both ways. Against
  all queries of the whole job that see the key; out and lse of each are evaluated from all the keys it sees.

Every row is drawn for a branch, and errors are relative L2 errors per branch: few rows cannot hide behind many.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ring_dilated_attention.run.views import block_views
from ring_dilated_attention.simulate.one_rank import grid

from .direct import Direct
from .share import Share, SlicedJob

Row = tuple[int, int]  # global position, head


class Drawn(NamedTuple):
    """A row, and the branch that it was drawn for."""

    branch: int
    row: Row


class Check(NamedTuple):
    """Rows drawn for a branch: relative L2 error of a quantity, and how many of them other ranks own."""

    quantity: str
    branch: int
    num_rows: int
    num_remote: int
    error: float


def tolerance(head_dim: int) -> float:
    """Of a relative L2 error in float32, whose unit roundoff is u = 2^-24.

    A score has |q| |k| / sqrt(D) = sqrt(D) to lose digits from, so it is off by some sqrt(D) * u, and by that its
    weight is off relatively. So are dout.v and delta: 4 sqrt(D) u. Exp, merging and adding up hops: 8 u, since
    their roundings are random. The sum is 2.4e-6 for D = 64; a key that is wrong shows up a thousand times larger.
    """
    return (8 + 4 * math.sqrt(head_dim)) * 2**-24


def verify(
    job: SlicedJob, rank: int, share: Share, step: Callable[[str], None], *, num_rows: int = 64, num_complete: int = 8
) -> list[Check]:
    """Compare drawn rows of a share with direct evaluation. `step` is called with what comes next, three times."""
    direct = Direct(job.pattern, job.seq_len, job.num_heads, job.num_kv_heads, job.tensors)
    own = job.rows_of(rank)
    rng = random.Random(job.seed)
    sent = _sent_rows(share)

    def rows_here(tensors: Iterable[Tensor], row: Row) -> list[Tensor]:
        return [x[row[0] - own.start, row[1]] for x in tensors]

    def contribution(row: Row) -> list[Tensor]:
        return rows_here(share.own, row) if row[0] in own else sent[row]

    limit = tolerance(job.head_dim)
    step("queries, from all the keys that they see")
    drawn = _draw(_own_rows(direct, own, job.num_heads), num_rows, rng)
    found = {row: rows_here((share.out, share.lse, share.dq), row) for _, row in drawn}
    checks = _compare(("out", "lse", "dq"), drawn, own, found, direct.query_rows, limit)

    step("contributions to keys, from this rank's queries that see them")
    keys = _own_rows(direct, own, job.num_heads, job.num_heads // job.num_kv_heads)
    drawn = _draw(keys | _remote_rows(share), num_rows, rng)
    found = {row: contribution(row) for _, row in drawn}
    evaluate = partial(direct.key_gradients, among=own)
    checks += _compare(("contribution to dk", "contribution to dv"), drawn, own, found, evaluate, limit)

    step("complete gradients of keys, from all queries that see them")
    drawn = _draw(keys, num_complete, rng)
    found = {row: rows_here(share.complete, row) for _, row in drawn}
    return checks + _compare(("complete dk", "complete dv"), drawn, own, found, direct.key_gradients, limit)


def _own_rows(direct: Direct, own: range, num_heads: int, ratio: int = 1) -> dict[int, list[Row]]:
    """By branch, the rows of a rank that it covers. `ratio` query heads share a head of a row."""
    positions = torch.arange(own.start, own.stop)
    rows: dict[int, list[Row]] = {}
    for branch in range(len(direct.pattern.branches)):
        covered = {
            (position, head // ratio)
            for head in range(num_heads)
            for position in positions[direct.covers(branch, head, positions)].tolist()
        }
        rows[branch] = sorted(covered)
    return rows


def _remote_rows(share: Share) -> dict[int, list[Row]]:
    """By branch, the keys of other ranks that this rank contributes to."""
    rows: dict[int, set[Row]] = {}
    for chunk, _ in share.sent:
        for of_head, _ in chunk.rows:
            positions, heads = grid(of_head)
            for row, head in zip(positions.tolist(), heads.flatten().tolist(), strict=True):
                rows.setdefault(chunk.branch, set()).update((position, head) for position in row)
    return {branch: sorted(found) for branch, found in rows.items()}


def _sent_rows(share: Share) -> dict[Row, list[Tensor]]:
    """This rank's contributions to the dk and dv of other ranks' keys, over all branches."""
    sent: dict[Row, list[Tensor]] = {}
    for chunk, gradient in share.sent:
        head_dim = len(gradient) // chunk.size
        for rows, block in chunk.rows:
            positions, heads = grid(rows)
            for name, grads in enumerate(block_views(gradient, block, 1, head_dim)):
                for h, head in enumerate(heads.flatten().tolist()):
                    for m, position in enumerate(positions[h].tolist()):
                        both = sent.setdefault((position, head), [torch.zeros(head_dim), torch.zeros(head_dim)])
                        both[name] = both[name] + grads[0, h, m]
    return sent


def _draw(candidates: Mapping[int, Sequence[Row]], number: int, rng: random.Random) -> list[Drawn]:
    """Rows of the branches in turn, the last one first (the widest, as a rule), and none of them twice."""
    pools = {branch: rng.sample(rows, len(rows)) for branch, rows in sorted(candidates.items(), reverse=True)}
    drawn: list[Drawn] = []
    seen: set[Row] = set()
    while len(drawn) < number and any(pools.values()):
        for branch, pool in pools.items():
            while pool and pool[-1] in seen:
                pool.pop()
            if pool and len(drawn) < number:
                seen.add(pool[-1])
                drawn.append(Drawn(branch, pool.pop()))
    return drawn


def _evaluate(drawn: Iterable[Drawn], evaluate: Callable[..., Sequence[Tensor]]) -> dict[Row, list[Tensor]]:
    """evaluate(head, positions) for all rows of each head at once; the results by row."""
    positions: dict[int, list[int]] = {}
    for _, (position, head) in drawn:
        positions.setdefault(head, []).append(position)
    found: dict[Row, list[Tensor]] = {}
    for head, of_head in positions.items():
        results = evaluate(head, torch.tensor(of_head))
        found |= {(position, head): [x[i] for x in results] for i, position in enumerate(of_head)}
    return found


def _compare(
    quantities: Sequence[str],
    drawn: Sequence[Drawn],
    own: range,
    found: Mapping[Row, Sequence[Tensor]],
    evaluate: Callable[..., Sequence[Tensor]],
    limit: float,
) -> list[Check]:
    """Errors are relative to the exact result; beyond `limit`, to the larger of it and of what cancels in it.

    A query with one key has dq = 0, and one with few may come near it: float32 leaves its share of the terms.
    """
    expected = _evaluate(drawn, evaluate)
    checks = []
    for branch in sorted({branch for branch, _ in drawn}):
        rows = [row for b, row in drawn if b == branch]
        num_remote = sum(position not in own for position, _ in rows)
        for k, quantity in enumerate(quantities):
            exact = torch.stack([expected[row][k] for row in rows])
            error = (torch.stack([found[row][k] for row in rows]).double() - exact).norm()
            size = exact.norm()
            if not error <= limit * size:
                terms = _evaluate([Drawn(branch, row) for row in rows], partial(evaluate, is_whole=False))
                size = torch.maximum(size, torch.stack([terms[row][k] for row in rows]).norm())
            # A query that sees one key alone has gradients of 0, and so have ours.
            checks.append(Check(quantity, branch, len(rows), num_remote, float(error / size) if size else 0.0))
    return checks
