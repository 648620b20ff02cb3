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

OWN_ROWS = "own rows"  # a tile reads its keys from the tensor "key", not from a buffer
CACHED_ROWS = "cached rows"
OWN_CHUNKS, RECEIVED = BUFFERS = ("own chunks of K and V", "received chunks of K and V")
ROW_BLOCK = 128  # `Traits.most_rows` counts rows in blocks of this size
GRADIENTS = ("dK and dV of received chunks", "dK and dV that arrive")
STAGES = ("forward", "backward")


class Packing(NamedTuple):
    """Which rows a kernel reads from copies, in which the rows lie side by side.
    Rows of 16 bits are copied to float32, so that a tile's results are not rounded, except if the keys are cached rows.
    Other rows are copied only where that is faster: in a forward, if they lie `distance` bytes apart or more, and if
    each head of a segment has at least num_bytes / itemsize query rows in the tile, and as many key rows."""

    distance: int
    num_bytes: int
    # The most rows that are copied at a time. A larger tile is split by heads and segments. If one head of one segment
    # has more rows than max_rows, they are copied only if they have 16 bits.
    max_rows: int


class CallFacts(NamedTuple):
    """The facts of a call on which its program depends, beside the plan. packing is a trait of the kernel."""

    rounds_results: bool = False  # a tile's results have 16 bits, and its accumulators are float32
    batch: int = 1
    # one stride steps through batch entries and segments; if not, a tile of several segments takes a call per entry
    folds: bool = True
    dealing: Dealing | None = None  # how heads are dealt before and after
    has_dlse: bool = False  # lse has a gradient (backward)
    packing: Packing | None = None
    # bytes from one position to the next in query, and in key and value
    distances: tuple[int, int] = (0, 0)
    itemsize: int = 4  # bytes of an element of query, key and value
    most_rows: int | None = None  # the most rows of a call in backward (`Traits.most_rows`)
    # How many rows (of one head) of tiles' results are kept until one pass over the rows gathers them. None: each
    # result is merged or added as soon as it is computed.
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
    """Exchange a tensor between ranks. to_heads: a rank gives its positions of all heads, and gets all positions of its
    own heads. Not to_heads: the way back."""

    name: str
    to_heads: bool


class Pack(NamedTuple):
    """Copy into a new buffer, without gaps, this rank's key and value rows that the dilation selects."""

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
    """Where a message lies: in the buffer `name`, from `start` on."""

    name: str
    start: int
    message: Message

    def __str__(self) -> str:
        return f"rank {self.message.peer}: {self.message.size} units at {self.start} of {self.name}"


class Post(NamedTuple):
    """Start to send and to receive."""

    ticket: str  # names the post in its `Wait`
    moment: str  # names the post in an error
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
    """Make an accumulator; "out" means out and lse. is_covered: every row is written before anything is added to it, so
    the accumulator is not filled. is_result: the accumulator is written only once, so it has the dtype of the result.
    """

    name: str
    is_covered: bool
    is_result: bool = False


class Compute(NamedTuple):
    """Run the kernel on a tile."""

    tile: Tile
    entry: int | None  # the batch entry, or None for all at once
    what: str  # "partial" (out and lse) or "gradients" (dq, dk and dv)
    keys: str  # the buffer that holds the keys and values, or OWN_ROWS, or CACHED_ROWS
    # tensors whose rows the kernel reads from copies, side by side and in the accumulators' dtype
    copied: tuple[str, ...] = ()


class Copy(NamedTuple):
    """Copy each tile's rows of dout, out and lse to tensors of its own, which the next `Compute` steps read."""

    calls: tuple[tuple[Tile, int | None], ...]  # tiles, each with its batch entry as in `Compute`
    kv_heads: range


class Merge(NamedTuple):
    """Merge a tile's partial into out and lse. how: "adopt" it as the accumulator, "write" it, "merge" it, or "keep" it
    until it is gathered."""

    tile: Tile
    entry: int | None
    how: str


class Add(NamedTuple):
    """Add a tile's gradient to dq, dk or dv, or to the buffer `sums` of chunks' gradients. how: "adopt", "write", "add"
    or "keep", as in `Merge`."""

    name: str
    tile: Tile
    entry: int | None
    how: str
    sums: str = OWN_ROWS


class Gather(NamedTuple):
    """Merge all kept partials, or add all kept gradients, in one pass over the rows of these heads. "out" means out and
    lse. adds: the accumulators hold earlier results, which must not be lost."""

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

    # (query, key, dout or None, threads) -> bytes that a call of the kernel allocates beside its results, and frees.
    scratch: Callable[[Any, Any, Any, int], int]
    # which rows the kernel reads from copies; None if it needs none
    packing: Packing | None = None
    # (head dim, whether lse has a gradient) -> the most query rows, over all heads and segments, in a call of backward.
    # The rows of each head of a segment are rounded up to a multiple of ROW_BLOCK. None: there is no limit.
    most_rows: Callable[[int, bool], int] | None = None
    # the most bytes of results that are kept at a time, if results are kept (`Kernel.merging`)
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
