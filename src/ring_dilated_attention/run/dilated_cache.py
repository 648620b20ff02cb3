"""DilatedCache keeps the keys and values to which a query can still attend, and drops all others."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, is_tensor

from ..kernels.cpu import DTYPES
from ..pattern import DilatedPattern, is_integer, why_no_pattern
from ..plan.cache_plan import CachePlan, check_append, check_crop, plan_cache
from ..plan.sharded_call import held_heads
from .append import packed, packed_size, place, placed, unpack
from .link_contract import ContextProtocol


class DilatedCache:
    """Keys and values of a batch of sequences, for `dilated_attention(query, key, value, pattern, cache=cache)`.

    A query attends only to rows of its own segments (and of the window, if the pattern has one). So a branch with the
    segment length w and the dilation rate r needs rolling buffers of about w / r rows, one for each key/value head and
    phase, however long the sequence is. The constructor allocates all memory.

    Args:
        pattern: the attention pattern. It must be causal.
        batch, num_heads, num_kv_heads, head_dim: the sizes of the query (B, N, H, D) and the key (B, N, G, D). With
            `heads_held`, num_heads and num_kv_heads count all heads of the layer.
        dtype, device: the dtype and device of query, key and value. The defaults are torch's.
        max_len: the most positions that a sequence may have; None for any number. No buffer gets more than max_len
            rows, which saves memory if segments are longer. A dense pattern (one segment for everything) needs max_len.
        keep: let n be the most positions that a sequence has had. `crop` can always shorten the sequence to n - keep
            positions, even if that reopens a complete segment.
        heads_held: the query heads of the layer that the tensors hold (tensor parallelism), such as range(3, 6).
            Every call with this cache must pass the same heads_held.

    Attributes:
        num_rows: how many rows of keys are allocated for one sequence. Values have equally many rows. For keep=0 and
            all heads of a layer this number is pattern.cache_rows(num_heads, num_kv_heads, max_len).
        num_bytes: the bytes that the cache allocates.
        position: (B,) int64 on the device: the number of positions of each sequence so far.
        plan: the CachePlan.
        dtype, head_dim: as in the arguments.

    Raises:
        ValueError: for a pattern that is not causal, for invalid sizes, or if there is too little memory.
    """

    def __init__(
        self,
        pattern: DilatedPattern,
        batch: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        max_len: int | None = None,
        keep: int = 0,
        heads_held: range | None = None,
    ) -> None:
        sizes = {
            "batch": batch,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if not is_integer(size) or size < 1:
                raise ValueError(f"{name}={size!r} must be an integer of at least 1.")

        self.plan = _plan(pattern, num_heads, num_kv_heads, max_len, keep, heads_held)
        self.batch = batch
        self.head_dim = head_dim

        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}.")

        # `self.device` has an index: "cuda:0" if `device` is "cuda".
        self.device = torch.empty(0, device=device).device
        self._refuse_what_does_not_fit()

        # Allocate the keys and values of all buffers as one tensor, (2, B, rows, D). A list of tensors would be slow,
        # because compiled code copies all tensors of a list at every call if a custom op writes to the list.
        self.memory = torch.empty(
            2, batch, self.num_rows, head_dim, dtype=self.dtype, device=self.device
        )

        # (2, B): for each sequence, the number of positions so far, and the fewest positions to which `crop` may
        # shorten the sequence.
        self.progress = torch.zeros(2, batch, dtype=torch.int64, device=self.device)

    @classmethod
    def gather(
        cls,
        parallel: ContextProtocol,
        key: Tensor,
        value: Tensor,
        pattern: DilatedPattern,
        num_heads: int,
        *,
        to: int | None = None,
        max_len: int | None = None,
        keep: int = 0,
        heads_held: range | None = None,
    ) -> "DilatedCache | None":
        """Make a cache of a sequence whose rows the ranks of `parallel` own. A rank can then continue the sequence
        without the other ranks.

        Every rank must call `gather`. Only rows to which a later query can attend are sent. Returns the cache, or None
        on ranks that do not get a cache.

        Args:
            key, value: this rank's key and value, (B, N, G, D), as passed to `dilated_attention`.
            num_heads: the number of query heads. With `heads_held`, all query heads of the layer.
            to: the number (`parallel.rank`) of the only rank that gets a cache. By default every rank gets a cache.
            pattern, max_len, keep, heads_held: as in `DilatedCache`.

        Raises:
            ValueError: on every rank, if one rank refuses the call or the ranks' arguments differ.
        """
        ranks = parallel.ranks
        ranks.check_all_here("DilatedCache.gather")
        gets_one = to is None or to == ranks.rank

        with ranks.refusing():
            if to is not None and not (is_integer(to) and 0 <= to < ranks.world_size):
                raise ValueError(
                    f"to={to!r}: the ranks are 0 to {ranks.world_size - 1}. Give one rank, or None for all ranks."
                )

            described, other = (f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (key, value))
            if key.dim() != 4 or described != other:
                raise ValueError(
                    "key and value must have the same shape (batch, positions, K/V heads, head dim), dtype and device; "
                    f"got {described} and {other}."
                )

            batch, length, num_kv_heads, _ = key.shape
            # Compute the number of key/value heads of the whole layer, because key has only the heads that are held.
            # (`_plan` raises a ValueError if heads_held is an empty range.)
            if isinstance(heads_held, range) and heads_held:
                num_kv_heads = num_kv_heads * num_heads // len(heads_held)
            plan = _plan(pattern, num_heads, num_kv_heads, max_len, keep, heads_held)
            cache = cls._of(plan, batch, key) if gets_one else None

            fields = {
                "call": "DilatedCache.gather",
                "pattern": pattern,
                "to": to,
                "max_len": max_len,
                "keep": keep,
                "shape": (num_heads, batch, *key.shape[2:]),
                "heads held": heads_held,
                "dtype": key.dtype,
                "device": key.device.type,
            }

        lengths = ranks.agree(length, fields)
        position = sum(lengths)
        shards = ranks.shards(lengths)
        check_append(plan, [0], [position])

        # `counts`: how many elements this rank receives from each rank.
        counts = [0] * len(shards)
        if gets_one:
            counts = [packed_size(plan, shard, position, key) for shard in shards]

        with ranks.all_or_none():
            rows = packed(plan, shards[ranks.rank], position, key.detach(), value.detach())
            leaving = [rows] * len(shards)
            if to is not None:
                leaving = [rows.new_empty(0)] * len(shards)
                leaving[to] = rows
            received = ranks.scatter(leaving, counts, key, "the exchange of what a cache keeps")

        if cache is not None:
            for shard, rows in zip(shards, received, strict=True):
                unpack(plan, shard, position, rows, cache.memory)
            cache.progress[0] = position
            cache.progress[1] = plan.floor(position)
        return cache

    @property
    def pattern(self) -> DilatedPattern:
        return self.plan.pattern

    @property
    def num_rows(self) -> int:
        return self.plan.num_rows

    @property
    def num_bytes(self) -> int:
        return self._bytes_of_rows() + 2 * self.batch * torch.int64.itemsize

    @property
    def position(self) -> Tensor:
        return self.progress[0]

    def next_positions(self, num_new: int) -> Tensor:
        """The positions that the next num_new rows of each sequence will have: (B, num_new) int64 on the device."""
        return self.position[:, None] + torch.arange(num_new, device=self.device)

    def __repr__(self) -> str:
        plan = self.plan
        heads = f"num_heads={plan.num_heads}, num_kv_heads={plan.num_kv_heads}, head_dim={self.head_dim}"
        if plan.held is not None:
            heads += f", heads_held={plan.held}"
        return (
            f"DilatedCache(batch={self.batch}, {heads}, {self.dtype}, {self.device}, max_len={plan.max_len}, "
            f"keep={plan.keep}: {self.num_rows:,} rows, {self.num_bytes:,} bytes)"
        )

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Begin a new, empty sequence in every batch entry, or only in the entries whose numbers `rows` gives."""
        entries = slice(None) if rows is None else self._entries("reset", rows)
        self.progress[:, entries] = 0

    def crop(self, count: int | Sequence[int] | Tensor) -> None:
        """Remove the last `count` positions of every sequence, or count[i] of sequence i.

        Let n be the most positions that a sequence has had. `crop` can shorten the sequence to n - keep positions. If
        the pattern has no window, `crop` can also shorten it to the latest position up to n where a segment starts.

        Raises:
            ValueError: if a sequence has fewer positions, or if later queries would need rows that are no longer in the
                cache. The cache then stays as it was.
        """
        try:
            counts = torch.as_tensor(count).flatten().tolist()
        except (TypeError, ValueError, RuntimeError):
            # Keep `count` as it is if it is not a number, or does not fit into 64 bits. The checks below refuse it.
            counts = [count]
        if not all(map(is_integer, counts)):
            raise ValueError(
                f"crop({counts}): the numbers of positions to remove must be whole numbers."
            )

        if len(counts) == 1:
            counts *= self.batch
        if len(counts) != self.batch:
            raise ValueError(
                f"crop({counts}) has {len(counts)} numbers, and the batch has {self.batch} entries."
            )

        positions, floors = self.progress.tolist()
        check_crop(self.plan, positions, floors, counts)

        # Change only the number of positions. The rows of the removed positions stay in memory until new rows overwrite
        # them.
        self.progress[0] -= torch.tensor(counts, device=self.device)

    def fork(self, rows: Sequence[int] | Tensor) -> "DilatedCache":
        """A new cache whose sequence i begins as a copy of this cache's sequence rows[i]. This cache is not changed.

        An example: after a prompt of one sequence, fork([0, 0, 0]) allows three different answers.
        """
        entries = self._entries("fork", rows)
        new = self._of(self.plan, len(entries), self.memory)

        torch.index_select(self.memory, 1, entries, out=new.memory)
        torch.index_select(self.progress, 1, entries, out=new.progress)
        return new

    def state_dict(self) -> dict[str, Any]:
        """The sequences so far, for torch.save and `load_state_dict`. The tensors are on the CPU, and hold only rows to
        which a query can still attend."""
        progress = self.progress.to("cpu", copy=True)
        places = enumerate(progress.T.tolist())
        return {
            "cache": self._described(),
            "keep": self.plan.keep,
            "progress": progress,
            "rows": [self._rows_of(b, position, floor) for b, (position, floor) in places],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the sequences of this cache by those of a `state_dict`.

        If the state has a single sequence, it is loaded into every batch entry. max_len and keep of the saved cache may
        differ from those of this cache. `crop` can then remove only positions that each of the two caches could remove.

        Raises:
            ValueError: if the state comes from a cache with a different pattern, shape or dtype, or is too long. This
                cache then stays as it was.
        """
        of = state.get("cache") if isinstance(state, dict) else state
        if of != self._described():
            raise ValueError(
                f"the state was saved from a cache of {of}, but this is a cache of {self._described()}."
            )

        progress: Any = state.get("progress")  # (2, saved sequences)
        saved: Any = state.get("rows")  # a tensor (2, rows, D) for each sequence
        if isinstance(saved, list) and len(saved) not in (1, self.batch):
            raise ValueError(
                f"the state has {len(saved)} sequences; this batch needs 1 or {self.batch}."
            )
        if not _fit(progress, saved):
            raise ValueError(f"the state is damaged: progress {progress} does not fit the rows.")

        # `source`: a plan with the saved cache's `keep`, which decides which rows were saved. The saved cache's max_len
        # is not needed.
        plan = self.plan
        limit = plan.max_len
        source = plan_cache(
            plan.pattern, plan.num_heads, plan.num_kv_heads, None, state.get("keep"), plan.held
        )

        # For each saved sequence: the number of positions, and the fewest positions to which `crop` may shorten it.
        places = progress.T.tolist()
        for b, (position, floor) in enumerate(places):
            if limit is not None and position > limit:
                raise ValueError(
                    f"the state has {position} positions, and the cache holds max_len={limit}. Make the cache with "
                    f"max_len={position} or more."
                )
            shape = (2, sum(_sizes(source, position, floor)), self.head_dim)
            if tuple(saved[b].shape) != shape or saved[b].dtype != self.dtype:
                raise ValueError(
                    f"the state is damaged: sequence {b} has {position} positions, so its rows must be {shape} of "
                    f"{self.dtype}, but are {tuple(saved[b].shape)} of {saved[b].dtype}."
                )

        # Load a single saved sequence into every batch entry.
        repeats = self.batch // len(places)
        positions: list[int] = []
        floors: list[int] = []
        for b, (position, floor) in enumerate(places * repeats):
            self._put_rows(b, saved[b % len(saved)].to(self.device), source, position, floor)
            positions.append(position)
            floors.append(max(floor, plan.floor(position)))
        self.progress.copy_(torch.tensor([positions, floors]))

    def _rows_of(self, b: int, position: int, floor: int) -> Tensor:
        """The keys and values that the cache keeps for a batch entry, (2, rows, D), one buffer after the other.

        position: the number of positions of the sequence. floor: the smallest number to which `crop` may shorten the
        sequence.
        """
        entry = self.memory[:, b : b + 1]  # (2, 1, rows, D)
        rows = [entry[:, 0, :0].cpu()]
        for buffers in self.plan.buffers:
            kept = self.plan.kept(buffers, position, floor)
            both_2BGLD = placed(buffers, kept, entry)
            rows.append(both_2BGLD[:, 0].flatten(1, 2).cpu())  # (2, G · L, D)
        return torch.cat(rows, dim=1)

    def _put_rows(self, b: int, rows: Tensor, source: CachePlan, position: int, floor: int) -> None:
        """Write rows of a saved sequence into the slots of batch entry b.

        rows: what `_rows_of` returned in the saved cache, for the same position and floor. source: the saved cache's
        plan.
        """
        entry = self.memory[:, b : b + 1]  # (2, 1, rows, D)
        by_buffer = rows[:, None].split(_sizes(source, position, floor), dim=2)
        targets = {(x.number, x.phase, x.kv_heads): x for x in self.plan.buffers}
        for buffers, both in zip(source.buffers, by_buffer, strict=True):
            saved = source.kept(buffers, position, floor)
            # Skip a buffer of which no row was saved, because with a small max_len this cache may not have the buffer.
            if not saved:
                continue
            target = targets[buffers.number, buffers.phase, buffers.kv_heads]

            # Write only the saved rows that this cache keeps too. If this cache has a smaller `keep`, only the last
            # saved rows are written.
            first = max(saved.start, self.plan.kept(target, position, floor).start)
            numbers = range(first, saved.stop)
            both_2BGLD = both.unflatten(2, (len(buffers.kv_heads), len(saved)))
            place(target, numbers, entry, both_2BGLD[..., first - saved.start :, :])

    def _described(self) -> dict[str, Any]:
        """The properties that two caches must share so that one can load the other's state, in types that torch.load
        accepts."""
        plan = self.plan
        return self.pattern.as_dict() | {
            "num_heads": plan.num_heads,
            "num_kv_heads": plan.num_kv_heads,
            "heads_held": [plan.heads.start, plan.heads.stop],
            "head_dim": self.head_dim,
            "dtype": str(self.dtype),
        }

    def _entries(self, call: str, rows: Sequence[int] | Tensor) -> Tensor:
        """Numbers of batch entries as an int64 tensor. ValueError if `rows` are not such numbers.

        call: the name of the method that was called with `rows`, for the error's message.
        """
        if isinstance(rows, Tensor):
            rows = rows.tolist()
        entries = list(rows) if isinstance(rows, Iterable) else [None]
        # Refuse False and True, because otherwise a boolean mask would be read as the entries 0 and 1.
        if not all(map(is_integer, entries)):
            raise ValueError(
                f"{call}({rows}) takes the numbers of batch entries, as [0, 2]. For a mask, pass "
                "mask.nonzero().flatten()."
            )
        if not all(0 <= row < self.batch for row in entries):
            raise ValueError(f"{call}({entries}): the batch has the entries 0 to {self.batch - 1}.")
        return torch.tensor(entries, dtype=torch.int64, device=self.device)

    @classmethod
    def _of(cls, plan: CachePlan, batch: int, like: Tensor) -> "DilatedCache":
        """A new, empty cache with this plan. It has the dtype, device and head dim of the tensor `like`."""
        return cls(
            plan.pattern,
            batch,
            plan.num_heads,
            plan.num_kv_heads,
            like.shape[-1],
            dtype=like.dtype,
            device=like.device,
            max_len=plan.max_len,
            keep=plan.keep,
            heads_held=plan.held,
        )

    def _bytes_of_rows(self) -> int:
        return 2 * self.batch * self.num_rows * self.head_dim * self.dtype.itemsize

    def _refuse_what_does_not_fit(self) -> None:
        """Raise ValueError if there is too little free memory. Without this check the system might kill the process."""
        free = free_bytes(self.device)
        if free is None or self._bytes_of_rows() <= free:
            return

        limit = "Give a smaller max_len"
        if self.plan.max_len is None:
            limit = "Give max_len, which no buffer exceeds"
        raise ValueError(
            f"the cache would hold {self.num_rows:,} rows of {self.head_dim} {self.dtype} for keys and as many for "
            f"values, for a batch of {self.batch}: 2 * {self.batch} * {self.num_rows:,} * {self.head_dim} * "
            f"{self.dtype.itemsize} = {self._bytes_of_rows():,} bytes, and {free:,} are free on {self.device}. "
            f"{limit}, or use a smaller batch, fewer key/value heads or 16 bits."
        )


def _plan(
    pattern: DilatedPattern,
    num_heads: int,
    num_kv_heads: int,
    max_len: int | None,
    keep: int,
    heads_held: range | None,
) -> CachePlan:
    """The plan of a cache. Raises ValueError if the pattern or a size is invalid."""
    if failure := why_no_pattern(pattern):
        raise ValueError(f"{failure}.")

    if heads_held is not None:
        pattern.check_heads(num_heads, num_kv_heads)
        num_held = len(heads_held) if isinstance(heads_held, range) else num_heads
        held_heads(num_held, num_heads // num_kv_heads, heads_held, num_heads)
        if num_held == num_heads:
            heads_held = None
    return plan_cache(pattern, num_heads, num_kv_heads, max_len, keep, heads_held)


def _sizes(plan: CachePlan, position: int, floor: int) -> list[int]:
    """For each entry of `plan.buffers`, how many rows of a sequence are kept, summed over the entry's key/value
    heads."""
    return [len(x.kv_heads) * len(plan.kept(x, position, floor)) for x in plan.buffers]


def _fit(progress: Any, rows: Any) -> bool:
    """Whether the saved `progress` is valid for len(rows) sequences: shape, dtype and values."""
    if not isinstance(rows, list) or not all(map(is_tensor, (progress, *rows))):
        return False
    if progress.shape != (2, len(rows)) or progress.dtype != torch.int64:
        return False

    positions, floors = progress
    return bool(((floors >= 0) & (floors <= positions)).all())


def free_bytes(device: torch.device) -> int | None:
    """How many bytes can still be allocated on a device, or None if that is unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None

    # Read the free memory of the whole machine.
    try:
        lines = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable:"]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    # Read the memory limit of a container: a number, or "max" for no limit.
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return free
    if limit.isdigit():
        free = min(free, int(limit))
    return free
