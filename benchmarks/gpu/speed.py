"""Speed and memory on one card, in five parts.

- ops: torch's attention ops, each by itself.
- share: how much of the speed-up over dense attention is reached that FLOPs allow. pairs = (query, key) pairs.

      share = (time of dense / our time) * (our pairs / pairs of dense)

- small: calls so short that the host's work counts.
- memory: the peak of one call.
- model: one step of a language model.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.functional import scaled_dot_product_attention

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.commands.local_ranks import Worker
from ring_dilated_attention.forecast.call_cost import pairs
from ring_dilated_attention.models import LongNetConfig, LongNetLM
from ring_dilated_attention.plan.rows import Rows
from ring_dilated_attention.run.views import rows_view

from ..device import Mark, peak_bytes, profiled, release, synchronize
from ..gate import gate, gate_squares
from ..measure import Sizes, Times, attend, make_tensors, quantiles, seconds_of
from ..parts import Row
from ..record import branches
from .settings import PAPER, Settings, Tile

# The number of matrix products, each with 2 * D operations for a (query, key) pair. A backward has 5 more.
PRODUCTS = {"forward": 2, "both": 7}
TARGETS = {"forward": 0.70, "both": 0.60}


class Op(NamedTuple):
    """One of torch's attention ops.

    implementation: the name of another flash attention in torch's registry; "" is torch's own.
    """

    backend: SDPBackend
    implementation: str = ""


OPS = {
    "cuDNN": Op(SDPBackend.CUDNN_ATTENTION),
    "flash": Op(SDPBackend.FLASH_ATTENTION),
    "flash 3": Op(SDPBackend.FLASH_ATTENTION, "FA3"),
    "flash 4": Op(SDPBackend.FLASH_ATTENTION, "FA4"),
    "memory-efficient": Op(SDPBackend.EFFICIENT_ATTENTION),
}


@contextmanager
def chosen(name: str) -> Iterator[None]:
    """A context in which torch's attention uses this op and no other. Raises if the op is not installed."""
    op = OPS[name]
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(op.backend))
        if op.implementation:
            activate_flash_attention_impl(op.implementation)
            stack.callback(restore_flash_attention_impl)
        yield


class Timed(NamedTuple):
    """The seconds of each repeat: on the device, and on the host until it had queued the forward and the backward."""

    times: list[Times]
    host_seconds: list[float]


def timed(
    device: str,
    call: Callable[[], Tensor],
    inputs: list[Tensor],
    dout: Tensor,
    repeats: int,
) -> Timed:
    """Time forwards and backwards of a call. Meanwhile the host does not wait for the device.

    repeats: how many are timed. One more comes first, to warm up.
    """
    marks = []
    host_seconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        start = Mark(device)
        out = call()
        middle = Mark(device)
        torch.autograd.grad(out, inputs, dout)
        marks.append((start, middle, Mark(device)))
        host_seconds.append(time.perf_counter() - began)
    synchronize(device)
    times = []
    for start, middle, end in marks[1:]:
        forward = middle.since(start)
        backward = end.since(middle)
        times.append(Times(forward, backward))
    return Timed(times, host_seconds[1:])


def dense(inputs: list[Tensor], *, is_causal: bool) -> Tensor:
    """torch's attention of query, key and value (B, N, H, D), over the whole length: out (B, N, H, D)."""
    query, key, value = (x.transpose(1, 2) for x in inputs)
    out = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    return out.transpose(1, 2)


def median_of(found: Timed, stage: str) -> float:
    """The median of the device's seconds. stage: forward, or both for forward and backward."""
    return statistics.median(seconds_of(found.times, stage))


