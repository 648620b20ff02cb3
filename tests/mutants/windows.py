"""Mutants of sliding windows and sinks."""

from .mutant import Mutant

PLAN = ("tests/plan/test_windows.py", "tests/plan/test_plan.py", "tests/plan/test_counts.py")
CALL = ("tests/attention/test_attention.py",)
CACHE = ("tests/plan/test_cache_plan.py", "tests/run/test_cache.py")
SIGHT, MAKER = "plan/sight.py", "plan/window_maker.py"

MUTANTS = (
    Mutant(
        "a causal window has w positions, its own among them",
        "pattern.py",
        "return self.segment_length - 1 if is_causal else self.segment_length // 2",
        "return self.segment_length if is_causal else self.segment_length // 2",
        (*PLAN, *CALL),
    ),
    Mutant(
        "a centred window's blocks are as long as it reaches",
        SIGHT,
        "return max(branch.window_reach(is_causal=False), 1)",
        "return branch.segment_length",
        (*PLAN, *CALL),
    ),
    Mutant(
        "a block sees the block before from the end",
        SIGHT,
        "yield Meeting(after, before, FROM_END, number, size)",
        "yield Meeting(after, before, FULL, number, size)",
        (*PLAN, *CALL),
    ),
    Mutant(
        "a centred window sees the block after",
        SIGHT,
        "            yield Meeting(before, after, CAUSAL, number, size)",
        "            yield Meeting(before, after, FROM_END, number, size)",
        (*PLAN, *CALL),
    ),
    Mutant(
        "a short last block sees the nearer rows before it whole",
        SIGHT,
        "        yield Meeting(after, near, FULL)\n",
        "",
        (*PLAN, *CALL),
    ),
    Mutant(
        "a short last block sees a triangle of the rows that are farthest",
        SIGHT,
        "far, near = before[: len(after)], before[len(after) :]",
        "far, near = before[-len(after) :], before[: -len(after)]",
        (*PLAN, *CALL),
    ),
    Mutant(
        "keys that all queries of a piece see are seen whole",
        SIGHT,
        "        return FULL if last > query else None",
        "        return None",
        PLAN,
    ),
    Mutant(
        "keys that are too far are not seen",
        SIGHT,
        "        return FULL if last > query else None",
        "        return FULL",
        PLAN,
    ),
    Mutant(
        "queries before the keys are cut by the reach ahead",
        MAKER,
        "[(other, -self.reach) for",
        "[(other, self.reach) for",
        PLAN,
    ),
    Mutant(
        "keys are cut where queries begin",
        "plan/rows.py",
        "cuts = {x - reach for piece, reach in queries for x in (piece.start, piece.stop)}",
        "cuts = {piece.stop - reach for piece, reach in queries}",
        PLAN,
    ),
    Mutant(
        "queries are cut where keys end",
        "plan/rows.py",
        "borders = {x for key in cut_keys for x in (key.start, key.stop)}",
        "borders = {key.start for key in cut_keys}",
        PLAN,
    ),
    Mutant(
        "a window does not reach into the document before",
        MAKER,
        "least = max(portion.document.start, portion.piece.start - self.reach)",
        "least = portion.piece.start - self.reach",
        PLAN,
    ),
    Mutant(
        "a wide window reaches several ranks",
        MAKER,
        "            yield self._portion(rank, span, portion.document)\n            i -= 1",
        "            yield self._portion(rank, span, portion.document)\n            break",
        PLAN,
    ),
    Mutant(
        "a centred window sees the ranks after it",
        MAKER,
        "return seen if self.is_causal else [*seen, *self.after(portion)]",
        "return seen",
        PLAN,
    ),
    Mutant(
        "rows go only to ranks that see them",
        MAKER,
        "ranks = {x.rank for x, pieces in queries if any(self.mask(q, key) for q in pieces)}",
        "ranks = {x.rank for x, pieces in queries}",
        PLAN,
    ),
    Mutant(
        "turned results are turned back",
        "run/executor.py",
        "self.results = {name: result.flip(2) for name, result in self.results.items()}",
        "pass",
        CALL,
    ),
    Mutant(
        "a window's cache shows w rows",
        "plan/cache_plan.py",
        "return range(max(position - self.branch.window_reach(is_causal=True), 0), position)",
        "return range(max(position - self.branch.window_reach(is_causal=True) - 1, 0), position)",
        CACHE,
    ),
    Mutant(
        "a window that dropped rows goes back by `keep` alone",
        "plan/cache_plan.py",
        "            youngest = position\n",
        "            pass\n",
        CACHE,
    ),
    Mutant(
        "several new rows see the cached rows of their windows alone",
        "plan/cache_plan.py",
        "yield Tile(rows, cached, mask, first_query=False, first_key=False)",
        'yield Tile(rows, cached, "full", first_query=False, first_key=False)',
        CACHE,
    ),
    Mutant(
        "a sink takes its share of the softmax",
        "attention/sinks.py",
        "return out, torch.where(is_none, lse_BNH, torch.logaddexp(lse_BNH, sinks))",
        "return out, lse_BNH",
        CALL,
    ),
    Mutant(
        "a sink has the value 0",
        "attention/sinks.py",
        "out = (out_BNHD * weight_BNH.unsqueeze(-1)).to(out_BNHD.dtype)",
        "out = out_BNHD",
        CALL,
    ),
)
