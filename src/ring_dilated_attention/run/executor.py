"""Carries out a program (`plan/program.py`) on one rank's tensors.

A tile is a block of queries times keys that the kernel computes in one call. A chunk is the keys and values of one rank
that travel to other ranks.

An example: a forward on the later of two ranks that share a causal segment. `print(program)` shows the steps on the
left. The method with the name of a step carries out the step.

    pack     own chunks of K and V            copy the keys and values that the dilation selects into a buffer
    take     received chunks of K and V       allocate a buffer for the other rank's key and value rows
    post     hop 1, keys and values           both ranks start to send and to receive
    compute  own queries x own chunk          meanwhile the kernel computes a partial, (B, H, M, D) and (B, H, M)
    start    out                              the accumulators out (B, N, H, D) and lse (B, N, H)
    merge    write                            the partial is written into its rows of out and lse
    wait     hop 1, keys and values           the other rank's rows have arrived
    compute  own queries x received chunk     a second partial
    merge    merge                            the second partial is merged with the first, weighted by their lse
    finish   out, lse                         the accumulators are rounded to the dtypes of the results

B batch, N positions, H query heads, G key/value heads, M query rows of a tile, L key rows of a tile, D head dim. In a
tile's tensors B counts every segment of every batch entry.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.contract import BackwardRows, GradientSum, Kernel, TileRows
from ..plan import step as steps
from ..plan.dealing import Dealing
from ..plan.exchange import RankPlan
from ..plan.plan import Plan
from ..plan.program import program_of
from ..plan.rows import Block, Rows
from ..plan.sight import FROM_END, FULL
from ..plan.step import CACHED_ROWS, OWN_ROWS, BufferSlice, CallFacts
from .link_contract import Dealer, Link, Pending
from .merge import merge_
from .views import accumulator_dtype, block_views, folds, rows_view, with_unit_stride


class ExecutorOptions(NamedTuple):
    """The options by which a rank carries out its programs.

    kernel: computes tiles. scale: multiplies the scores. link: sends and receives chunks. dealer: exchanges heads for
    positions between ranks. factor: applied to dq before dq is rounded, because the unscaled dq may overflow float16.
    program: the function that makes the program (the steps) of a stage.
    """

    kernel: Kernel
    scale: float
    link: Link | None = None
    dealer: Dealer | None = None
    factor: float = 1.0
    program: Callable[[Plan, str, CallFacts], Iterable[steps.Step]] = program_of


def forward(
    rank_plan: RankPlan,
    options: ExecutorOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cached: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Compute out (B, N, H, D) and lse (B, N, H) of this rank's queries, given its own rows of query, key and value.

    out has the query's dtype. lse is float32, or float64 if query is float64.

    cached: the keys and the values of a cache, each (B, rows, G, D).
    """
    tensors = {"query": query, "key": key, "value": value}
    if cached:
        tensors["cached key"], tensors["cached value"] = cached

    results = _Executor("forward", rank_plan, options, tensors).carry_out()
    return results["out"], results["lse"]


