"""The steps of a rank's program, and the facts of a call on which a program depends. No torch.

Steps name tensors: "query", "key", "value", "out", "lse", the gradients "dout", "dlse", "dq", "dk", "dv", the buffers
of chunks below, and the memory of a cache, "cached key" and "cached value" (B, rows, G, D). Sizes of buffers are in
units of B * D elements.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .dealing import Dealing
from .plan import Message, Tile
from .rows import Block, Rows

OWN_ROWS = "own rows"  # where a tile reads keys that are in no buffer
CACHED_ROWS = "cached rows"
OWN_CHUNKS, RECEIVED = BUFFERS = ("own chunks of K and V", "received chunks of K and V")
ROW_BLOCK = 128  # of `Traits.most_rows`
GRADIENTS = ("dK and dV of received chunks", "dK and dV that arrive")
STAGES = ("forward", "backward")


class Packing(NamedTuple):
    """Which tiles a kernel computes from copies, in which the rows lie side by side.
    16-bit rows are copied to float32, so that no tile's results are rounded; but not those of a cache.
    Other rows are copied in a forward, where that is faster: if they lie `distance` bytes apart or more, and a tile has
    at least num_bytes / itemsize of them, of queries and of keys."""

    distance: int
    num_bytes: int
    # Rows copied at a time. A larger tile is split by heads and segments. If one head of one segment has more rows than
    # that, they are copied only if they have 16 bits.
    max_rows: int


class CallFacts(NamedTuple):
    """The facts of a call on which its program depends, beside the plan. packing is a trait of the kernel."""

    rounds_results: bool = False  # a tile's results have 16 bits, and its accumulators are float32
    batch: int = 1
    folds: bool = True  # one stride steps through batch and segments; else several segments take a call per batch entry
    dealing: Dealing | None = None  # how heads are dealt before and after
    has_dlse: bool = False  # lse has a gradient (backward)
    packing: Packing | None = None
    # bytes from one position to the next in query, and in key and value
    distances: tuple[int, int] = (0, 0)
    itemsize: int = 4  # bytes of an element of these
    most_rows: int | None = None  # of a call in backward, as `Traits.most_rows` counts them
    # Results of tiles are kept, and then gathered in one pass over the rows: so many rows of one head at a time. None:
    # each result is merged or added at once.
    kept_rows: int | None = None


class Sizes(NamedTuple):
    """itemsize: bytes of an element of query, key and value. num_threads: CPU kernel threads, each with scratch."""

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
        """Elements of one unit of a plan's sizes."""
        return self.batch * self.head_dim


class Deal(NamedTuple):
    """Exchange own positions of all heads of a tensor for all positions of this rank's heads (to_heads), or back."""

    name: str
    to_heads: bool


class Pack(NamedTuple):
    """Make a buffer of own key/value rows, dilated, side by side."""

    name: str
    size: int
    packs: tuple[tuple[Rows, Block], ...]


class Take(NamedTuple):
    """Allocate an unfilled buffer. is_sum: the buffer has the accumulators' dtype."""

    name: str
    size: int
    is_sum: bool


class Free(NamedTuple):
    """Drop tensors, so that their memory can be used again."""

    names: tuple[str, ...]


class BufferSlice(NamedTuple):
    """A message, which lies in the buffer `name` from `start` on."""

    name: str
    start: int
    message: Message

    def __str__(self) -> str:
        return f"rank {self.message.peer}: {self.message.size} units at {self.start} of {self.name}"


class Post(NamedTuple):
    """Start to send and to receive."""

    ticket: str  # names the post in its `Wait`
    moment: str  # names it in an error
    sends: tuple[BufferSlice, ...]
    receives: tuple[BufferSlice, ...]
    is_apart: bool = False  # sends and receives have a `Wait` each


class Wait(NamedTuple):
    """Wait until a post has sent, has received, or both. A second wait returns at once."""

    ticket: str
    sent: bool = True
    received: bool = True


class Zero(NamedTuple):
    """Set the sums in a slice of a buffer to zero."""

    where: BufferSlice


class Start(NamedTuple):
    """Make an accumulator; "out" means out and lse. is_covered: first tiles write all rows, so it is not filled.
    is_result: it has the dtype of the result, since it is written once."""

    name: str
    is_covered: bool
    is_result: bool = False


class Compute(NamedTuple):
    """Run the kernel on a tile."""

    tile: Tile
    entry: int | None  # the batch entry, or None for all at once
    what: str  # "partial" (out and lse) or "gradients" (dq, dk and dv)
    keys: str  # the buffer that holds the keys and values, or OWN_ROWS, or CACHED_ROWS
    # the kernel reads copies of these tensors' rows, side by side in the sums' dtype
    copied: tuple[str, ...] = ()


class Copy(NamedTuple):
    """Copy the rows of dout, out and lse that the next gradients read: for each tile side by side."""

    calls: tuple[tuple[Tile, int | None], ...]  # tiles, each with its batch entry as in `Compute`
    kv_heads: range


class Merge(NamedTuple):
    """Merge a tile's partial into out and lse. how: "adopt" it as the accumulator, "write" it, "merge" it, or "keep" it
    until it is gathered."""

    tile: Tile
    entry: int | None
    how: str


class Add(NamedTuple):
    """Add a tile's gradient to dq, dk or dv, or to a buffer of chunks' gradients. how: "adopt", "write", "add" or
    "keep"."""

    name: str
    tile: Tile
    entry: int | None
    how: str
    sums: str = OWN_ROWS


class Gather(NamedTuple):
    """Merge all kept partials, or add all kept gradients, in one pass over the rows of these heads. "out" means out and
    lse. adds: the accumulators hold something already."""

    names: tuple[str, ...]
    kv_heads: range
    adds: bool


class Unpack(NamedTuple):
    """Add the finished gradient of an own chunk to the rows of dk and dv that the chunk was packed from."""

    where: BufferSlice


class Finish(NamedTuple):
    """Turn an accumulator into a result: out and gradients in the input's dtype, lse in float32 or float64."""

    name: str


class Traits(NamedTuple):
    """The traits of a kernel on which programs and memory depend."""

    # (query, key, dout or None, threads) -> bytes that a kernel's call takes and frees beside its results.
    scratch: Callable[[Any, Any, Any, int], int]
    # the tiles whose rows are first copied side by side; None if no tile's are
    packing: Packing | None = None
    # (head dim, whether lse has a gradient) -> the most rows of query heads in a call of backward, where each head of a
    # segment counts a whole number of ROW_BLOCKs. None: there is no limit.
    most_rows: Callable[[int, bool], int] | None = None
    # the most bytes of results that are kept at a time, where they are
    kept_bytes: int = 2**29


Step = (
    Deal | Pack | Take | Free | Post | Wait | Zero | Unpack  # exchange
    | Start | Copy | Compute | Merge | Add | Gather | Finish  # compute
)  # fmt: skip


def text_of(step: Step) -> str:
    """A step in a line."""
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