def ops(worker: Worker, settings: Settings) -> None:
    """Report the error and the speed of each of torch's attention ops, at sizes that dilated attention calls it with.

    The error is the difference to the same call in float32.
    """
    for tile in settings.tiles:
        for is_causal in (False, True):
            inputs, dout = tile_tensors(settings, tile)
            exact = [x.detach().float().requires_grad_() for x in inputs]
            expected = dense(exact, is_causal=is_causal)
            expected_grads = torch.autograd.grad(expected, exact, dout.float())
            title = f"{tile.segments} segments of {tile.rows:,} rows of {tile.head_dim}"
            if tile.rate > 1:
                title += f", {tile.rate} positions apart"
            if is_causal:
                title += ", causal"
            results = [expected, *expected_grads]
            for name in OPS:
                row = op_row(name, settings, tile, inputs, dout, results, is_causal)
                worker.report({"what": f"{title}, {name}", **row})


def tile_tensors(settings: Settings, tile: Tile) -> tuple[list[Tensor], Tensor]:
    """Query, key, value and the gradient of out, each (segments, rows, H, D).

    The first three are views of tensors with all positions, and the gradient is contiguous, as in calls of dilated
    attention.
    """
    seq_len, num_heads = tile.rows * tile.rate, settings.num_heads
    sizes = Sizes(seq_len, num_heads, tile.head_dim, settings.dtype, tile.segments)
    inputs, dout = make_tensors(sizes, device=settings.device)
    rows = Rows(range(num_heads), 0, int(tile.rate > 1), tile.rate, tile.rows)
    views = []
    for x in (*inputs, dout):
        view = rows_view(x.detach(), rows)
        views.append(view.transpose(1, 2))
    *leaves, dout = views
    for leaf in leaves:
        leaf.requires_grad_()
    return leaves, dout.contiguous()


def op_row(
    name: str,
    settings: Settings,
    tile: Tile,
    inputs: list[Tensor],
    dout: Tensor,
    expected: list[Tensor],
    is_causal: bool,
) -> Row:
    """The row of one op for one tile, without its name. expected: out, dq, dk and dv in float32."""
    call = partial(dense, inputs, is_causal=is_causal)
    try:
        with chosen(name):
            out = call()
            found = [out, *torch.autograd.grad(out, inputs, dout)]
            measured = timed(settings.device, call, inputs, dout, 5)
    except Exception as error:  # noqa: BLE001  an op that is not installed is no failure
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return {"passed": None, "found": f"does not run: {reason[:200]}"}
    errors = []
    for x, y in zip(found, expected, strict=True):
        exact = y.detach()
        difference = x.detach().float() - exact
        errors.append(float(difference.norm() / exact.norm()))
    allowed = 2 * torch.finfo(settings.dtype).eps
    segment = DilatedPattern((tile.rows,), (1,), is_causal=is_causal)
    num_pairs = tile.segments * settings.num_heads * pairs(segment, tile.rows, 1)
    speeds = {}
    for stage, products in PRODUCTS.items():
        speeds[stage] = products * 2 * tile.head_dim * num_pairs / median_of(measured, stage)
    return {
        "passed": max(errors) <= allowed,
        "found": f"error {max(errors):.1e}; TFLOP/s: forward {speeds['forward'] / 1e12:.3g}, "
        f"both ways {speeds['both'] / 1e12:.3g}",
        "flops_per_second": speeds,
        "seconds": {stage: quantiles(seconds_of(measured.times, stage)) for stage in PRODUCTS},
    }


def share(worker: Worker, settings: Settings) -> None:
    """Report the share of the possible speed-up over dense attention, for each length, head dim and pattern.

    At the longest lengths dense attention is not run. Its time is scaled from a shorter length, which comes before.
    """
    fastest: dict[tuple[int, bool], tuple[int, dict[str, tuple[str, float]]]] = {}
    for seq_len, repeats in settings.lengths:
        for head_dim in settings.head_dims:
            for is_causal in (False, True):
                sizes = Sizes(seq_len, settings.num_heads, head_dim, settings.dtype)
                inputs, dout = make_tensors(sizes, device=settings.device)
                key = (head_dim, is_causal)
                if seq_len <= settings.dense_at_most:
                    of_stages = fastest_dense(settings, inputs, dout, repeats, is_causal)
                    fastest[key] = (seq_len, of_stages)
                for lengths_and_rates in settings.branches:
                    pattern = DilatedPattern(*lengths_and_rates, is_causal=is_causal)
                    row = share_row(settings, sizes, pattern, inputs, dout, repeats, fastest[key])
                    worker.report(row)
                del inputs, dout
                release(settings.device)


