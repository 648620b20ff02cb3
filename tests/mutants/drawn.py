"""Mutants that cosmic-ray drew, with the idea that each breaks:

    python tests/mutants/draw.py 7 plan:12 run:6 ranks:9 kernels:4 attention:3 layers:3 simulate:3

Those that change no result are left out:

- plan/window_maker.py, `portion.piece.start <= portion.document.start`: a portion is cut to its document, so it cannot
  begin before.
- ranks/link.py, `known[: self.world_size + len(known)]`: the last round then sends records that the receiver has.
- ranks/call.py, `len(borders) < MOST_SHOWN_BORDERS`: a message shows 63 borders, not 64.
- kernels/rows_at_once.py, `targets[0].numel() < 0`: of a tensor without rows Triton's grid is empty, and runs nothing.
- kernels/cpu.py, `min(q_BHMD.numel(), k_BGLD.numel()) >= 0`: it asserts what holds, a tile is never empty.
- attention/validate.py, `if not failure := ...`: it is not Python.
- simulate/weighing.py, a scale of 2.0: it multiplies tensors without data.
"""

from .mutant import (
    BATCHES,
    CACHE,
    CALL,
    CHOICE,
    COMPILED,
    COUNTS,
    GENERATE,
    LAYERS,
    MESSAGES,
    PLAN,
    RANKS,
    SDPA,
    SIMULATE,
    TRITON,
    WINDOWS,
    Mutant,
)

