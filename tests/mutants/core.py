"""Mutants of the core, written by hand: the plan, the run, ranks, kernels, the call, simulated ranks.

"Hops that wrap round the ring are not joined" is none any more: plan/rings.py no longer joins them.

One more was written and left out, since it changes no result:

- plan/plan.py, chunks of an all-gather do not lie in the order of their owners (`sorted` in `gathered`): a tile finds
  its chunk wherever it lies, and the messages of one pair of ranks keep their order.
"""

from .mutant import (
    AGREEMENT,
    CACHE,
    CALL,
    CHOICE,
    LAYERS,
    PLAN,
    RANKS,
    SDPA,
    SIMULATE,
    Mutant,
)

MUTANTS = (
    # who sees whom, and who sends
    Mutant(
        "a causal piece does not see a later one",
        "plan/sight.py",
        "return CAUSAL if key == query else None",
        "return CAUSAL if key == query else FULL",
        PLAN,
    ),
    Mutant(
        "segments begin anew at the border of a document",
        "plan/rows.py",
        "whole = document - (document - start) // length * length",
        "whole = -(-start // length) * length",
        PLAN,
    ),
    Mutant(
        "positions begin anew at the border of a document",
        "plan/sharding.py",
        "ranges.append(range(lo - documents[i], hi - documents[i]))",
        "ranges.append(range(lo, hi))",
        ("tests/ranks/test_parallel.py", "tests/ranks/test_zigzag_documents.py"),
    ),
    Mutant(
        "the later slice of a zigzag shard is mirrored",
        "plan/sharding.py",
        "pairs = [(slices[k], slices[-1 - k]) for k in range(num_shards)]",
        "pairs = [(slices[k], slices[num_shards + k]) for k in range(num_shards)]",
        PLAN,
    ),
    Mutant(
        "a gradient goes on with its chunk, and home from the last rank alone",
        "plan/planner.py",
        "home = following if after[s + 1] else owner",
        "home = owner",
        PLAN,
    ),
    Mutant(
        "a tile reads the rows of its own heads in a chunk",
        "plan/planner.py",
        "start = key_band.lo - entry.band.lo if key_band.group.phase_step else 0",
        "start = 0",
        PLAN,
    ),
    Mutant(
        "in an all-gather, messages of one pair of ranks are sent in the order in which they are received",
        "plan/plan.py",
        "targets = sorted((m for hop in plan.hops for m in hop.targets), key=lambda m: m.peer)",
        "targets = sorted((m for hop in plan.hops[::-1] for m in hop.targets), key=lambda m: m.peer)",
        (*PLAN, *RANKS),
    ),
    Mutant(
        "the gradient of lse is dealt too",
        "plan/exchange.py",
        "share * number * (1 + has_dlse)",
        "share * number",
        (*CHOICE, "tests/ranks/test_counted.py"),
    ),
    Mutant(
        "a cache keeps the first row of a segment",
        "plan/cache_plan.py",
        "return range(self.before(position - position % self.segment_length), self.before(position))",
        "return range(self.before(position - position % self.segment_length) + 1, self.before(position))",
        ("tests/plan/test_cache_plan.py", *CACHE),
    ),
    # what is computed
    Mutant(
        "a first tile writes over memory that was never filled",
        "plan/program.py",
        'return "write" if is_first else otherwise',
        "return otherwise",
        CALL,
    ),
    Mutant(
        "dk and dv are added to other ranks' sums after these have come",
        "plan/program.py",
        "                        self.await_gradients()\n",
        "",
        RANKS,
    ),
    Mutant(
        "an empty partial has no weight: it gives no NaN",
        "run/merge.py",
        "weight = torch.sigmoid(partial_lse - lse).masked_fill_(partial_lse == -torch.inf, 0)",
        "weight = torch.sigmoid(partial_lse - lse)",
        CALL,
    ),
    Mutant(
        "an empty partial of a token has no weight: it gives no NaN",
        "run/merge.py",
        "weights = (lses - lse).exp_().masked_fill_(lses == -torch.inf, 0)",
        "weights = (lses - lse).exp_()",
        CACHE,
    ),
    Mutant(
        "lse of a merge is the logarithm of a sum",
        "run/merge.py",
        "lse.copy_(torch.logaddexp(lse, partial_lse.to(lse.dtype)))",
        "lse.copy_(torch.maximum(lse, partial_lse.to(lse.dtype)))",
        CALL,
    ),
    Mutant(
        "dq of a negative scale has its sign",
        "run/executor.py",
        'self.alive["dq"].mul_(self.options.factor)',
        "pass",
        CALL,
    ),
    Mutant(
        "what comes home is added to what the owner's queries gave",
        "run/executor.py",
        "self.rows(name, rows).add_(gradient)",
        "self.rows(name, rows).copy_(gradient)",
        ("tests/simulate/test_one_rank.py", *RANKS),
    ),
    Mutant(
        "dealt heads have their positions in the order of the sequence",
        "run/executor.py",
        "for place, first, num_rows in dealing.runs:",
        "for place, first, num_rows in sorted(dealing.runs):",
        RANKS,
    ),
    Mutant(
        "a token that fails loses no row",
        "run/append.py",
        "slot.copy_(rows)",
        "pass",
        CACHE,
    ),
    # kernels
    Mutant(
        "a kernel's backward has the scale of its forward",
        "kernels/cpu.py",
        "grads = _backward(dout, query, key, value, out, lse, 0.0, is_causal, scale=scale)",
        "grads = _backward(dout, query, key, value, out, lse, 0.0, is_causal)",
        CALL,
    ),
    Mutant(
        "in 16 bits the power of two that carries dlse is a normal number",
        "kernels/lse_gradient.py",
        "torch.frexp(rest).exponent.clamp(-14, 15)",
        "torch.frexp(rest).exponent",
        ("tests/kernels/test_sdpa.py", "tests/kernels/test_rounding.py", *CALL),
    ),
    Mutant(
        "the gradient of a shared key is the sum over its query heads",
        "kernels/sdpa.py",
        "dk, dv = (x.unflatten(1, (num_kv_heads, -1)).sum(2) for x in (dk, dv))",
        "dk, dv = (x.unflatten(1, (num_kv_heads, -1)).select(2, 0) for x in (dk, dv))",
        SDPA,
    ),
    Mutant(
        "rows that pad lse have no weight",
        "kernels/sdpa.py",
        "value=torch.inf)",
        "value=0.0)",
        SDPA,
    ),
    # the call
    Mutant(
        "a scale that float32 takes for nothing makes no NaN",
        "ranks/call.py",
        "return abs(self.scale) if abs(self.scale) >= LEAST_SCALE else 1.0",
        "return abs(self.scale) if self.scale else 1.0",
        CALL,
    ),
    Mutant(
        "a query without keys stays without where a sink is -inf",
        "attention/sinks.py",
        "(lse_BNH - sinks).masked_fill(is_none, torch.inf)",
        "(lse_BNH - sinks)",
        CALL,
    ),
    # what ranks tell each other
    Mutant(
        "ranks compare their scales",
        "ranks/processes.py",
        '            "scale": call.scale,\n',
        "",
        AGREEMENT,
    ),
    Mutant(
        "a call that all ranks refuse is refused",
        "ranks/handshake.py",
        "if largest != -opposite_of_smallest or not largest:",
        "if largest != -opposite_of_smallest:",
        AGREEMENT,
    ),
    Mutant(
        "lengths are told anew when a rank has another",
        "ranks/handshake.py",
        "is_new = kind not in control.agreed or control.agreed[kind][control.rank] != length",
        "is_new = kind not in control.agreed",
        AGREEMENT,
    ),
    Mutant(
        "averaged over the ranks, the gradient of mean_loss is that of the mean",
        "ranks/reduce.py",
        "ctx.scale = world_size / count.item()",
        "ctx.scale = 1 / count.item()",
        ("tests/ranks/test_mean_loss.py", "tests/ranks/test_gradients.py"),
    ),
    Mutant(
        "averaged over the ranks, the gradient of shard is that of the mean",
        "ranks/reshard.py",
        "return whole.div_(len(ctx.shards)), None, None, None",
        "return whole, None, None, None",
        RANKS[1:],
    ),
    Mutant(
        "the gradient of unshard is the sum over ranks",
        "ranks/reshard.py",
        "            total += rows\n",
        "            total = rows.to(total.dtype)\n",
        RANKS[1:],
    ),
    # simulated ranks
    Mutant(
        "of two simulated ranks the first message comes first",
        "simulate/all_ranks.py",
        "(sent, is_sent), (received, is_received) = sends.popleft(), receives.popleft()",
        "(sent, is_sent), (received, is_received) = sends.pop(), receives.popleft()",
        SIMULATE,
    ),
    Mutant(
        "a rank's peak is the most that it held",
        "simulate/measuring.py",
        "self.peak_bytes = max(self.peak_bytes, self.num_bytes)",
        "self.peak_bytes = self.num_bytes",
        SIMULATE,
    ),
    Mutant(
        "heads on a diagonal begin at different positions",
        "simulate/one_rank.py",
        "first = rows.first + torch.arange(len(rows.heads)).unsqueeze(1) * rows.shift",
        "first = rows.first + torch.arange(len(rows.heads)).unsqueeze(1) * 0",
        SIMULATE,
    ),
    # modules
    Mutant(
        "a pair is rotated in one direction",
        "layers/rotary.py",
        "second * cos + first * sin",
        "second * cos - first * sin",
        LAYERS,
    ),
    Mutant(
        "the first position of a document has the number 0",
        "layers/rotary.py",
        "torch.searchsorted(starts, positions_N, right=True)",
        "torch.searchsorted(starts, positions_N)",
        LAYERS,
    ),
)