def fastest_dense(
    settings: Settings, inputs: list[Tensor], dout: Tensor, repeats: int, is_causal: bool
) -> dict[str, tuple[str, float]]:
    """For each stage (forward, both) the op in which dense attention is fastest, and its median seconds.

    An op that does not run is left out.
    """
    medians: dict[str, Timed] = {}
    for name in OPS:
        if name == "memory-efficient" and not settings.is_quick:
            continue  # this op is never the fastest, and slow at these lengths
        try:
            with chosen(name):
                call = partial(dense, inputs, is_causal=is_causal)
                medians[name] = timed(settings.device, call, inputs, dout, repeats)
        except Exception:  # noqa: BLE001  the part "ops" reports why an op does not run
            release(settings.device)
    fastest = {}
    for stage in PRODUCTS:
        seconds = {name: median_of(found, stage) for name, found in medians.items()}
        name = min(seconds, key=lambda name: seconds[name])
        fastest[stage] = (name, seconds[name])
    return fastest


def share_row(
    settings: Settings,
    sizes: Sizes,
    pattern: DilatedPattern,
    inputs: list[Tensor],
    dout: Tensor,
    repeats: int,
    fastest: tuple[int, dict[str, tuple[str, float]]],
) -> Row:
    """The row of one pattern. fastest: the length at which dense attention was timed, and its times by stage."""
    measured_gate = [gate_squares(sizes, pattern, device=settings.device)]
    passed = gate(sizes, pattern, measured_gate, device=settings.device)
    call = partial(attend, inputs, pattern, None)
    measured = timed(settings.device, call, inputs, dout, repeats)
    profile = profiled(settings.device, lambda: torch.autograd.grad(call(), inputs, dout))
    dense_len, of_stages = fastest
    dense_pattern = DilatedPattern((dense_len,), (1,), is_causal=pattern.is_causal)
    our_pairs = pairs(pattern, sizes.seq_len, sizes.num_heads)
    dense_pairs = pairs(dense_pattern, dense_len, sizes.num_heads)
    allowed = our_pairs / dense_pairs
    shares = {}
    words = []
    for stage in PRODUCTS:
        name, seconds = of_stages[stage]
        ours = median_of(measured, stage)
        shares[stage] = seconds * allowed / ours
        words.append(f"{stage} {ours * 1e3:.3g} ms, {shares[stage]:.0%} against {name}")
    passed_targets = None
    if not settings.is_quick:
        passed_targets = all(shares[stage] >= TARGETS[stage] for stage in PRODUCTS)
    pattern_words = branches(
        {
            "segment_lengths": pattern.segment_lengths,
            "dilation_rates": pattern.dilation_rates,
            "is_causal": pattern.is_causal,
        }
    )
    return {
        "what": f"{sizes.seq_len:,} positions, head dim {sizes.head_dim}, {pattern_words}",
        "passed": passed_targets,
        "found": "; ".join(words),
        "shares": shares,
        "seconds": {stage: quantiles(seconds_of(measured.times, stage)) for stage in PRODUCTS},
        "dense": {"seq_len": dense_len, **of_stages},
        "kernels": [kernel._asdict() for kernel in profile.kernels[:8]],
        "launches": profile.launches,
        "gate": passed,
    }