def backward(
    rank_plan: RankPlan, options: ExecutorOptions, rows: BackwardRows
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq (B, N, H, D), dk and dv (B, N, G, D) of this rank's rows.

    rows: the inputs of backward for this rank's rows. lse and dlse are (B, N, H), key and value (B, N, G, D), and dout,
    query and out (B, N, H, D).
    """
    tensors = {name: x for name, x in rows._asdict().items() if x is not None}
    results = _Executor("backward", rank_plan, options, tensors).carry_out()
    return results["dq"], results["dk"], results["dv"]


# For each accumulator, the input that has the accumulator's shape.
_LIKE = {"out": "query", "dq": "query", "dk": "key", "dv": "value"}


class _Executor:
    """Carries out one stage (forward or backward) of one call. `alive` holds all tensors by their names in the program:

        query, out, dout, dq          (B, N, H, D)
        lse, dlse                     (B, N, H)
        key, value, dk, dv            (B, N, G, D)
        cached key, cached value      (B, rows, G, D)
        buffers of chunks             (units · B · D,)

    If the rank first exchanges heads for positions with a group of ranks (`to_heads`), N is the number of positions of
    the whole group, and H and G count only the heads that this rank got. A unit is B * D elements.
    """

    def __init__(
        self, stage: str, rank_plan: RankPlan, options: ExecutorOptions, tensors: dict[str, Tensor]
    ) -> None:
        self.stage = stage
        self.plan, self.dealing = rank_plan
        self.options = options
        self.kernel = options.kernel
        self.alive = tensors

        query = tensors["query"]
        self.batch = query.shape[0]
        self.head_dim = query.shape[3]
        self.dtype = query.dtype
        self.device = query.device
        self.sum_dtype = accumulator_dtype(query.dtype)

        # `results`: the results of the current tile, by name: out, dq (B, H, M, D), lse (B, H, M), dk and dv
        # (B, G, L, D).
        self.results: dict[str, Tensor] = {}

        # `merging`: the kernel's functions that merge or add the results of many tiles in one pass, or None if the
        # kernel has none. `kept`: the results that these functions have not yet merged or added, by the name of the
        # accumulator.
        self.merging = self.kernel.merging(query)
        self.kept: dict[str, list[TileRows]] = defaultdict(list)

        # `laid_out`: for each of the next tiles, copies of its rows: dout and out (B, H, M, D), lse (B, H, M or more).
        self.laid_out: deque[tuple[Tensor, ...]] = deque()

        # `columns`: the columns of dout and of out that carry dlse, (B, N, H, columns) each; None before rows are laid
        # out, and if lse has no gradient.
        self.columns: tuple[Tensor, Tensor] | None = None

        # `posted`: for each ticket of a `Post` step, the messages that this rank sends and the messages that it
        # receives.
        self.posted: dict[str, tuple[Pending, Pending]] = {}

    def carry_out(self) -> dict[str, Tensor]:
        """Make the program, carry out all its steps, and return `alive`."""
        traits = self.kernel.TRAITS
        itemsize = self.dtype.itemsize
        has_dlse = "dlse" in self.alive

        # `packing` says when rows are copied before the kernel reads them. If it is None, no row is copied. 16-bit rows
        # need no copy if the kernel takes 16-bit rows as they are.
        packing = traits.packing
        if itemsize == 2 and self.kernel.takes_short_rows(self.dtype):
            packing = None

        # `kept_rows`: how many rows of results are kept before one pass merges or adds all of them; None if no results
        # are kept.
        kept_rows = None
        if self.merging is not None:
            kept_rows = traits.kept_bytes // (self.head_dim * itemsize)

        facts = CallFacts(
            rounds_results=self.dtype != self.sum_dtype and packing is None,
            batch=self.batch,
            folds=all(map(folds, self.alive.values())),
            dealing=self.dealing,
            has_dlse=has_dlse,
            packing=packing,
            distances=self.distances(),
            itemsize=itemsize,
            most_rows=traits.most_rows and traits.most_rows(self.head_dim, has_dlse),
            kept_rows=kept_rows,
        )

        for step in self.options.program(self.plan, self.stage, facts):
            method = getattr(self, type(step).__name__.lower())
            method(step)
        return self.alive

    def distances(self) -> tuple[int, int]:
        """Two distances in bytes between neighbouring positions of the tensors that the kernel gets: the distance in
        query, and the smaller of the distances in key and in value.

        If ranks exchange heads for positions, the kernel gets the contiguous tensors that `to_heads` returns.
        """
        itemsize = self.dtype.itemsize
        if self.dealing is not None:
            row = self.head_dim * itemsize
            return self.plan.num_heads * row, self.plan.num_kv_heads * row

        names = ("query", "key", "value")
        query, key, value = (self.alive[name].stride(1) for name in names)
        return query * itemsize, min(key, value) * itemsize

    # The methods from here to `query_heads` return views of the tensors in `alive`, or a range of heads.

    def rows(self, name: str, rows: Rows, entry: int | None = None) -> Tensor:
        """A view of a tile's rows in the tensor `name`: (B, heads, M, D), or (B, heads, M) for lse and dlse."""
        return rows_view(self.alive[name], rows, entry)

    def block(self, buffer: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Two views of a block of a buffer, (B, G, L, D) each: keys and values, or their gradients."""
        return block_views(buffer, block, self.batch, self.head_dim)

    def slice_of(self, where: BufferSlice) -> Tensor:
        """The part of a buffer that holds one message, as a view: (units · B · D,)."""
        unit = self.batch * self.head_dim
        buffer = self.alive[where.name]
        return buffer.narrow(0, where.start * unit, where.message.size * unit)

    def query_heads(self, kv_heads: range) -> range:
        """The query heads that share these key/value heads."""
        ratio = self.plan.num_heads // self.plan.num_kv_heads
        return range(kv_heads.start * ratio, kv_heads.stop * ratio)

    # Each method below carries out the steps of one class: `deal` carries out `Deal` steps, and so on. The first
    # methods exchange tensors between ranks.

    def deal(self, step: steps.Deal) -> None:
        """Exchange the heads of a tensor for positions (`to_heads` below), or positions for heads (`to_positions`)."""
        dealing = self.dealing
        dealer = self.options.dealer
        assert dealing is not None
        assert dealer is not None
        x = self.alive.pop(step.name)
        if step.to_heads:
            x = to_heads(x, dealing, dealer, f"{self.stage}, heads for positions")
        else:
            x = to_positions(x, dealing, dealer, f"{self.stage}, positions for heads")
        self.alive[step.name] = x

    def pack(self, step: steps.Pack) -> None:
        """Copy the key and value rows of this rank's chunks into a new buffer."""
        buffer = self.flat(step.size, self.dtype)
        for rows, block in step.packs:
            key, value = self.block(buffer, block)  # (B, G, L, D) each
            key.copy_(self.rows("key", rows))
            value.copy_(self.rows("value", rows))
        self.alive[step.name] = buffer

    def take(self, step: steps.Take) -> None:
        """Make an unfilled buffer, for messages that are received or for sums of gradients."""
        dtype = self.sum_dtype if step.is_sum else self.dtype
        self.alive[step.name] = self.flat(step.size, dtype)

    def flat(self, size: int, dtype: torch.dtype) -> Tensor:
        """An unfilled buffer of `size` units: (size · B · D,)."""
        num_elements = size * self.batch * self.head_dim
        return torch.empty(num_elements, dtype=dtype, device=self.device)

    def free(self, step: steps.Free) -> None:
        """Drop tensors. A name without a tensor is skipped, since not every rank makes all buffers."""
        for name in step.names:
            self.alive.pop(name, None)

    def post(self, step: steps.Post) -> None:
        """Start to send and to receive messages. The link keeps the tensors alive until all messages have arrived."""
        link = self.options.link
        assert link is not None
        sends = [(self.slice_of(where), where.message) for where in step.sends]
        receives = [(self.slice_of(where), where.message) for where in step.receives]

        if step.is_apart:
            self.posted[step.ticket] = link.carry_apart(sends, receives, step.moment)
        else:
            both = link.carry(sends, receives, step.moment)
            self.posted[step.ticket] = both, both

    def wait(self, step: steps.Wait) -> None:
        """Wait for the messages of a `Post` step: those that this rank sends, those that it receives, or all."""
        sent, received = self.posted[step.ticket]
        if step.sent:
            sent.wait()
        if step.received:
            received.wait()

    def zero(self, step: steps.Zero) -> None:
        """Set the gradient of a chunk to zero, because this rank is the first that adds to it."""
        self.slice_of(step.where).zero_()

    def unpack(self, step: steps.Unpack) -> None:
        """Add the gradient of this rank's chunk, which other ranks have computed, to dk and dv."""
        arrived = self.slice_of(step.where)
        for rows, block in self.plan.packs_of(step.where.message):
            gradients = self.block(arrived, block)  # (B, G, L, D) each
            for name, gradient in zip(("dk", "dv"), gradients, strict=True):
                self.rows(name, rows).add_(gradient)

    # The methods below call the kernel, and make the tensors that the kernel reads.

    def compute(self, step: steps.Compute) -> None:
        """Compute a tile's partial (out, lse) or its gradients (dq, dk, dv), and put them into `results`."""
        tile = step.tile
        scale = self.options.scale
        # FROM_END counts as causal, because `copied` reverses the rows, and a FROM_END mask over reversed rows is
        # causal.
        is_causal = tile.mask != FULL
        if step.what == "partial":
            query = self.tile_rows(step, "query", tile.query)  # (B, H, M, D)
            key, value = self.keys(step)  # (B, G, L, D)
            out, lse = self.kernel.forward(query, key, value, is_causal, scale)
            self.results = {"out": out, "lse": lse}
        else:
            rows = self.backward_rows(step)
            dq, dk, dv = self.kernel.backward(rows, is_causal, scale)
            self.results = {"dq": dq, "dk": dk, "dv": dv}

        # Put the rows of the results (dim 2) back in their order, if `copied` has reversed the rows of the inputs.
        if tile.mask == FROM_END:
            self.results = {name: result.flip(2) for name, result in self.results.items()}

    def tile_rows(self, step: steps.Compute, name: str, rows: Rows) -> Tensor:
        """Rows of a tile in a tensor, as the kernel reads them: (B, heads, M, D), or (B, heads, M) in lse and dlse."""
        return self.copied(step, name, rows_view(self.alive[name], rows, step.entry))

    def keys(self, step: steps.Compute) -> tuple[Tensor, Tensor]:
        """Keys and values of a tile, (B, G, L, D) each: from this rank's tensors, a cache or a chunk."""
        tile = step.tile
        if step.keys in (OWN_ROWS, CACHED_ROWS):
            assert isinstance(tile.key, Rows)
            prefix = "" if step.keys == OWN_ROWS else "cached "
            key = self.tile_rows(step, prefix + "key", tile.key)
            return key, self.tile_rows(step, prefix + "value", tile.key)

        # Read the keys from a block of a received chunk, or of this rank's own chunk (`packed`).
        block = tile.key if isinstance(tile.key, Block) else tile.packed
        assert block is not None
        key, value = self.block(self.alive[step.keys], block)
        return self.copied(step, "key", key), self.copied(step, "value", value)

    def copied(self, step: steps.Compute, name: str, rows: Tensor) -> Tensor:
        """The rows as the kernel reads them: reversed if the mask is FROM_END, and copied if `step.copied` contains
        `name`.

        Reversed rows are always a copy.
        """
        if step.tile.mask == FROM_END:
            rows = with_unit_stride(rows.flip(2))
        if name not in step.copied:
            return rows
        return rows.new_empty(rows.shape, dtype=self.sum_dtype).copy_(rows)

    def backward_rows(self, step: steps.Compute) -> BackwardRows:
        """The inputs of the kernel's backward for a tile."""
        rows = step.tile.query
        dlse = self.tile_rows(step, "dlse", rows) if "dlse" in self.alive else None  # (B, H, M)
        query = self.tile_rows(step, "query", rows)  # (B, H, M, D)

        if not self.laid_out:
            dout, out, lse = (self.tile_rows(step, name, rows) for name in ("dout", "out", "lse"))
        else:
            dout, out, lse = self.laid_out.popleft()
            if step.tile.mask == FROM_END:
                dout = dout.flip(2)
                out = out.flip(2)
                # Reverse only the tile's rows of lse, because rows of padding must stay at the end.
                its_lse, padding = lse[..., : rows.num_rows], lse[..., rows.num_rows :]
                lse = torch.cat((its_lse.flip(2), padding), dim=2)

        key, value = self.keys(step)  # (B, G, L, D)
        return BackwardRows(dout, dlse, query, key, value, out, lse)

    def copy(self, step: steps.Copy) -> None:
        """For each tile of the step, copy the tile's rows of dout, out and lse to new tensors in `laid_out`.

        dout and out are (B, H, M, D or more), and all heads of a position lie side by side in memory. lse is
        (B, H, M or more).
        """
        assert self.merging is not None
        dout_BNHD = self.alive["dout"]
        out_BNHD = self.alive["out"]
        lse_BNH = self.alive["lse"]
        if "dlse" in self.alive:
            dlse_BNH = self.alive.pop("dlse")
            self.columns = self.merging.dlse_columns(dlse_BNH, out_BNHD)

        width = self.head_dim
        if self.columns is not None:
            width += self.columns[0].shape[-1]

        multiple = self.merging.lse_multiple
        shapes = []  # of each tile's lse
        for tile, entry in step.calls:
            rows = tile.query
            batch = rows.segments * (self.batch if entry is None else 1)
            shapes.append((batch, len(rows.heads), rows.num_rows + -rows.num_rows % multiple))

        tiles: list[TileRows] = []
        for (tile, entry), lse in zip(step.calls, _full_of_inf(shapes, lse_BNH), strict=True):
            rows = tile.query
            batch, num_heads, _ = lse.shape
            row = num_heads * width
            size = rows.num_rows * row
            shape = (2, batch, num_heads, rows.num_rows, width)
            strides = (batch * size, size, width, row, 1)
            dout, out = out_BNHD.new_empty_strided(shape, strides).unbind()
            self.laid_out.append((dout, out, lse))
            tiles.append(TileRows(rows, entry, (dout, out, lse)))

        heads = self.query_heads(step.kv_heads)
        if self.columns is not None:
            columns = [tile.with_columns(self.head_dim, width) for tile in tiles]
            self.merging.lay_out(*self.columns, lse_BNH, columns, heads)
            tiles = [tile.with_columns(0, self.head_dim) for tile in tiles]
        self.merging.lay_out(dout_BNHD, out_BNHD, lse_BNH, tiles, heads)

    # The methods below make the accumulators (out, lse, dq, dk, dv), and write, merge or add the results of tiles to
    # them.

    def start(self, step: steps.Start) -> None:
        """Make an accumulator of zeros, or of -inf for lse. If tiles write every row before any row is read, leave the
        accumulator unfilled."""
        like = self.alive[_LIKE[step.name]]
        make = torch.empty if step.is_covered else torch.zeros
        dtype = self.dtype if step.is_result else self.sum_dtype
        self.alive[step.name] = make(like.shape, dtype=dtype, device=self.device)

        if step.name == "out":
            # Keep lse in float64 until `finish`, because each merge rounds lse. In float32, 700 merges made gradients
            # wrong by 7e-6.
            dtype = self.sum_dtype if step.is_result else torch.float64
            lse = torch.empty(like.shape[:3], dtype=dtype, device=self.device)  # (B, N, H)
            if not step.is_covered:
                lse.fill_(-torch.inf)
            self.alive["lse"] = lse

    def merge(self, step: steps.Merge) -> None:
        """Merge a tile's partial into out and lse, in the way that `step.how` names."""
        partial_out = self.results.pop("out")  # (B, H, M, D)
        partial_lse = self.results.pop("lse")  # (B, H, M)
        if step.how == "keep":
            partial = TileRows(step.tile.query, step.entry, (partial_out, partial_lse))
            self.kept["out"].append(partial)
            return

        if step.how == "adopt":
            self.adopt("out", partial_out)
            # Always make a copy, because later tiles are merged into this tensor in place, and the kernel's own tensor
            # must not change.
            lse = partial_lse.transpose(1, 2).to(  # (B, M, H)
                torch.float64, copy=True, memory_format=torch.contiguous_format
            )
            self.alive["lse"] = lse.view(self.alive["query"].shape[:3])
            return

        out = self.rows("out", step.tile.query, step.entry)
        lse = self.rows("lse", step.tile.query, step.entry)
        if step.how == "write":
            out.copy_(partial_out)
            lse.copy_(partial_lse)
        else:
            merge_(out, lse, partial_out, partial_lse)

    def add(self, step: steps.Add) -> None:
        """Add a tile's gradient to dq, dk or dv, or to the sums of a chunk, in the way that `step.how` names."""
        result = self.results.pop(step.name)  # (B, H, M, D) or (B, G, L, D)
        if step.how == "adopt":
            self.adopt(step.name, result)
            return

        # `rows`: the rows of query (for dq), or of key and value (for dk and dv), to which the gradient belongs.
        rows = step.tile.query if step.name == "dq" else step.tile.key
        if step.how == "keep":
            assert isinstance(rows, Rows)
            self.kept[step.name].append(TileRows(rows, step.entry, (result,)))
            return

        if isinstance(rows, Rows):
            total = self.rows(step.name, rows, step.entry)
        else:
            # Find dk and dv in the buffer `step.sums`: dk lies where the chunk has the keys, dv where the chunk has the
            # values.
            dk, dv = self.block(self.alive[step.sums], rows)
            total = dk if step.name == "dk" else dv

        if step.how == "write":
            total.copy_(result)
        else:
            total.add_(result)

    def adopt(self, name: str, result_BHMD: Tensor) -> None:
        """Use the result of a tile as the accumulator. The tile must have all rows.

        The result is copied if it is not contiguous, for two reasons. Later tiles are added through views of the
        accumulator. And a custom op's outputs must have the strides that its fake function returns.
        """
        shape = self.alive[_LIKE[name]].shape
        self.alive[name] = result_BHMD.transpose(1, 2).contiguous().view(shape)

    def gather(self, step: steps.Gather) -> None:
        """Merge all kept partials into out and lse, or add all kept gradients to dq, dk and dv, for some heads."""
        assert self.merging is not None
        heads = self.query_heads(step.kv_heads)
        if step.names == ("out",):
            partials = self.kept.pop("out", [])
            self.merging.merge(
                self.alive["out"], self.alive["lse"], partials, heads, adds=step.adds
            )
            return

        sums: list[GradientSum] = []
        for name in step.names:
            gradients = self.kept.pop(name, [])
            heads_of_sum = heads if name == "dq" else step.kv_heads
            sums.append(GradientSum(self.alive[name], gradients, heads_of_sum))
        # If there are hops, do not multiply dq here, because later hops still add gradients to dq. `finish` then
        # multiplies dq by `options.factor`.
        factor = 1.0 if self.plan.hops else self.options.factor
        self.merging.add(sums, factor, adds=step.adds)

    def finish(self, step: steps.Finish) -> None:
        """Round an accumulator to the dtype of the result."""
        if step.name == "dq" and self.options.factor != 1:
            # Apply the factor before dq is rounded below: the unscaled dq may overflow float16.
            self.alive["dq"].mul_(self.options.factor)

        dtype = self.sum_dtype if step.name == "lse" else self.dtype
        self.alive[step.name] = self.alive[step.name].to(dtype)


def _full_of_inf(shapes: Sequence[tuple[int, int, int]], like: Tensor) -> Iterator[Tensor]:
    """Tensors (B, H, M) full of inf. A kernel reads lse in blocks of `Merging.lse_multiple` rows. Rows that are not
    written stay inf, for which exp(score - lse) is 0.

    The tensors are views of one tensor, so that one kernel fills all of them.
    """
    starts = [0]
    for shape in shapes:
        size = math.prod(shape)
        starts.append(starts[-1] + size + -size % 32)  # each begins at a multiple of 128 bytes
    whole = like.new_full(starts[-1:], torch.inf)
    for (batch, num_heads, num_rows), start in zip(shapes, starts, strict=False):
        strides = (num_heads * num_rows, num_rows, 1)
        yield whole.as_strided((batch, num_heads, num_rows), strides, start)


def to_heads(x_BNHD: Tensor, dealing: Dealing, dealer: Dealer, moment: str) -> Tensor:
    """Exchange heads for positions within a group of p ranks (plan/dealing.py).

    The argument is (B, N, H, D): all H heads of this rank's N positions. The result is (B, T, h, D): h = H / p heads of
    the group's T positions, in sequence order. If the tensor is lse or dlse, argument and result have no dim D. In the
    comments, n is the number of positions of another rank of the group. moment: the text by which an error refers to
    this exchange.

    An example: two ranks own two positions each, with two heads. "1.3" is the row of head 1 at position 3:

                    rank 0                    rank 1
        before      0.0 1.0   0.1 1.1         0.2 1.2   0.3 1.3
        after       0.0 0.1 0.2 0.3           1.0 1.1 1.2 1.3
    """
    batch, _, num_heads, *dims = x_BNHD.shape
    share = num_heads // dealing.size

    # `leaving[i]`: the tensor that this rank sends to rank i of the group, (B · N · h · D,). It has this rank's
    # positions and the heads that rank i computes.
    leaving = [x.flatten() for x in x_BNHD.split(share, dim=2)]
    sizes = [batch * length * share * math.prod(dims) for length in dealing.lengths]
    received = dealer.all_to_all_single(leaving, sizes, x_BNHD, moment)
    del leaving  # Free this memory now, because the results need the same amount.

    # `rows_of_place[i]`: the tensor received from rank i of the group, (B, n, h, D). It has the positions of rank i and
    # the heads that this rank computes.
    rows_of_place = [
        x.view(batch, length, share, *dims)
        for x, length in zip(received, dealing.lengths, strict=True)
    ]

    # Start with an empty tensor, because `cat` needs at least one tensor, and a group may own no positions.
    in_order = [rows_of_place[0][:, :0]]
    for place, first, num_rows in dealing.runs:
        in_order.append(rows_of_place[place].narrow(1, first, num_rows))
    return torch.cat(in_order, dim=1)


def to_positions(x_BThD: Tensor, dealing: Dealing, dealer: Dealer, moment: str) -> Tensor:
    """The inverse of `to_heads`. The argument is (B, T, h, D): some heads of all the group's positions. The result is
    (B, N, H, D): all heads of this rank's positions."""
    batch, _, share, *dims = x_BThD.shape
    runs = x_BThD.split([num_rows for _, _, num_rows in dealing.runs], dim=1)

    # `rows_of_place[i]`: the rows of the positions that rank i of the group owns, a list of tensors (B, rows, h, D),
    # one for each run of consecutive positions. An empty tensor comes first, so that the list is never empty.
    rows_of_place = [[x_BThD[:, :0]] for _ in dealing.lengths]
    for (place, _, _), rows in zip(dealing.runs, runs, strict=True):
        rows_of_place[place].append(rows)

    # `leaving[i]`: the tensor that this rank sends to rank i of the group, (B · n · h · D,). It has the positions of
    # rank i and the heads that this rank computed.
    leaving = [torch.cat(rows, dim=1).flatten() for rows in rows_of_place]
    num_own = dealing.lengths[dealing.place]
    sizes = [batch * num_own * share * math.prod(dims)] * dealing.size
    received = dealer.all_to_all_single(leaving, sizes, x_BThD, moment)
    del leaving

    # `heads_of_place[i]`: the tensor received from rank i of the group, (B, N, h, D). It has this rank's positions and
    # the heads that rank i computed.
    heads_of_place = [x.view(batch, num_own, share, *dims) for x in received]
    return torch.cat(heads_of_place, dim=2)
