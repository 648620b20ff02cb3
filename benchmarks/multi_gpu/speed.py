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

ALL, WHOLE = "all ranks", "one rank, whole length"
SHARE, APART = "one rank, its share of the length", "apart"
QUANTITIES = ("out", "dq", "dk", "dv")


def patterns(settings: Settings) -> dict[str, tuple[DilatedPattern, str]]:
    """The patterns that are timed, by name, each with its sharding. All ranks share the longest segment."""
    n = settings.sizes.seq_len
    dense = DilatedPattern((n,), (1,), is_causal=True)
    dilated = DilatedPattern((settings.length // 4, n), (1, 8))
    return {"dense causal": (dense, "zigzag"), "dilated": (dilated, "contiguous")}


def speed(settings: Settings, seconds: float, way: str) -> list[Row]:
    """Compare a forward and backward over all ranks with one rank at full size, then time both.

    The ceiling is the speed of ranks that exchange nothing. Each then computes the whole length for its share of the
    heads.
    """
    ranks = settings.run_ranks(seconds, _speed, way)
    rows = []
    for name, (pattern, _) in patterns(settings).items():
        rows.append(_row(settings, name, pattern, [rank[name] for rank in ranks]))
    return rows


def _row(settings: Settings, name: str, pattern: DilatedPattern, ranks: list[Row]) -> Row:
    num_ranks = settings.num_ranks
    allowed = tolerances(
        small_case(settings.sizes, pattern), settings.sizes.dtype, settings.device_type
    )
    wrong = []
    for rank in ranks:
        wrong += [
            quantity
            for quantity, error in rank["errors"].items()
            if not error <= 2 * allowed[quantity]
        ]
    slowest = {}
    for setup in (ALL, WHOLE, SHARE, APART):
        slowest[setup] = max(rank["seconds"][setup] for rank in ranks)
    whole_rate = _flops(settings, pattern, settings.sizes.seq_len) / slowest[ALL] / num_ranks
    share_rate = _flops(settings, pattern, settings.length) / slowest[SHARE]
    shares = {
        f"of {num_ranks} times one rank's speed at the same length": slowest[WHOLE]
        / (num_ranks * slowest[ALL]),
        f"at {num_ranks} times the length": whole_rate / share_rate,
        "of the ceiling": slowest[APART] / slowest[ALL],
        "of a step exposed": max(rank["exposed"] / rank["step"] for rank in ranks),
    }
    said = ", ".join(
        [f"{1e3 * slowest[ALL]:.3g} ms", *(f"{share:.0%} {text}" for text, share in shares.items())]
    )
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
    sharded_call = ShardedCall(pattern, make_shards("contiguous", (seq_len,)), num_heads, num_heads)
    return sum(flops_of(make_plan(sharded_call, 0), 1, settings.head_dim))


def _step(x: Tensor, pattern: DilatedPattern, parallel: ContextParallel | None) -> list[Tensor]:
    """A forward and backward: out, dq, dk, dv. x: query, key, value and the gradient of out, stacked."""
    inputs = [x[i].requires_grad_() for i in range(3)]
    out = attend(inputs, pattern, parallel)
    return [out.detach(), *torch.autograd.grad(out, inputs, x[3])]


def _speed(worker: Worker, settings: Settings, way: str) -> dict[str, Row]:
    """For each pattern this rank's errors, its seconds in each setup, and its exposed seconds (see `exposed`)."""
    sizes, device = settings.sizes, settings.device(worker.rank)
    of_patterns: dict[str, Row] = {}
    for name, (pattern, sharding) in patterns(settings).items():
        parallel = ContextParallel(exchange=way, sharding=sharding)
        whole = torch.randn(
            4, 1, sizes.seq_len, sizes.num_heads, sizes.head_dim, dtype=sizes.dtype, device=device
        )
        # All ranks get the same query, key, value and gradient of out.
        dist.broadcast(whole, 0)
        positions = parallel.positions(sizes.seq_len).to(device)
        local = whole[:, :, positions].contiguous()
        errors = {}
        results = zip(_step(local, pattern, parallel), _step(whole, pattern, None), strict=True)
        for quantity, (x, of_whole) in zip(QUANTITIES, results, strict=True):
            exact = of_whole[:, positions].float()
            errors[quantity] = float((x.float() - exact).norm() / exact.norm())
        share_of_length = whole[:, :, : settings.length].contiguous()
        share_of_heads = whole[:, :, :, : sizes.num_heads // worker.world_size].contiguous()
        calls: dict[str, Callable[[], object]] = {
            ALL: partial(_step, local, pattern, parallel),
            WHOLE: partial(_step, whole, pattern, None),
            SHARE: partial(_step, share_of_length, pattern, None),
            APART: partial(_step, share_of_heads, pattern, None),
        }
        if worker.rank > 0:
            calls[WHOLE] = calls[SHARE] = lambda: None
        seconds = {setup: timed(device, parallel, call) for setup, call in calls.items()}
        of_patterns[name] = {
            "errors": errors,
            "seconds": seconds,
            **exposed(device, parallel, calls[ALL]),
        }
        parallel.close()
    return of_patterns
