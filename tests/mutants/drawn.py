"""Mutants that cosmic-ray drew, with the idea that each breaks:

    python tests/mutants/draw.py 7 plan:12 run:6 ranks:9 kernels:4 attention:3 layers:3 simulate:3
    python tests/mutants/draw.py 7 models:4 training:4 commands:2
    python tests/mutants/draw.py 8 integrations:10 commands:10 models:4 training:4 forecast:3

Those of integrations/transformers need accelerate, which the environment of `make test` does not have; that of
`make test-integrations` has it: .venv-integrations/bin/python -m tests.mutants --only integrations/transformers

The 262,144 pixels of slides were drawn twice. Left out are those that change no result, though some change how much is
sent or held, or what a message shows of what is wrong:

- plan/window_maker.py, `portion.piece.start <= portion.document.start`: a portion is cut to its document, so it cannot
  begin before.
- ranks/link.py, `known[: self.world_size + len(known)]`: the last round then sends records that the receiver has.
- ranks/call.py, `len(borders) < MOST_SHOWN_BORDERS`: a message shows 63 borders, not 64.
- kernels/rows_at_once.py, `targets[0].numel() < 0`: of a tensor without rows Triton's grid is empty, and runs nothing.
- kernels/cpu.py, `min(q_BHMD.numel(), k_BGLD.numel()) >= 0`: it asserts what holds, a tile is never empty.
- attention/validate.py, `if not failure := ...`: it is not Python.
- models/recompute.py, `LOSS_SLICE_LOGITS = 2**19`: the loss is cut into other slices of rows.
- simulate/weighing.py, a scale of 2.0: it multiplies tensors without data.
- integrations/transformers/probe.py, `apart[-0][:-1]`: an error names the first of several modules, not the last.
- commands/plan/decoders.py, `num_hidden_layers = 3`: the tiny copy that is checked has one layer more, and each copy
  that is weighed gets its own number.
- models/longnet.py, `labels_BN > IGNORED_LABEL`: a label is -100 or a token, and no token is below 0.
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
    SCORING,
    SDPA,
    SIMULATE,
    SLIDES,
    TORCHSCALE,
    TRAINING,
    TRITON,
    WINDOWS,
    Mutant,
)

AGREED = ("tests/training/test_agreement.py",)
DOCTOR = ("tests/commands/test_doctor.py",)
EMBED = ("tests/commands/test_embed.py",)
PLANNED = ("tests/commands/test_plan_command.py",)
SUGGEST = ("tests/forecast/test_suggest.py",)
TRAIN = "tests/training/test_training.py::TestCommand"

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
        "plan/sharded_call.py",
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
        "any((origin + phase - piece.start) % rate < piece.length for phase in phases)",
        "any((origin + phase - piece.start) % rate >= piece.length for phase in phases)",
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
        "seen = last if is_causal else rows_before(length, phase, self.rate)",
        "seen = last if not is_causal else rows_before(length, phase, self.rate)",
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
        "if len(pieces) == 1 and end - first >= self.rate:",
        "if len(pieces) > 1 and end - first >= self.rate:",
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
        "rows = with_unit_stride(rows.flip(2))",
        "rows = with_unit_stride(rows.flip(3))",
        CALL,
    ),
    Mutant(
        "a cache that is made like a tensor has its head dim",
        "run/dilated_cache.py",
        "            like.shape[-1],\n",
        "            like.shape[-0],\n",
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
        "assert batch == 1 or stride == segments * segment_step * position, (",
        "assert batch > 1 or stride == segments * segment_step * position, (",
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
        "shape = next(shape for name, (shape, _) in layouts.items() if name != BORDERS)",
        "shape = next(shape for name, (shape, _) in layouts.items() if name < BORDERS)",
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
        "lengths = ranks.lengths_of(shape[_position_dim(shape)], documents)",
        "lengths = ranks.lengths_of(shape[0], documents)",
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
        "layers/padded.py",
        "rows_BNE = x_1TE[0].unflatten(0, (self.batch, self.num_positions + 1))[:, :-1]",
        "rows_BNE = x_1TE[0].unflatten(1, (self.batch, self.num_positions + 1))[:, :-1]",
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
        "layers/padded.py",
        "rows_BNE = F.pad(x_BNE.masked_fill(self.is_padding_BN1, 0), (0, 0, 0, 1))",
        "rows_BNE = F.pad(x_BNE.masked_fill(self.is_padding_BN1, 0), (-1, 0, 0, 1))",
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
        "if isinstance(step, Post | Wait | Zero | Unpack):",
        "if not isinstance(step, Post | Wait | Zero | Unpack):",
        SIMULATE[2:],
    ),
    Mutant(
        "the published slide encoders read slides of 262,144 pixels",
        "models/longnet_vit.py",
        "        max_wsi_size: int = 262_144,\n",
        "        max_wsi_size: int = 262_143,\n",
        SLIDES,
    ),
    Mutant(
        "the tiles of the smaller published encoder have 384 features",
        "models/longnet_vit.py",
        "PublishedSize(in_chans=384, embed_dim=384, depth=12)",
        "PublishedSize(in_chans=383, embed_dim=384, depth=12)",
        SLIDES,
    ),
    Mutant(
        "rows are padded along the positions",
        "models/torchscale/gate.py",
        "return padded.index_copy(1, rows_N, x)",
        "return padded.index_copy(2, rows_N, x)",
        TORCHSCALE,
    ),
    Mutant(
        "a step belongs to the first phase that it does not exceed",
        "training/options.py",
        "if step < phase.steps:",
        "if step != phase.steps:",
        TRAINING,
    ),
    Mutant(
        "the first byte of a slice is predicted by the last one before it",
        "training/scoring.py",
        "last_1E = hidden_NE[-1:]",
        "last_1E = hidden_NE[-2:]",
        SCORING,
    ),
    Mutant(
        "hyperparameters are checked",
        "training/options.py",
        "for item in fields(self):",
        "for item in []:",
        TRAINING,
    ),
    Mutant(
        "the rehearsal of a step reads two bytes for each rank, as its borders say",
        "training/loop.py",
        "parallel.shard(tokens_of(bytearray(2 * parallel.world_size)))",
        "parallel.shard(tokens_of(bytearray(1 * parallel.world_size)))",
        TRAINING,
    ),
    Mutant(
        "no time is below zero",
        "commands/doctor/examination.py",
        "max(0.0, max(small) - tile)",
        "max(-1.0, max(small) - tile)",
        DOCTOR,
    ),
    Mutant(
        "a model has twelve layers unless the user says how many",
        "commands/suggest.py",
        "default=12,",
        "default=11,",
        SUGGEST,
    ),
    Mutant(
        "a BoundedCache keeps no rows for going back unless it is asked to",
        "integrations/transformers/cache.py",
        "max_len: int | None = None, keep: int = 0) -> None:",
        "max_len: int | None = None, keep: int = -1) -> None:",
        ("tests/integrations/test_transformers_cache.py",),
    ),
    Mutant(
        "results from a cache lie position by position",
        "integrations/transformers/attention_function.py",
        "return out.masked_fill(is_uncovered, 0).transpose(1, 2)",
        "return out.masked_fill(is_uncovered, 0).transpose(1, 1)",
        ("tests/integrations/test_transformers.py::test_greedy_generation",),
    ),
    Mutant(
        "positions of models like RoBERTa count all tokens but padding",
        "integrations/transformers/sample.py",
        "valid = ids != padding",
        "valid = ids <= padding",
        ("tests/integrations/test_transformers_whole.py::test_a_classifier_of_sequences",),
    ),
    Mutant(
        "cached key/value heads are shared if they are fewer than the query heads",
        "integrations/transformers/attention_function.py",
        "is_grouped = query.shape[1] != key.shape[1]",
        "is_grouped = query.shape[2] != key.shape[1]",
        ("tests/integrations/test_transformers.py::test_greedy_generation",),
    ),
    Mutant(
        "results of a padded batch go back to the rows of their tokens",
        "integrations/transformers/attention_function.py",
        "return out.index_copy(0, valid_T, out_1THD[0])",
        "return out.index_copy(-1, valid_T, out_1THD[0])",
        ("tests/integrations/test_transformers.py::test_equal_to_the_definition",),
    ),
    Mutant(
        "a cache that holds nothing yet has no rows to repeat",
        "integrations/transformers/cache.py",
        "    def batch_repeat_interleave(self, repeats: int) -> None:\n        if self.cache is not None:",
        "    def batch_repeat_interleave(self, repeats: int) -> None:\n        if not self.cache is not None:",
        ("tests/integrations/test_transformers_cache.py",),
    ),
    Mutant(
        "the first rows in a static cache are a whole sequence",
        "integrations/transformers/attention_function.py",
        "if kv_length == q_length or (not is_compiling and int(q_offset) == 0):",
        "if kv_length == q_length or (is_compiling and int(q_offset) == 0):",
        ("tests/integrations/test_transformers.py::test_a_compiled_step_from_a_static_cache",),
    ),
    Mutant(
        "a model that asks for dilated attention is checked when it is made",
        "integrations/transformers/probe.py",
        "if asked == NAME:",
        "if asked < NAME:",
        ("tests/integrations/test_transformers_check.py",),
    ),
    Mutant(
        "without a mask, keys are no more than queries",
        "integrations/transformers/attention_function.py",
        "if num_keys != num_rows:",
        "if num_keys < num_rows:",
        ("tests/integrations/test_transformers.py::test_what_attention_cannot_do",),
    ),
    Mutant(
        "the inputs of a call whose backward is timed have gradients",
        "commands/doctor/examination.py",
        "torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)",
        "torch.randn(shape, dtype=dtype, device=device, requires_grad=False) for _ in range(3)",
        DOCTOR,
    ),
    Mutant(
        "a complete run says how to write with it, another how to go on",
        "commands/train.py",
        'if record["status"] == "complete":\n        print',
        'if not record["status"] == "complete":\n        print',
        (f"{TRAIN}::test_interrupted_ranks_save_and_go_on",),
    ),
    Mutant(
        "a picture shows up to four heads",
        "pictures.py",
        "MOST_HEADS = 4",
        "MOST_HEADS = 3",
        PLANNED,
    ),
    Mutant(
        "ranks are simulated in the trials of simulated ranks alone",
        "commands/check.py",
        "if trial.exchange == SIMULATED:\n        return",
        "if trial.exchange < SIMULATED:\n        return",
        ("tests/commands/test_check.py",),
    ),
    Mutant(
        "the reason of a refusal is said",
        "commands/train.py",
        "if str(error) and (isinstance(error, Refusal) or started().rank == 0):",
        "if not str(error) and (isinstance(error, Refusal) or started().rank == 0):",
        AGREED,
    ),
    Mutant(
        "within a host there may be no latency",
        "commands/hardware.py",
        '"host_latency_seconds": (0, 0.1, SECONDS),',
        '"host_latency_seconds": (1, 0.1, SECONDS),',
        PLANNED,
    ),
    Mutant(
        "a folder of embeddings has one set of settings",
        "commands/embed/folder.py",
        "if self.settings_file.read_bytes() != self.settings:",
        "if self.settings_file.read_bytes() < self.settings:",
        EMBED,
    ),
    Mutant(
        "a budget may be that of dense attention",
        "commands/suggest.py",
        "if arguments.speedup < 1:",
        "if arguments.speedup <= 1:",
        SUGGEST,
    ),
    Mutant(
        "h5py is needed for slides in its files alone",
        "commands/embed/embed.py",
        'if any(path.suffix in (".h5", ".hdf5") for path in slides.values()):',
        'if not any(path.suffix in (".h5", ".hdf5") for path in slides.values()):',
        EMBED,
    ),
    Mutant(
        "nobody is warned of shards that padding made uneven",
        "models/torchscale/gate.py",
        "ranks.expect_lengths([stop - start for start, stop in pairwise(padded_borders)])",
        "ranks.expect_lengths([stop + start for start, stop in pairwise(padded_borders)])",
        TORCHSCALE,
    ),
    Mutant(
        "a slide has no more than 2^31 tiles on a side",
        "models/longnet_vit.py",
        "MOST_TILES_OF_A_SIDE = 2**31",
        "MOST_TILES_OF_A_SIDE = 3**31",
        SLIDES,
    ),
    Mutant(
        "ranks differ in a field if its values are not the same",
        "training/agreement.py",
        "if value != fields_of_first[name]:",
        "if value == fields_of_first[name]:",
        AGREED,
    ),
    Mutant(
        "the memory of a process is a number before its unit",
        "training/machine.py",
        "field)).split()[0]",
        "field)).split()[-1]",
        ("tests/training/test_training.py::test_memory_figures",),
    ),
    Mutant(
        "ranks share the cores that this process may use",
        "training/rank_launcher.py",
        "len(os.sched_getaffinity(0)) if hasattr(os",
        "len(os.sched_getaffinity(0)) if not hasattr(os",
        (f"{TRAIN}::test_ranks_share_the_cores_that_they_may_use",),
    ),
    Mutant(
        "a file that another program wrote is not replaced by a count of starts",
        "training/run_folder.py",
        "file.read(len(MAKER)) == MAKER.encode()",
        "file.read(len(MAKER)) >= MAKER.encode()",
        ("tests/training/test_files.py",),
    ),
    Mutant(
        "a layer hears by all branches",
        "forecast/reach.py",
        "for branch in branches:",
        "for branch in []:",
        SUGGEST,
    ),
    Mutant(
        "segments of all lengths below the sequence's are tried",
        "forecast/suggestions.py",
        "if SHORTEST * 2**k < seq_len]",
        "if SHORTEST * 3**k < seq_len]",
        SUGGEST,
    ),
    Mutant(
        "with a window, the last queries of a segment that see keys before it are followed",
        "forecast/reach.py",
        "queries |= {start + pattern.window - place for",
        "queries |= {start + pattern.window + place for",
        SUGGEST,
    ),
)
