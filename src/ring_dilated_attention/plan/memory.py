"""Memory of one attention call on one rank, from its plan: the ring loop once more, with sizes instead of tensors.

Pure integers, no torch. `_forward` and `_backward` below follow `exchange/ring.py` line by line and hold and release
what it does, so the figure is a sum over named items and not a formula. Bytes sent and FLOPs are the plan's own
(`Plan.bytes_sent`, `Plan.flops`).

What is counted is what torch's allocator gives out. The composed kernels ("cpu", "sdpa") give out, lse and gradients of
one tile at a time, which are then merged and added; the Triton kernels merge and add in place; fused, on one device,
they need no accumulators either. Not counted: the column that a gradient of lse needs, the float32 copies of one tile
that the float16 backward makes on CPUs, and what the transport allocates by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .plan import Hop, Plan, Tile


class Item(NamedTuple):
    """Something that is alive at the peak."""

    name: str
    num_bytes: int


class Peak(NamedTuple):
    """What is alive at the moment when most is, the largest first."""

    items: tuple[Item, ...]

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


class AttentionMemory(NamedTuple):
    """The peak of a forward alone, and of a forward with its backward. Both include the rank's query, key and value."""

    forward: Peak
    forward_backward: Peak


KERNELS = ("composed", "in-place", "fused")


def attention_memory(
    plan: Plan, batch: int, head_dim: int, itemsize: int, *, num_threads: int = 1, kernel: str = "composed"
) -> AttentionMemory:
    """The memory of one call on the plan's rank.

    Args:
        itemsize: bytes of an element of query, key and value. Accumulators have at least 4.
        num_threads: threads of the CPU kernel; each has scratch of a fixed size.
        kernel: one of KERNELS.

    Raises:
        ValueError: for another kernel, or a fused one of a plan with hops.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is unknown; choose one of {KERNELS}.")
    if kernel == "fused" and plan.hops:
        raise ValueError(
            f"the fused kernel serves one device, and this plan has {len(plan.hops)} hops. Use 'in-place'."
        )
    sizes = _Sizes(plan, batch, head_dim, itemsize, num_threads, kernel)
    ledger = _Ledger()
    ledger.hold("query", sizes.query)
    ledger.hold("key and value", 2 * sizes.key)
    _forward(sizes, ledger)
    forward = ledger.peak
    ledger.hold("dout", sizes.query)
    _backward(sizes, ledger)
    return AttentionMemory(forward, ledger.peak)


class _Ledger:
    """What is held now, by name, and what was held when it was most."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._largest = 0
        self.peak = Peak(())

    def hold(self, name: str, num_bytes: int) -> None:
        self._held[name] = num_bytes
        total = sum(self._held.values())
        if total > self._largest:
            self._largest = total
            items = sorted((Item(*item) for item in self._held.items() if item[1]), key=lambda item: -item.num_bytes)
            self.peak = Peak(tuple(items))

    def release(self, *names: str) -> None:
        for name in names:
            self._held.pop(name, None)

    @contextmanager
    def holding(self, **num_bytes: int) -> Iterator[None]:
        """Hold items (underscores are spaces in their names) until the block ends."""
        names = {name.replace("_", " "): size for name, size in num_bytes.items()}
        for name, size in names.items():
            self.hold(name, size)
        yield
        self.release(*names)