MUTANTS = (
    Mutant(
        "chunks are gathered at once only if they are no more than two chunks",
        "plan/exchange.py",
        "and received <= max(two_chunks, 2 * num_kv_held * unit * max(lengths))",
        "and received >= max(two_chunks, 2 * num_kv_held * unit * max(lengths))",
        (*CHOICE, *PLAN),
    ),
    Mutant(
        "no span comes before the first",
        "plan/window_maker.py",
        "while i >= 0 and self.index.owners[i][0].stop > least:",
        "while i >= -1 and self.index.owners[i][0].stop > least:",
        WINDOWS,
    ),
    Mutant(
        "held key/value heads are as many as their query heads share",
        "plan/job.py",
        "return len(self.held_heads) * self.num_kv_heads // self.num_heads",
        "return len(self.held_heads) + self.num_kv_heads // self.num_heads",
        PLAN,
    ),
    Mutant(
        "each stage has its own steps",
        "plan/program.py",
        'make_steps = maker.forward if stage == "forward" else maker.backward',
        'make_steps = maker.forward if not stage == "forward" else maker.backward',
        CALL,
    ),
    Mutant(
        "a rank is in a ring if one of its rows has a phase of it",
        "plan/ring_maker.py",
        "piece.start + (origin + phase - piece.start) % rate < piece.stop for phase in phases",
        "piece.start + (origin + phase - piece.start) % rate >= piece.stop for phase in phases",
        PLAN,
    ),
    Mutant(
        "a span's first document is the one that it begins in",
        "plan/rows.py",
        "for i in range(bisect_right(borders, span.start) - 1, bisect_left(borders, span.stop)):",
        "for i in range(bisect_right(borders, span.start) + 1, bisect_left(borders, span.stop)):",
        PLAN,
    ),
    Mutant(
        "a causal query needs the rows before it, another needs all",
        "plan/counts.py",
        "seen = there[-1][1] if is_causal else rows_before(length, phase, self.rate)",
        "seen = there[-1][1] if not is_causal else rows_before(length, phase, self.rate)",
        COUNTS,
    ),
    Mutant(
        "results are dealt back to positions",
        "plan/program.py",
        "maker.put(steps.Deal(name, to_heads=False))",
        "maker.put(steps.Deal(name, to_heads=True))",
        RANKS,
    ),
    Mutant(
        "a piece times itself comes first, since its tiles write",
        "plan/planner.py",
        "pairs = sorted(product(pieces, pieces), key=lambda pair: pair[0] != pair[1])",
        "pairs = sorted(product(pieces, pieces), key=lambda pair: pair[0] >= pair[1])",
        PLAN,
    ),
    Mutant(
        "only a single piece as long as the rate has a row of every phase",
        "plan/counts.py",
        "if len(pieces) == 1 and pieces[0][1] - pieces[0][0] >= self.rate:",
        "if len(pieces) > 1 and pieces[0][1] - pieces[0][0] >= self.rate:",
        COUNTS,
    ),
    Mutant(
        "a window's tiles between own spans are local",
        "plan/planner.py",
        "if owner == rank:",
        "if not owner == rank:",
        WINDOWS,
    ),
    Mutant(
        "rows of a mask from the end are turned round, not their numbers",
        "run/executor.py",
        "rows = with_unit_stride(rows.flip(2)) if rows.dim() == 4 else rows.flip(2)",
        "rows = with_unit_stride(rows.flip(3)) if rows.dim() == 4 else rows.flip(2)",
        CALL,
    ),
    Mutant(
        "a cache that is made like a tensor has its head dim",
        "run/dilated_cache.py",
        "sizes = (plan.pattern, batch, plan.num_heads, plan.num_kv_heads, like.shape[-1])",
        "sizes = (plan.pattern, batch, plan.num_heads, plan.num_kv_heads, like.shape[-0])",
        CACHE,
    ),
    Mutant(
        "a state is refused if it is of another cache",
        "run/dilated_cache.py",
        "if of != self._described():",
        "if of == self._described():",
        CACHE,
    ),
    Mutant(
        "a batch of one may have any stride",
        "run/views.py",
        "assert batch == 1 or entry == segments * segment_step * position, (",
        "assert batch > 1 or entry == segments * segment_step * position, (",
        CALL,
    ),
    Mutant(
        "a forward makes partials, a backward gradients",
        "run/executor.py",
        'if step.what == "partial":',
        'if step.what != "partial":',
        CALL,
    ),
    Mutant(
        "several segments step by their own stride",
        "run/views.py",
        "if segments > 1 or batch == 1:",
        "if not segments > 1 or batch == 1:",
        CALL,
    ),
    Mutant(
        "borders of documents do not tell the number of positions",
        "ranks/batches.py",
        "shapes = [shape for name, (shape, _) in layouts.items() if name != BORDERS]",
        "shapes = [shape for name, (shape, _) in layouts.items() if name < BORDERS]",
        BATCHES,
    ),
    Mutant(
        "a dim is counted from either end, and no further",
        "ranks/reshard.py",
        "if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():",
        "if not isinstance(dim, int) or not -x.dim() != dim < x.dim():",
        RANKS[1:],
    ),
    Mutant(
        "every row of a mesh is placed, the first one too",
        "ranks/processes.py",
        "for first in range(0, len(members), inner):",
        "for first in range(1, len(members), inner):",
        RANKS,
    ),
    Mutant(
        "whoever forgets to initialise torch.distributed is warned",
        "ranks/arguments.py",
        'if os.environ.get("WORLD_SIZE", "1") != "1":',
        'if os.environ.get("WORLD_SIZE", "1") < "1":',
        BATCHES,
    ),
    Mutant(
        "the dim of positions is that of the tensor itself",
        "ranks/batches.py",
        "return shapes[0][_position_dim(shapes[0])]",
        "return shapes[0][_position_dim(shapes[1])]",
        BATCHES,
    ),
    Mutant(
        "two neighbours of a mesh deal heads to each other",
        "ranks/processes.py",
        "if cut.inner > 1:",
        "if cut.inner > 2:",
        RANKS,
    ),
    Mutant(
        "gathered chunks travel by the link of chunks",
        "ranks/processes.py",
        'if exchange == "all_to_all":',
        'if exchange <= "all_to_all":',
        RANKS,
    ),
    Mutant(
        "ops are asked for the log-sum-exp",
        "kernels/cuda_ops.py",
        "forward_arguments: tuple[Any, ...] = (None, True)",
        "forward_arguments: tuple[Any, ...] = (None, False)",
        SDPA,
    ),
    Mutant(
        "the sum of dq begins with its first tile",
        "kernels/row_kernels.py",
        "target, first_tile, num_tiles = dq, 0, num_dq",
        "target, first_tile, num_tiles = dq, -1, num_dq",
        TRITON,
    ),
    Mutant(
        "a key's head dim is neither less nor more than the query's",
        "attention/validate.py",
        "if key[:2] != query[:2] or key[3] != query[3]:",
        "if key[:2] != query[:2] or key[3] < query[3]:",
        MESSAGES,
    ),
    Mutant(
        "no module has 0 features",
        "attention/validate.py",
        "if num_heads < 1 or embed_dim < 1:",
        "if num_heads < 1 or embed_dim == 1:",
        (*LAYERS, *MESSAGES),
    ),
    Mutant(
        "each row of a compiled padded batch gets its own results back",
        "layers/multihead.py",
        "out_BNE = out_1TE[0].unflatten(0, (batch, num_positions + 1))[:, :-1]",
        "out_BNE = out_1TE[0].unflatten(1, (batch, num_positions + 1))[:, :-1]",
        COMPILED,
    ),
    Mutant(
        "a cache is refused beside a padding mask, and not without",
        "layers/multihead.py",
        "if mask is not None and not (cache is None and lengths is None):",
        "if not mask is not None and not (cache is None and lengths is None):",
        GENERATE,
    ),
    Mutant(
        "the position that is added is a row, not a feature",
        "layers/multihead.py",
        "rows_BNE = F.pad(x_BNE.masked_fill(is_padding_BN1, 0), (0, 0, 0, 1))",
        "rows_BNE = F.pad(x_BNE.masked_fill(is_padding_BN1, 0), (-1, 0, 0, 1))",
        COMPILED,
    ),
    Mutant(
        "a simulated rank may own nothing",
        "simulate/all_ranks.py",
        "if len(shard) == 1:",
        "if len(shard) < 1:",
        SIMULATE,
    ),
    Mutant(
        "only steps that take and free nothing are left out",
        "simulate/weighing.py",
        "if isinstance(step, Post | Wait | Zero | Home):",
        "if not isinstance(step, Post | Wait | Zero | Home):",
        SIMULATE[2:],
    ),
)
