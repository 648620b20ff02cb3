"""A forward and backward over all cards: are the results right at full size, and how fast is it beside one card?"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ring_dilated_attention import ContextParallel, DilatedPattern
from ring_dilated_attention.commands.errors import tolerances
from ring_dilated_attention.commands.local_ranks import Worker
from ring_dilated_attention.plan.planner import make_plan
from ring_dilated_attention.plan.sharded_call import ShardedCall
from ring_dilated_attention.plan.sharding import make_shards

from ..device import exposed, timed
from ..gate import small_case
from ..measure import attend, flops_of
from ..parts import Row
from .settings import Settings

# The setups that are timed.
ALL = "all ranks"
WHOLE = "one rank, whole length"
SHARE = "one rank, its share of the length"
APART = "apart"  # on each rank the whole length, for its share of the heads
QUANTITIES = ("out", "dq", "dk", "dv")


def patterns(settings: Settings) -> dict[str, tuple[DilatedPattern, str]]:
    """The patterns that are timed, by name, each with its sharding. All ranks share the longest segment."""
    n = settings.sizes.seq_len
    dense = DilatedPattern((n,), (1,), is_causal=True)
    dilated = DilatedPattern((settings.length // 4, n), (1, 8))
    return {
        "dense causal": (dense, "zigzag"),
        "dilated": (dilated, "contiguous"),
    }


def speed(settings: Settings, seconds: float, way: str) -> list[Row]:
    """Compare a forward and backward over all ranks with one rank at full size, then time both.

    The ceiling is the speed of ranks that exchange nothing. Each then computes the whole length for its share of the
    heads.

    way: the exchange. Returns a row for each pattern.
    """
    ranks = settings.run_ranks(seconds, _speed, way)
    rows = []
    for name, (pattern, _) in patterns(settings).items():
        of_pattern = [rank[name] for rank in ranks]
        rows.append(_row(settings, name, pattern, of_pattern))
    return rows


def _row(settings: Settings, name: str, pattern: DilatedPattern, ranks: list[Row]) -> Row:
    """A pattern's row. ranks: the results of all ranks, of which the slowest counts."""
    num_ranks = settings.num_ranks
    case = small_case(settings.sizes, pattern)
    allowed = tolerances(case, settings.sizes.dtype, settings.device_type)
    wrong = []
    for rank in ranks:
        for quantity, error in rank["errors"].items():
            # NaN is not at most anything, so it is wrong too.
            if not error <= 2 * allowed[quantity]:
                wrong.append(quantity)
    slowest = {}
    for setup in (ALL, WHOLE, SHARE, APART):
        slowest[setup] = max(rank["seconds"][setup] for rank in ranks)
    # strong scaling: the length stays
    same_length = slowest[WHOLE] / (num_ranks * slowest[ALL])
    # weak scaling, in FLOP/s of a rank: the length grows with the ranks
    whole_flops = _flops(settings, pattern, settings.sizes.seq_len)
    whole_rate = whole_flops / slowest[ALL] / num_ranks
    share_flops = _flops(settings, pattern, settings.length)
    share_rate = share_flops / slowest[SHARE]
    shares = {
        f"of {num_ranks} times one rank's speed at the same length": same_length,
        f"at {num_ranks} times the length": whole_rate / share_rate,
        "of the ceiling": slowest[APART] / slowest[ALL],
        "of a step exposed": max(rank["exposed"] / rank["step"] for rank in ranks),
    }
    said = f"{1e3 * slowest[ALL]:.3g} ms"
    for text, share in shares.items():
        said += f", {share:.0%} {text}"
    if wrong:
        said = f"wrong at full size: {wrong}"
    return {
        "what": name,
        "passed": not wrong,
        "found": said,
        "seconds": slowest[ALL],
        "shares": shares,
        "ranks": ranks,
    }


def _flops(settings: Settings, pattern: DilatedPattern, seq_len: int) -> int:
    """The floating-point operations of a forward and backward of this length on one rank."""
    num_heads = settings.sizes.num_heads
    shards = make_shards("contiguous", (seq_len,))
    sharded_call = ShardedCall(pattern, shards, num_heads, num_heads)
    plan = make_plan(sharded_call, 0)
    return sum(flops_of(plan, 1, settings.head_dim))


def _step(x: Tensor, pattern: DilatedPattern, parallel: ContextParallel | None) -> list[Tensor]:
    """A forward and backward: out, dq, dk, dv. x: query, key, value and the gradient of out, stacked."""
    inputs = [x[i].requires_grad_() for i in range(3)]
    dout = x[3]
    out = attend(inputs, pattern, parallel)
    gradients = torch.autograd.grad(out, inputs, dout)
    return [out.detach(), *gradients]


def _errors(
    local: Tensor,
    whole: Tensor,
    positions: Tensor,
    pattern: DilatedPattern,
    parallel: ContextParallel,
) -> dict[str, float]:
    """The relative error of each quantity of a step over all ranks, beside the same step on one rank.

    local: this rank's part of `whole`, at these positions.
    """
    of_ranks = _step(local, pattern, parallel)
    of_one = _step(whole, pattern, None)
    errors = {}
    for quantity, x, of_whole in zip(QUANTITIES, of_ranks, of_one, strict=True):
        exact = of_whole[:, positions].float()
        difference = x.float() - exact
        errors[quantity] = float(difference.norm() / exact.norm())
    return errors


def _speed(worker: Worker, settings: Settings, way: str) -> dict[str, Row]:
    """For each pattern this rank's errors, its seconds in each setup, and its exposed seconds (see `exposed`)."""
    sizes = settings.sizes
    device = settings.device(worker.rank)
    of_patterns: dict[str, Row] = {}
    for name, (pattern, sharding) in patterns(settings).items():
        parallel = ContextParallel(exchange=way, sharding=sharding)
        shape = (4, 1, sizes.seq_len, sizes.num_heads, sizes.head_dim)
        whole = torch.randn(shape, dtype=sizes.dtype, device=device)
        # All ranks get the same query, key, value and gradient of out.
        dist.broadcast(whole, 0)
        positions = parallel.positions(sizes.seq_len).to(device)
        local = whole[:, :, positions].contiguous()
        # Nothing of these steps is kept while calls are timed.
        errors = _errors(local, whole, positions, pattern, parallel)
        share_of_length = whole[:, :, : settings.length].contiguous()
        heads_of_rank = sizes.num_heads // worker.world_size
        share_of_heads = whole[:, :, :, :heads_of_rank].contiguous()
        calls: dict[str, Callable[[], object]] = {
            ALL: partial(_step, local, pattern, parallel),
            WHOLE: partial(_step, whole, pattern, None),
            SHARE: partial(_step, share_of_length, pattern, None),
            APART: partial(_step, share_of_heads, pattern, None),
        }
        if worker.rank > 0:
            # Only rank 0 is timed alone.
            calls[WHOLE] = calls[SHARE] = lambda: None
        seconds = {}
        for setup, call in calls.items():
            seconds[setup] = timed(device, parallel, call)
        of_patterns[name] = {
            "errors": errors,
            "seconds": seconds,
            **exposed(device, parallel, calls[ALL]),
        }
        parallel.close()
    return of_patterns