class _Sizes:
    """Sizes in bytes, of whole tensors and of one tile."""

    def __init__(self, plan: Plan, batch: int, head_dim: int, itemsize: int, num_threads: int, kernel: str) -> None:
        self.plan, self.batch, self.head_dim, self.num_threads = plan, batch, head_dim, num_threads
        self.is_composed, self.is_fused = kernel == "composed", kernel == "fused"
        self.itemsize, self.lse_itemsize = itemsize, max(itemsize, 4)
        self.sum_itemsize = itemsize if self.is_fused else self.lse_itemsize
        rows = batch * plan.num_rows
        self.query = rows * plan.num_heads * head_dim * itemsize
        self.key = rows * plan.num_kv_heads * head_dim * itemsize
        self.lse = rows * plan.num_heads * self.lse_itemsize
        self.delta = 0 if self.is_composed else self.lse
        self.chunk = plan.chunk_size * batch * head_dim * itemsize
        self.is_cast = itemsize < self.sum_itemsize

    def sent_late(self, hop: Hop) -> int:
        own = (message.size for message in hop.sends if message.owner == self.plan.rank)
        return sum(own) * self.batch * self.head_dim * self.itemsize

    def summed(self, num_bytes: int) -> int:
        """The same elements in the accumulator's dtype."""
        return num_bytes // self.itemsize * self.sum_itemsize

    def wide(self, lse_bytes: int) -> int:
        """The same lse in float64, in which it is merged."""
        return lse_bytes if self.is_fused else lse_bytes // self.lse_itemsize * 8

    def cast(self, num_bytes: int) -> int:
        """The copy in the accumulator's dtype that adding or merging makes of a 16-bit partial."""
        return self.summed(num_bytes) if self.is_cast else 0

    def num_calls(self, tile: Tile) -> int:
        """Kernel calls that the tile takes: one, or one per batch entry (`tiles.batch_slices`)."""
        rows = tile.query
        folds = self.plan.num_rows == rows.segments * rows.segment_step
        return 1 if rows.segments == 1 or folds else self.batch

    def query_rows(self, tile: Tile) -> int:
        """Query rows of one kernel call, over heads, segments and batch entries."""
        rows = tile.query
        return self.batch // self.num_calls(tile) * rows.segments * len(rows.heads) * rows.num_rows

    def tile_query(self, tile: Tile) -> int:
        return self.query_rows(tile) * self.head_dim * self.itemsize if self.is_composed else 0

    def tile_lse(self, tile: Tile) -> int:
        return self.query_rows(tile) * self.lse_itemsize if self.is_composed else 0

    def tile_key(self, tile: Tile) -> int:
        if not self.is_composed:
            return 0
        entries = self.batch // self.num_calls(tile) * tile.query.segments
        return entries * len(tile.key.heads) * tile.key.num_rows * self.head_dim * self.itemsize

    def is_adopted(self, num_bytes: int, whole: int, is_first: bool) -> bool:
        """Whether a tile's result becomes the accumulator (`tiles._adopted`)."""
        return is_first and not self.is_cast and num_bytes == whole

    def dout_copy(self, tile: Tile) -> int:
        """The op makes dout contiguous, unless the tile is a whole stretch of rows with all heads."""
        rows = tile.query
        in_one_piece = rows.step == 1 and rows.shift == 0 and len(rows.heads) == self.plan.num_heads
        follows_on = rows.segments == 1 or rows.segment_step == rows.num_rows
        return 0 if in_one_piece and follows_on else self.tile_query(tile)

    def scratch(self, tile: Tile, *, backward: bool) -> int:
        """Blocks of scores per thread in torch's CPU flash attention; backward has their gradients too."""
        if not self.is_composed:
            return 0
        queries = min(query_block(tile.query.num_rows), tile.query.num_rows)
        scores = queries * min(KEY_BLOCK, tile.key.num_rows)
        copies = (2 if backward else 1) * self.sum_itemsize + (self.itemsize if self.is_cast else 0)
        rows = 0 if backward else queries * (self.head_dim + 2) * self.sum_itemsize
        return self.num_threads * (scores * copies + rows)


KEY_BLOCK = 512


def query_block(num_rows: int) -> int:
    """Query rows that torch's CPU flash attention takes at a time."""
    return 256 if num_rows >= 768 else 64 if num_rows >= 192 else 32


def _steps(sizes: _Sizes, ledger: _Ledger) -> Iterator[tuple[Tile, bool]]:
    """All tiles in their order, and whether their keys are own ones. Beside each hop's flies what the next one needs,
    among it own chunks that are sent late."""
    hops = sizes.plan.hops
    yield from ((tile, True) for tile in sizes.plan.local)
    for s, hop in enumerate(hops):
        with ledger.holding(own_chunks_sent_late=sizes.sent_late(hops[s + 1] if s + 1 < len(hops) else Hop())):
            yield from ((tile, False) for tile in hop.tiles)


