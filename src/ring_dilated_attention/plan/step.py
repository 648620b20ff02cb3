"""The steps of a rank's program, and the facts of a call on which a program depends. No torch.

Steps name tensors: "query", "key", "value", "out", "lse", the gradients "dout", "dlse", "dq", "dk", "dv", the buffers
of chunks below, and the memory of a cache, "cached key" and "cached value" (B, rows, G, D). Sizes of buffers are in
units of B * D elements.

A *tile* is one kernel call: a block of queries times keys. Its *partial* is out and lse over the tile's keys only. A
*chunk* is the keys and values of one rank that travel to other ranks. An *accumulator* is out, lse, dq, dk or dv while
tiles are merged or added into it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .dealing import Dealing
from .plan import Message, Tile
from .rows import Block, Rows

OWN_ROWS = "own rows"  # a tile reads its keys from the tensor "key", not from a buffer
CACHED_ROWS = "cached rows"  # a tile reads its keys from the memory of a cache
OWN_CHUNKS, RECEIVED = BUFFERS = ("own chunks of K and V", "received chunks of K and V")
# A number of rows is rounded up to a multiple of ROW_BLOCK before it is compared with `Traits.most_rows`.
ROW_BLOCK = 128
GRADIENTS = ("dK and dV of received chunks", "dK and dV that arrive")
STAGES = ("forward", "backward")


class Packing(NamedTuple):
    """When rows are copied before a kernel reads them. In a copy the rows lie side by side in memory.

    Inputs of 16 bits are always copied, to float32. So the results of a tile are float32 too and are not rounded. (In a
    tile with rows of a cache nothing is copied.)

    Inputs of 32 or 64 bits are copied only in forward, and only if copying is faster. Copying is faster if the rows
    lie at least `distance` bytes apart, and if each head of a segment has at least num_bytes / itemsize query rows and
    at least num_bytes / itemsize key rows in the tile.
    """

    distance: int
    num_bytes: int
    # The most rows that are copied at a time. A larger tile is split along heads and segments. If a single head of a
    # single segment has more rows, these rows are copied only if their elements have 16 bits.
    max_rows: int


class CallFacts(NamedTuple):
    """The facts of a call that determine its program, together with the plan and the stage."""

    rounds_results: bool = False  # whether results of tiles have 16 bits, unlike accumulators
    batch: int = 1
    # Whether each batch entry begins in memory where the previous entry ends. If so, one kernel call computes a tile
    # for the whole batch. If not, a tile that covers more than one segment needs a call for each batch entry.
    folds: bool = True
    # how ranks deal heads (exchange heads for positions) before and after the attention; None if heads are not dealt
    dealing: Dealing | None = None
    has_dlse: bool = False  # whether lse has a gradient in backward
    packing: Packing | None = None  # a trait of the kernel (`Traits.packing`)
    # bytes from one position to the next: (in query, in key and value)
    distances: tuple[int, int] = (0, 0)
    itemsize: int = 4  # bytes of an element of query, key and value
    most_rows: int | None = None  # the most query rows of a call in backward (`Traits.most_rows`)
    # How many rows of results (of D elements each) are kept, before one pass merges or adds all of them. None:
    # each result is merged or added as soon as it is computed.
    kept_rows: int | None = None


class Sizes(NamedTuple):
    """The sizes from which numbers of bytes are computed.

    itemsize: bytes of an element of query, key and value.
    num_threads: the threads of a CPU kernel, each of which needs scratch memory.
    """

    batch: int
    head_dim: int
    itemsize: int
    num_threads: int = 1

    @property
    def sum_itemsize(self) -> int:
        """Bytes of an element of an accumulator."""
        return max(self.itemsize, 4)

    @property
    def unit(self) -> int:
        """The number of elements in a unit, B * D. Plans count sizes in units."""
        return self.batch * self.head_dim


class Deal(NamedTuple):
    """Exchange a tensor between ranks.

    to_heads: True if the rank gives all heads of its own positions, and gets some heads of all positions. False for the
    way back.
    """

    name: str
    to_heads: bool


class Pack(NamedTuple):
    """Copy some of this rank's key and value rows (`packs`) into a new buffer, without gaps."""

    name: str
    size: int
    packs: tuple[tuple[Rows, Block], ...]


class Take(NamedTuple):
    """Allocate an unfilled buffer. is_sum: whether the buffer has the dtype of accumulators. If not, it has the dtype
    of query, key and value."""

    name: str
    size: int
    is_sum: bool


class Free(NamedTuple):
    """Drop tensors, so that their memory can be used again."""

    names: tuple[str, ...]


class BufferSlice(NamedTuple):
    """The place of a message in memory: the buffer `name`, from unit `start` on."""

    name: str
    start: int
    message: Message

    def __str__(self) -> str:
        return f"rank {self.message.peer}: {self.message.size} units at {self.start} of {self.name}"


class Post(NamedTuple):
    """Start to send and to receive messages."""

    ticket: str  # the name by which a `Wait` refers to this post
    moment: str  # the text by which an error refers to this post
    sends: tuple[BufferSlice, ...]
    receives: tuple[BufferSlice, ...]
    # whether the program waits for sent messages and for received messages in separate steps
    is_apart: bool = False


class Wait(NamedTuple):
    """Wait until the messages of a post have been sent, have been received, or both. A second wait does nothing."""

    ticket: str
    sent: bool = True
    received: bool = True


class Zero(NamedTuple):
    """Set a slice of a buffer to zero, before a chunk's gradients are added up there."""

    where: BufferSlice


