"""Single rows of a sequence of any length, straight from the definition, in float64. No plan, no tiles, no merging.

Which keys a query sees, and which queries see a key, is integer arithmetic on positions: those of its segment with its
phase, for every branch. Scores are at most sqrt(D) * 3 for tensors of `counter`, so that exp needs no maximum: the sums
below are the naive formulas.

I query rows, J key rows, S seen rows, D head dim.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ring_dilated_attention.pattern import DilatedPattern

from .counter import CounterTensors

# Scores held at a time.
_MOST_SCORES = 2**22


class QueryRows(NamedTuple):
    """out (I, D), lse (I,) and dq (I, D) of queries of one head, in float64."""

    out: Tensor
    lse: Tensor
    dq: Tensor


class Direct:
    """Rows of dilated attention over `tensors`, under the gradient `dout` of out (and none of lse)."""

    def __init__(
        self, pattern: DilatedPattern, seq_len: int, num_heads: int, num_kv_heads: int, tensors: CounterTensors
    ) -> None:
        self.pattern, self.seq_len, self.tensors = pattern, seq_len, tensors
        self.num_heads, self.ratio = num_heads, num_heads // num_kv_heads
        self.scale = tensors.head_dim**-0.5

    def covers(self, branch: int, head: int, positions: Tensor) -> Tensor:
        """Whether a branch covers queries, and keys, at these positions of a query head."""
        length, rate = self.pattern.branches[branch]
        phase = self.pattern.phase_of(branch, head, self.num_heads)
        return positions % length % rate == (-1 if phase is None else phase)

    def keys_of(self, branch: int, head: int, first: int, last: int) -> Tensor:
        """The keys that queries first..last of one segment see in a branch (if causal, those that the last sees)."""
        stop = last + 1 if self.pattern.is_causal else self.seq_len
        return self._row_positions(branch, head, first, 0, stop)

    def queries_of(self, branch: int, head: int, key: int, among: range) -> Tensor:
        """The queries in a range of positions that see a key in a branch."""
        if not self.covers(branch, head, torch.tensor(key)):
            return torch.arange(0)
        start = max(key, among.start) if self.pattern.is_causal else among.start
        return self._row_positions(branch, head, key, start, among.stop)

    def _row_positions(self, branch: int, head: int, position: int, start: int, stop: int) -> Tensor:
        """Positions from start to stop of the branch's rows in the segment of a position."""
        length, rate = self.pattern.branches[branch]
        origin = position - position % length
        first = origin + (self.pattern.phase_of(branch, head, self.num_heads) or 0)
        first += max(0, -((first - start) // rate)) * rate
        return torch.arange(first, max(first, min(stop, origin + length, self.seq_len)), rate)

    def query_rows(self, head: int, positions: Tensor, *, is_whole: bool = True) -> QueryRows:
        """out = sum(e v) / Z, lse = log Z and dq = scale * sum(e (dout.v - dout.out) k) / Z over all branches' keys,
        with e = exp(scale q.k) and Z = sum(e). A query that sees none has out = 0 and lse = -inf.

        is_whole: False leaves out what is subtracted: where the two cancel, an error is relative to these.
        """
        q, dout = self._rows("query", positions, head), self._rows("dout", positions, head)
        total, weighted = q.new_zeros(len(q)), torch.zeros_like(q)
        with_dout, without = torch.zeros_like(q), torch.zeros_like(q)
        for seen, rows in self._seen(head, positions):
            k, v = (self._rows(name, seen, head // self.ratio) for name in ("key", "value"))
            for i in rows.split(max(1, _MOST_SCORES // len(seen))):
                e = torch.exp(self.scale * q[i] @ k.T)
                if self.pattern.is_causal:
                    e.masked_fill_(seen > positions[i, None], 0)
                total[i] += e.sum(1)
                weighted[i] += e @ v
                without[i] += e @ k
                with_dout[i] += (e * (dout[i] @ v.T)) @ k
        z = total.where(total > 0, 1).unsqueeze(1)
        out = weighted / z
        delta = (dout * out).sum(1, keepdim=True) * is_whole
        return QueryRows(out, total.log(), self.scale * (with_dout - delta * without) / z)

    def _seen(self, head: int, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each branch and segment: the keys that its queries see, and which of the given positions these are."""
        for branch, length in enumerate(self.pattern.segment_lengths):
            covered = torch.nonzero(self.covers(branch, head, positions)).flatten()
            segments = positions[covered] // length
            for segment in segments.unique():
                rows = covered[segments == segment]
                yield self.keys_of(branch, head, *(int(x) for x in positions[rows].aminmax())), rows

    def key_gradients(
        self, kv_head: int, positions: Tensor, among: range | None = None, *, is_whole: bool = True
    ) -> tuple[Tensor, Tensor]:
        """dk and dv (J, D) at keys of a key/value head, from the queries in a range of positions (all by default).

        dv = sum(p dout) and dk = scale * sum(p (dout.v - dout.out) q), with p = exp(scale q.k - lse), over the queries
        of all branches that see the key; out and lse of each are evaluated first.

        is_whole: as of `query_rows`.
        """
        among = range(self.seq_len) if among is None else among
        k, v = (self._rows(name, positions, kv_head) for name in ("key", "value"))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for head in range(kv_head * self.ratio, (kv_head + 1) * self.ratio):
            branches = range(len(self.pattern.branches))
            seeing = [[self.queries_of(b, head, int(x), among) for b in branches] for x in positions]
            queries = torch.cat([torch.arange(0), *(x for of_key in seeing for x in of_key)]).unique()
            q, dout = (self._rows(name, queries, head) for name in ("query", "dout"))
            out, lse, _ = self.query_rows(head, queries)
            delta = (dout * out).sum(1) * is_whole
            for j, of_key in enumerate(seeing):
                i = torch.searchsorted(queries, torch.cat(of_key))
                p = torch.exp(self.scale * q[i] @ k[j] - lse[i])
                dv[j] += p @ dout[i]
                dk[j] += self.scale * (p * (dout[i] @ v[j] - delta[i])) @ q[i]
        return dk, dv

    def _rows(self, tensor: str, positions: Tensor, head: int) -> Tensor:
        return self.tensors.rows(tensor, positions, torch.tensor(head)).double()