def _forward(sizes: _Sizes, ledger: _Ledger) -> None:
    ledger.hold("two chunks of keys and values", 2 * sizes.chunk)
    has_accumulators = False

    def allocate() -> None:
        ledger.hold("out", sizes.summed(sizes.query))
        ledger.hold("lse", sizes.wide(sizes.lse))

    for tile, _ in _steps(sizes, ledger):
        out, lse = sizes.tile_query(tile), sizes.tile_lse(tile)
        with ledger.holding(partial_of_one_tile=out + lse, kernel_scratch=sizes.scratch(tile, backward=False)):
            pass
        adopted = not has_accumulators and sizes.is_adopted(out, sizes.query, tile.first_query)
        with ledger.holding(partial_of_one_tile=0 if adopted else out + lse):
            if not has_accumulators:
                allocate()
                has_accumulators = True
            if not tile.first_query:
                wide = sizes.wide(lse)  # of the weight; then its cast, or what becomes the new lse
                copy = 0 if wide == lse else lse
                with ledger.holding(merging=wide + max(copy + sizes.cast(out), wide + 2 * copy)):
                    pass
    if not has_accumulators:
        allocate()
    if sizes.is_cast:
        with ledger.holding(copy_in_the_input_dtype=sizes.query):
            pass
    ledger.hold("out", sizes.query)
    with ledger.holding(lse_in_float64=0 if sizes.is_fused else sizes.wide(sizes.lse)):
        ledger.hold("lse", sizes.lse)
    ledger.release("two chunks of keys and values")


def _backward(sizes: _Sizes, ledger: _Ledger) -> None:
    ledger.hold("two chunks of keys and values", 2 * sizes.chunk)
    ledger.hold("delta", sizes.delta)
    gradients = _Gradients(sizes, ledger)
    for tile, is_own in _steps(sizes, ledger):
        if not is_own:
            ledger.hold("two chunks of their gradients", 2 * sizes.summed(sizes.chunk))
        gradients.add_tile(tile, is_own=is_own)
    ledger.hold("two chunks of their gradients", 2 * sizes.summed(sizes.chunk))
    gradients.finish()


class _Gradients:
    """dq, dk and dv as they grow, and the gradients of single tiles that are added to them."""

    def __init__(self, sizes: _Sizes, ledger: _Ledger) -> None:
        self.sizes, self.ledger = sizes, ledger
        self.wholes = {"dq": sizes.query, "dk": sizes.key, "dv": sizes.key}
        self.started: set[str] = set()

    def add_tile(self, tile: Tile, *, is_own: bool) -> None:
        """The kernel runs; then each part is added or adopted."""
        sizes, ledger = self.sizes, self.ledger
        parts = {"dq": sizes.tile_query(tile)} | dict.fromkeys(("dk", "dv"), sizes.tile_key(tile))
        firsts = {"dq": tile.first_query, "dk": tile.first_key, "dv": tile.first_key}
        for _ in range(sizes.num_calls(tile)):
            scratch = sizes.scratch(tile, backward=True) + sizes.dout_copy(tile)
            with ledger.holding(kernel_scratch=scratch, gradients_of_one_tile=sum(parts.values())):
                pass
            ledger.hold("gradients of one tile", sum(parts.values()))
            for name, part in parts.items():
                if name == "dq" or is_own:
                    self._add(name, part, firsts[name], parts)
                else:
                    with ledger.holding(adding=sizes.cast(part)):  # to the gradient of a chunk
                        pass
            ledger.release("gradients of one tile")

    def _add(self, name: str, part: int, is_first: bool, parts: dict[str, int]) -> None:
        sizes, ledger = self.sizes, self.ledger
        if name not in self.started and sizes.is_adopted(part, self.wholes[name], is_first):
            parts[name] = 0
            ledger.hold("gradients of one tile", sum(parts.values()))
        self.started.add(name)
        ledger.hold(name, sizes.summed(self.wholes[name]))
        if not is_first:
            with ledger.holding(adding=sizes.cast(part)):
                pass

    def finish(self) -> None:
        """Each sum is cast to the input's dtype, and goes."""
        for name, whole in self.wholes.items():
            self.ledger.hold(name, self.sizes.summed(whole))
        for name, whole in self.wholes.items():
            with self.ledger.holding(gradient_in_the_input_dtype=whole if self.sizes.is_cast else 0):
                pass
            self.ledger.hold(name, whole)