class Start(NamedTuple):
    """Make an accumulator. The name "out" means both out and lse.

    is_covered: whether every row is written before anything is added to it. If not, the rows start as 0 (lse: -inf).
    is_result: whether the accumulator is written only once. If so, it has the dtype of the result.
    """

    name: str
    is_covered: bool
    is_result: bool = False


class Compute(NamedTuple):
    """Run the kernel on a tile."""

    tile: Tile
    entry: int | None  # the batch entry, or None for all batch entries in one call
    what: str  # "partial" (out and lse) or "gradients" (dq, dk and dv)
    keys: str  # the buffer that holds the keys and values, or OWN_ROWS, or CACHED_ROWS
    # The names of the tensors whose rows are copied before the kernel reads them. In the copies the rows lie side by
    # side and have the accumulators' dtype.
    copied: tuple[str, ...] = ()


class Copy(NamedTuple):
    """For each tile, copy its rows of dout, out and lse to new tensors. The next `Compute` steps read these."""

    calls: tuple[tuple[Tile, int | None], ...]  # (tile, batch entry or None), as in `Compute`
    kv_heads: range


class Merge(NamedTuple):
    """Merge the partial of the last computed tile into the accumulators out and lse. how:

    adopt       the partial has all rows, and becomes the accumulator
    write       the partial is written, because its rows of the accumulators have no results yet
    merge       the partial is merged with the results that its rows of the accumulators have
    keep        the partial is kept until a `Gather` step
    """

    tile: Tile
    entry: int | None
    how: str


class Add(NamedTuple):
    """Add a gradient of the last computed tile to dq, dk or dv, or to the buffer `sums` of chunks' gradients.

    how: "adopt", "write", "add" or "keep", as in `Merge`.
    """

    name: str
    tile: Tile
    entry: int | None
    how: str
    sums: str = OWN_ROWS


class Gather(NamedTuple):
    """Merge all kept partials, or add all kept gradients, in one pass over the rows of some heads.

    names: the accumulators; "out" means both out and lse. adds: whether the accumulators already hold results, to which
    the kept results are added.
    """

    names: tuple[str, ...]
    kv_heads: range
    adds: bool


class Unpack(NamedTuple):
    """Add the finished gradient of this rank's chunk to dk and dv, in the rows from which the chunk was packed."""

    where: BufferSlice


class Finish(NamedTuple):
    """Round an accumulator to the dtype of the result. For out and gradients this is the dtype of query.

    For lse it is float32, or float64 if the inputs are float64.
    """

    name: str


class Traits(NamedTuple):
    """The traits of a kernel on which programs and memory depend."""

    # (query, key, dout or None, threads) -> the bytes of scratch memory that a call of the kernel allocates and frees.
    scratch: Callable[[Any, Any, Any, int], int]
    # when rows are copied before the kernel reads them; None means never
    packing: Packing | None = None
    # (head dim, whether lse has a gradient) -> the most query rows in a call of backward, summed over heads and
    # segments. For this sum the rows of each head in a segment are rounded up to a multiple of ROW_BLOCK. None: no
    # limit.
    most_rows: Callable[[int, bool], int] | None = None
    # For a kernel that merges the results of many tiles at once (`Kernel.merging`): the most bytes of results that are
    # kept.
    kept_bytes: int = 2**29


Step = (
    Deal | Pack | Take | Free | Post | Wait | Zero | Unpack  # exchange
    | Start | Copy | Compute | Merge | Add | Gather | Finish  # compute
)  # fmt: skip


def text_of(step: Step) -> str:
    """A step as a line of text."""
    entry = getattr(step, "entry", None)
    of = "" if entry is None else f", batch entry {entry}"
    match step:
        case Pack(name, size, packs):
            text = f"{name}, {size} units: {'; '.join(str(rows) for rows, _ in packs)}"
        case Take(name, size):
            text = f"{name}, {size} units"
        case Free(names):
            text = ", ".join(names)
        case Post(ticket, _, sends, receives):
            text = "; ".join(
                [ticket, *(f"to {x}" for x in sends), *(f"from {x}" for x in receives)]
            )
        case Wait(ticket, sent, received):
            text = ticket
            if not received:
                text += ": what is sent"
            elif not sent:
                text += ": what comes"
        case Compute(tile, _, what, keys, copied):
            copies = f", copied: {' '.join(copied)}" if copied else ""
            text = f"{what}: {tile}, from {keys}{of}{copies}"
        case Merge(tile, _, how):
            text = f"{tile.query}{of}: {how}"
        case Add(name, tile, _, how, sums):
            where = "" if sums == OWN_ROWS else f" of {sums}"
            text = f"{name} of {tile.query if name == 'dq' else tile.key}{where}{of}: {how}"
        case Copy(calls, kv_heads):
            text = (
                f"dout, out and lse of {len(calls)} tiles of key/value heads {_few_heads(kv_heads)}"
            )
        case Gather(names, kv_heads, adds):
            into = ", added to what is there" if adds else ""
            text = f"{', '.join(names)} of key/value heads {_few_heads(kv_heads)}{into}"
        case Deal(name, to_heads):
            text = f"{name}: {'heads for positions' if to_heads else 'positions for heads'}"
        case Zero(where) | Unpack(where):
            text = f"{where.message.size} units at {where.start} of {where.name}"
        case _:
            text = ", ".join(str(value) for value in step if not isinstance(value, bool | None))
    return f"{type(step).__name__.lower():8}{text}".rstrip()


def _few_heads(heads: range) -> str:
    return f"{heads[0]}" if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"