def small(worker: Worker, settings: Settings) -> None:
    """Report for short calls the seconds of the device and of the host, and the launches, beside dense attention."""
    for seq_len in settings.small_lengths:
        sizes = Sizes(seq_len, settings.num_heads, settings.head_dims[0], settings.dtype)
        inputs, dout = make_tensors(sizes, device=settings.device)
        calls = {"dense": partial(dense, inputs, is_causal=True)}
        for lengths_and_rates in settings.branches:
            pattern = DilatedPattern(*lengths_and_rates, is_causal=True)
            calls[f"{len(pattern.dilation_rates)} branches"] = partial(
                attend, inputs, pattern, None
            )
        found = {}
        words = []
        for name, call in calls.items():
            of_call = small_call(settings, call, inputs, dout)
            found[name] = of_call
            device_ms = 1e3 * of_call["seconds"]
            host_ms = 1e3 * of_call["host_seconds"]
            launches = of_call["launches"]
            words.append(f"{name} {device_ms:.3g} ms (host {host_ms:.3g}), {launches} launches")
        worker.report(
            {
                "what": f"{seq_len:,} positions",
                "passed": None,
                "found": "; ".join(words),
                "calls": found,
            }
        )


def small_call(
    settings: Settings, call: Callable[[], Tensor], inputs: list[Tensor], dout: Tensor
) -> dict[str, float]:
    """The seconds of a forward and backward on the device and on the host, and the kernels that it launches."""
    found = timed(settings.device, call, inputs, dout, 30)
    profile = profiled(settings.device, lambda: torch.autograd.grad(call(), inputs, dout))
    return {
        "seconds": median_of(found, "both"),
        "host_seconds": statistics.median(found.host_seconds),
        "launches": profile.launches,
    }


def memory(worker: Worker, settings: Settings) -> None:
    """Report the peak memory of a forward and backward over half a million positions, inputs included."""
    sizes = settings.memory
    branches_of = settings.branches[0] if settings.is_quick else PAPER
    pattern = DilatedPattern(*branches_of)

    def call() -> list[Tensor]:
        inputs, dout = make_tensors(sizes, device=settings.device)
        out = attend(inputs, pattern, None)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    call()  # the first call also allocates what later calls use again
    release(settings.device)
    peak = peak_bytes(settings.device, call)
    tensor = sizes.seq_len * sizes.num_heads * sizes.head_dim * sizes.dtype.itemsize
    eight = 8 * tensor  # query, key, value, out and their gradients
    worker.report(
        {
            "what": f"{sizes.seq_len:,} positions, {sizes.num_heads} heads of {sizes.head_dim}",
            "passed": peak <= settings.memory_bytes,
            "found": f"{peak / 1e9:.3g} GB of at most {settings.memory_bytes / 1e9:g}; "
            f"{peak / eight:.2f} times query, key, value, out and their gradients",
            "peak_bytes": peak,
        }
    )


def model(worker: Worker, settings: Settings) -> None:
    """Report the seconds and the peak memory of one step of a LongNetLM that recomputes activations."""
    pattern = settings.branches[0] if settings.is_quick else PAPER
    width = settings.model_width
    config = LongNetConfig(
        *pattern, embed_dim=width, num_heads=settings.num_heads, num_layers=settings.model_layers
    )
    net = LongNetLM(config, activation_checkpointing=True).to(settings.device)
    tokens = torch.randint(256, (1, settings.model_length), device=settings.device)

    losses: list[Tensor] = []

    def step() -> None:
        with torch.autocast(torch.device(settings.device).type, torch.bfloat16):
            loss = net.loss(tokens)
        loss.backward()
        net.zero_grad()
        losses.append(loss.detach())

    step()
    begun = time.perf_counter()
    peak = peak_bytes(settings.device, step)
    synchronize(settings.device)
    seconds = time.perf_counter() - begun
    worker.report(
        {
            "what": f"{settings.model_layers} layers of {width}, {settings.model_length:,} bytes",
            "passed": all(map(math.isfinite, losses)),
            "found": f"{seconds:.3g} s forward and backward, {peak / 1e9:.3g} GB beside the weights, "
            f"loss {losses[-1]:.3g}",
            "seconds": seconds,
            "peak_bytes": peak,
        }
    )
