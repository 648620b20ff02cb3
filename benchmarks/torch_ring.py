"""Dense ring attention beside torch's own (`_templated_ring_attention`, behind its context parallelism).

Both run in the same processes, on the same CPU kernel; torch rotates K and V by all-to-all. Causal shards are zigzag in
both. Torch's ring takes (B, H, N, D). It is timed on views of the same (B, N, H, D) tensors, as a model's projections
make them, and on contiguous copies in its own layout, which the kernel reads faster and whose making is not timed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from ring_dilated_attention.commands.errors import Squares, defined, make_inputs, squares
from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.ranks.context import ContextParallel

from .gate import gate, gate_squares, small_case
from .measure import Sizes, Times, dilated_call, make_tensors, quantiles, stopwatch
from .record import markdown, seconds, tensors

SUMMARY = "dense ring attention beside torch's own ring"
NUM_RANKS = 2
SETUPS = ("this library", "torch", "torch, on copies in its layout")


class Settings(NamedTuple):
    sizes: Sizes = Sizes(16_384, 4, 64)
    repeats: int = 15
    seconds: float = 900


FULL = Settings()
QUICK = Settings(Sizes(1024, 2, 32), 1, 120)


def num_steps(settings: Settings) -> int:
    return 2 * len(SETUPS) * (1 + settings.repeats)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    launch = Launch(NUM_RANKS, num_threads=1, is_pinned=True, seconds=settings.seconds)
    ranks = run_ranks(launch, _rank, settings, on_report=lambda rank, message: step(message))
    rows = []
    for i, is_causal in enumerate((False, True)):
        pattern = _pattern(settings.sizes, is_causal)
        passed = gate(settings.sizes, pattern, [rank[i][0] for rank in ranks])
        peer_passed = gate(settings.sizes, pattern, [rank[i][1] for rank in ranks])
        times = [[max(pair) for pair in zip(*(rank[i][2][s] for rank in ranks), strict=True)] for s in SETUPS]
        ours, theirs, in_their_layout = times
        rows.append(
            {
                "segment_lengths": pattern.segment_lengths,
                "dilation_rates": pattern.dilation_rates,
                "is_causal": is_causal,
                "sharding": "zigzag" if is_causal else "contiguous",
                **settings.sizes.as_json(),
                "ranks": NUM_RANKS,
                "threads_per_rank": launch.num_threads,
                "seconds": quantiles(ours),
                "torch_seconds": quantiles(theirs),
                "torch_layout_seconds": quantiles(in_their_layout),
                "ratio": quantiles(a / b for a, b in zip(ours, theirs, strict=True)),
                "ratio_to_torch_layout": quantiles(a / b for a, b in zip(ours, in_their_layout, strict=True)),
                "gate": passed,
                "torch_gate": peer_passed,
            }
        )
    return rows


def _rank(worker: Worker, settings: Settings) -> list[tuple[Squares, Squares, dict[str, list[float]]]]:
    torch_ring._cp_options.rotate_method = torch_ring._RotateMethod.ALL_TO_ALL
    results = []
    for is_causal in (False, True):
        torch_ring._cp_options.enable_load_balance = is_causal
        parallel = ContextParallel(exchange="ring", sharding="zigzag" if is_causal else "contiguous")
        pattern = _pattern(settings.sizes, is_causal)
        passed = gate_squares(settings.sizes, pattern, parallel)
        peer_passed = _peer_squares(settings.sizes, pattern, parallel)
        inputs, dout = make_tensors(settings.sizes, parallel)
        views = [x.detach().transpose(1, 2) for x in (*inputs, dout)]
        calls: dict[str, Callable[[], Times]] = {
            SETUPS[0]: dilated_call(settings.sizes, pattern, parallel),
            SETUPS[1]: _peer_call(views, is_causal),
            SETUPS[2]: _peer_call([x.contiguous() for x in views], is_causal),
        }
        times: dict[str, list[float]] = {setup: [] for setup in SETUPS}
        for repeat in range(1 + settings.repeats):
            for setup in SETUPS if repeat % 2 else SETUPS[::-1]:  # neither always has the other's heat behind it
                if worker.rank == 0:
                    worker.report(f"{'causal' if is_causal else 'full'}, {setup}")
                parallel.ranks.handshake(0, {"call": "start together"})
                found = calls[setup]()
                if repeat:
                    times[setup].append(found.both)
        results.append((passed, peer_passed, times))
    return results


def _pattern(sizes: Sizes, is_causal: bool) -> DilatedPattern:
    return DilatedPattern((sizes.seq_len,), (1,), is_causal=is_causal)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _peer_call(tensors: list[Tensor], is_causal: bool) -> Callable[[], Times]:
    """Torch's ring on query, key, value and the gradient of out, each (B, H, N, D)."""
    q, k, v, grad = tensors

    def call() -> Times:
        watch = stopwatch()
        out, lse = peer_forward(q, k, v, is_causal)
        forward = watch()
        peer_backward(grad, q, k, v, out, lse, is_causal)
        return Times(forward, watch())

    return call


def peer_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse of torch's ring, each (B, H, N, D) and (B, H, N)."""
    op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse, *_ = torch_ring._templated_ring_attention(_world(), 2, op, q, k, v, is_causal=is_causal, dropout_p=0.0)
    return out, lse


def peer_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return torch_ring._templated_ring_attention_backward(
        _world(), 2, op, grad, "grad_out", q, k, v, out, lse, is_causal, dropout_p=0.0
    )


def _peer_squares(sizes: Sizes, pattern: DilatedPattern, parallel: ContextParallel) -> Squares:
    """The peer's part of the gate: out, lse and gradients of a small case against the definition."""
    case = small_case(sizes, pattern)
    inputs, dout, _ = make_inputs(case, sizes.dtype)
    expected = defined(case, inputs, dout, None)
    q, k, v, grad = (parallel.shard(x).to(sizes.dtype).transpose(1, 2).contiguous() for x in (*inputs, dout))
    out, lse = peer_forward(q, k, v, pattern.is_causal)
    grads = peer_backward(grad, q, k, v, out, lse, pattern.is_causal)
    found = {"out": out, "dq": grads[0], "dk": grads[1], "dv": grads[2]}
    found_squares = {name: squares(x.transpose(1, 2), parallel.shard(expected[name])) for name, x in found.items()}
    return found_squares | {"lse": squares(lse.squeeze(-1).transpose(1, 2), parallel.shard(expected["lse"]))}


def table(rows: list[dict[str, Any]]) -> str:
    headers = ("attention", "this library, s", "torch's ring, s", "ours / torch's", "on copies, s", "ours / torch's")
    lines = [
        (
            f"dense{' causal, zigzag' if row['is_causal'] else ''}",
            *(seconds(row[name]) for name in ("seconds", "torch_seconds", "ratio")),
            *(seconds(row[name]) for name in ("torch_layout_seconds", "ratio_to_torch_layout")),
        )
        for row in rows
    ]
    first = rows[0]
    return (
        f"{first['seq_len']:,} positions over {first['ranks']} ranks of one thread, {tensors(first)}, forward and "
        "backward. Both passed the gate. Torch's ring on the same tensors, and on contiguous copies in its layout, "
        f"made before.\n\n{markdown(headers, lines)}"
    )
