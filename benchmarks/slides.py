"""GigaPath's slide encoder on slides of many tiles: time, memory and error, beside the original code where a checkout
of it is named, and a step of fine-tuning on one and on two ranks.

Weights and tiles are random: published weights are not ours to ship. The original's flash attention is torch's CPU op.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_dilated_attention.commands.local_ranks import Launch, Worker, run_ranks
from ring_dilated_attention.models import LongNetViT, segment_lengths_for, torchscale_attention
from ring_dilated_attention.models.longnet_vit import DILATION_RATES, NUM_HEADS, PUBLISHED, PublishedSize
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.ranks.context import ContextParallel

from . import checkout
from .gate import SMALL, GateError
from .measure import allocated, quantiles
from .padded import padded_reference
from .record import markdown, seconds
from .scaled import scaled_down

SUMMARY = "GigaPath's slide encoder: time, memory, error, beside the original code"
NUM_RANKS = 2
TARGET = 1.1 / NUM_RANKS
TINY = PublishedSize(8, 32, 2)


class Settings(NamedTuple):
    repeats: Mapping[int, int] = {1_000: 5, 10_000: 3, 100_000: 1}  # by tiles; one is timed while it is profiled
    size: PublishedSize = PUBLISHED["gigapath"]
    trained_size: PublishedSize = PUBLISHED["gigapath-flash"]
    trained_tiles: int = 100_000
    judged_tiles: int = 100_000  # up to which float64 judges
    compared_tiles: int = 1_000  # on which gradients are compared
    max_wsi_size: int = 262_144
    seconds: float = 3 * 3600


FULL = Settings()
QUICK = Settings({60: 2, 200: 1}, TINY, TINY, 200, 200, 60, 2048, 300)


class Found(NamedTuple):
    """One forward of one model, repeated."""

    seconds: list[float]
    peak_bytes: int
    embedding: Tensor


def num_steps(settings: Settings) -> int:
    return len(settings.repeats) + 3


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    launch = Launch(1, num_threads=torch.get_num_threads(), seconds=settings.seconds)
    rows = []
    for num_tiles in settings.repeats:
        step(f"{num_tiles:,} tiles")
        [found] = run_ranks(launch, _embed, settings, num_tiles)
        rows.append({"kind": "embedding", **_about(settings.size, num_tiles, settings), **found})
    step("gradients")
    [found] = run_ranks(launch, _compare_gradients, settings)
    rows.append({"kind": "gradients", **_about(settings.size, settings.compared_tiles, settings), **found})
    about = {"kind": "fine-tuning", **_about(settings.trained_size, settings.trained_tiles, settings)}
    step("fine-tuning on one rank")
    [alone] = run_ranks(launch, _train, settings)
    rows.append({**about, "ranks": 1, "rank": 0, **alone})
    step(f"fine-tuning on {NUM_RANKS} ranks")
    shared = launch._replace(world_size=NUM_RANKS, num_threads=max(1, launch.num_threads // NUM_RANKS))
    for rank, found in enumerate(run_ranks(shared, _train, settings)):
        ratio = found["peak_bytes"] / alone["peak_bytes"]
        rows.append({**about, "ranks": NUM_RANKS, "rank": rank, **found, "ratio": ratio, "target": TARGET})
    return rows


def _about(size: PublishedSize, num_tiles: int, settings: Settings) -> dict[str, Any]:
    pattern = DilatedPattern(segment_lengths_for(settings.max_wsi_size), DILATION_RATES, phase="blocked")
    head_dim = size.embed_dim // NUM_HEADS
    return {
        "segment_lengths": pattern.segment_lengths,
        "dilation_rates": pattern.dilation_rates,
        "is_causal": False,
        "seq_len": num_tiles + 1,
        "num_heads": NUM_HEADS,
        "head_dim": head_dim,
        "dtype": "float32",
        "tiles": num_tiles,
        **size._asdict(),
        "gate": gate(pattern, num_tiles + 1, head_dim),
    }


def gate(pattern: DilatedPattern, seq_len: int, head_dim: int) -> dict[str, Any]:
    """The attention at a small size, where lengths do not divide, against the definition over padded rows in float64.

    Tolerated is twice the error of that definition in float32.
    """
    small, length, _ = scaled_down(pattern, seq_len, SMALL)
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, length - 1, NUM_HEADS, head_dim, generator=generator).double() for _ in range(3)]
    single = [x.float() for x in exact]
    expected, _ = padded_reference(exact[0], exact[1], exact[2], small)
    reference, _ = padded_reference(single[0], single[1], single[2], small)
    ours = torchscale_attention(single[0], single[1], single[2], small)
    assert isinstance(ours, Tensor)
    error, tolerance = _relative(ours, expected), 2 * _relative(reference, expected)
    if not error <= tolerance:
        where = f"{small} at {length - 1} positions"
        raise GateError(f"{where}: relative L2 error {error:.2e} exceeds {tolerance:.2e}. Nothing was timed.")
    return {"passed": True, "seq_len": length - 1, "error": error, "tolerance": tolerance}


def _relative(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


def _model(
    size: PublishedSize, settings: Settings, *, parallel: ContextParallel | None = None, checkpointing: bool = False
) -> LongNetViT:
    torch.manual_seed(0)
    return LongNetViT(
        *size,
        NUM_HEADS,
        segment_lengths=segment_lengths_for(settings.max_wsi_size),
        dilation_rates=DILATION_RATES,
        global_pool=True,
        parallel=parallel,
        activation_checkpointing=checkpointing,
    )


def _slide(num_tiles: int, in_chans: int, parallel: ContextParallel | None = None) -> tuple[Tensor, Tensor]:
    """Random tiles of a square slide, line by line; on a rank its own."""
    rows = torch.arange(num_tiles) if parallel is None else parallel.positions(num_tiles)
    side = int(num_tiles**0.5) + 1
    coords = torch.stack((rows // side, rows % side), 1) * 256
    features = torch.empty(len(rows), in_chans)
    for line, row in zip(features, rows.tolist(), strict=True):
        line.normal_(generator=torch.Generator().manual_seed(row))
    return features[None], coords[None]


def _original(model: LongNetViT, size: PublishedSize, num_tiles: int, settings: Settings) -> tuple[Any, str | None]:
    """GigaPath's own model with the same weights, on a grid that just holds this slide; or why there is none."""
    reason = checkout.why_not("GIGAPATH_CHECKOUT")
    if reason:
        return None, reason
    grid = {"slide_ngrids": int(num_tiles**0.5) + 2, "max_wsi_size": settings.max_wsi_size}
    theirs = checkout.slide_encoder(*size, **grid, global_pool=True)
    theirs.load_state_dict(model.state_dict(), strict=True)
    return theirs.eval(), None


def _embed(worker: Worker, settings: Settings, num_tiles: int) -> dict[str, Any]:
    model = _model(settings.size, settings).eval()
    x, coords = _slide(num_tiles, settings.size.in_chans)
    theirs, reason = _original(model, settings.size, num_tiles, settings)
    calls = {"ours": partial(_first, model, x, coords)}
    if theirs is not None:
        calls["original"] = partial(_first, theirs, x, coords)
    found = _measure(calls, settings.repeats[num_tiles])
    rows: dict[str, dict[str, Any]] = {
        name: {"seconds": quantiles(one.seconds), "peak_bytes": one.peak_bytes} for name, one in found.items()
    }
    if theirs is None:
        rows["original"] = {"reason": reason}
    else:
        rows["original"]["difference"] = _relative(found["ours"].embedding, found["original"].embedding)
        rows["original"]["table_bytes"] = (1000**2 + 1) * settings.size.embed_dim * 4  # of the published grid
    calls.clear()
    del theirs
    if num_tiles <= settings.judged_tiles:
        judge = _first(model.double(), x.double(), coords)
        for name, one in found.items():
            rows[name]["error"] = _relative(one.embedding, judge)
    weight_bytes = 4 * sum(p.numel() for p in model.parameters())
    about = {"threads": torch.get_num_threads(), "weight_bytes": weight_bytes}
    return {**about, **rows["ours"], "original": rows["original"]}


@torch.no_grad()
def _first(model: Any, x: Tensor, coords: Tensor) -> Tensor:
    return model(x, coords)[0][0]


def _measure(calls: Mapping[str, Callable[[], Tensor]], repeats: int) -> dict[str, Found]:
    """Interleaved; a single repeat is timed while it is profiled, since it may take many minutes."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    embeddings = {}

    def call(name: str) -> None:
        start = time.perf_counter()
        embeddings[name] = calls[name]()
        times[name].append(time.perf_counter() - start)

    peaks = {name: allocated(partial(call, name)).peak_bytes for name in calls}
    if repeats > 1:
        for measured in times.values():
            measured.clear()
        for _ in range(repeats):
            for name in calls:
                call(name)
    return {name: Found(times[name], peaks[name], embeddings[name]) for name in calls}


def _compare_gradients(worker: Worker, settings: Settings) -> dict[str, Any]:
    """How far the original's gradient is from ours, which is that of the forward that both have."""
    model = _model(settings.size, settings)
    x, coords = _slide(settings.compared_tiles, settings.size.in_chans)
    theirs, reason = _original(model, settings.size, settings.compared_tiles, settings)
    if theirs is None:
        return {"original": {"reason": reason}}
    found = _compare_attention_gradients(model)
    gradients: list[dict[str, Tensor]] = []
    for one in (model, theirs):
        one(x, coords)[0].sin().sum().backward()
        gradients.append({name: p.grad for name, p in one.named_parameters() if p.grad is not None})
    for kind in ("q_proj.weight", "k_proj.weight", "v_proj.weight", ""):
        names = [name for name in gradients[0] if name.endswith(kind)]
        ours, original = (torch.cat([of[name].flatten() for name in names]) for of in gradients)
        found[kind or "all parameters"] = _relative(original, ours)
    return {"original": {"gradient_difference": found}}


def _compare_attention_gradients(model: LongNetViT) -> dict[str, float]:
    """The same of one attention at a small size, for inputs and a gradient that are all normal."""
    pattern, length, _ = scaled_down(model.encoder.pattern, 16 * SMALL, SMALL)
    head_dim = model.encoder.config.head_dim
    original = checkout.attention_module(pattern, NUM_HEADS, head_dim)
    generator = torch.Generator().manual_seed(0)
    *inputs, dout = (torch.randn(1, length, NUM_HEADS, head_dim, generator=generator) for _ in range(4))
    inputs = [x.requires_grad_() for x in inputs]
    ours = torchscale_attention(inputs[0], inputs[1], inputs[2], pattern)
    theirs, _ = original(*(x.flatten(2) for x in inputs))
    assert isinstance(ours, Tensor)
    gradients = (torch.autograd.grad(out, inputs, dout.view_as(out)) for out in (theirs, ours))
    names = ("attention's query", "attention's key", "attention's value")
    return {name: _relative(x, y) for name, x, y in zip(names, *gradients, strict=True)}


def _train(worker: Worker, settings: Settings) -> dict[str, Any]:
    """Forward and backward with activation checkpointing; this rank's tiles are counted."""
    parallel = ContextParallel(exchange="ring") if worker.world_size > 1 else None
    model = _model(settings.trained_size, settings, parallel=parallel, checkpointing=True)
    x, coords = _slide(settings.trained_tiles, settings.trained_size.in_chans, parallel)
    model(x[:, :64], coords[:, :64])[0].sum().backward()  # what is made once is not the step's
    start = time.perf_counter()
    found = allocated(lambda: model(x, coords)[0].sum().backward())
    return {
        "threads_per_rank": torch.get_num_threads(),
        "peak_bytes": x.nbytes + found.peak_bytes,
        "sent_bytes": found.sent_bytes,
        "seconds": quantiles([time.perf_counter() - start]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    embedded, gradients, trained = (
        [row for row in rows if row["kind"] == kind] for kind in ("embedding", "gradients", "fine-tuning")
    )
    first = embedded[0]
    texts = [
        f"Slide encoder of {first['depth']} layers of {first['embed_dim']} ({first['weight_bytes'] / 1e6:.0f} MB), "
        f"{first['num_heads']} heads, {first['in_chans']} features per tile, {first['dtype']}, {first['threads']} "
        "threads. Memory is the allocator's peak beside weights and tiles; error is against float64. The original is "
        "GigaPath's code with the same weights, its flash attention replaced by torch's CPU op, in the same run.",
        _embedding_table(embedded),
    ]
    originals = [row["original"] for row in (*embedded, *gradients)]
    texts += sorted({f"The original was not run: {found['reason']}." for found in originals if "reason" in found})
    texts += {
        "The original ran with a grid that just holds the slide. With 1,000 x 1,000 cells its table of positions is "
        f"another {found['table_bytes'] / 1e6:,.0f} MB."
        for found in originals
        if "table_bytes" in found
    }
    for row in gradients:
        differences = row["original"].get("gradient_difference", {})
        said = ", ".join(f"{name} {x:.1%}" for name, x in differences.items())
        texts += [f"Its gradient is off by (relative L2, {row['tiles']:,} tiles): {said}."] if said else []
    texts += [
        f"A step of fine-tuning, {trained[0]['tiles']:,} tiles, {trained[0]['depth']} layers of "
        f"{trained[0]['embed_dim']}, activation checkpointing; tiles are counted, weights and their gradients not.",
        _training_table(trained),
    ]
    return "\n\n".join(texts)


def _embedding_table(rows: list[dict[str, Any]]) -> str:
    headers = ("tiles", "ours, s", "ours, MB", "error", "original, s", "original, MB", "its error", "difference")
    lines = []
    for row in rows:
        found = row["original"]
        lines.append(
            (
                f"{row['tiles']:,}",
                seconds(row["seconds"]),
                f"{row['peak_bytes'] / 1e6:,.0f}",
                f"{row['error']:.1e}" if "error" in row else "",
                seconds(found["seconds"]) if "seconds" in found else "",
                f"{found['peak_bytes'] / 1e6:,.0f}" if "peak_bytes" in found else "",
                f"{found['error']:.1e}" if "error" in found else "",
                f"{found['difference']:.1e}" if "difference" in found else "",
            )
        )
    return markdown(headers, lines)


def _training_table(rows: list[dict[str, Any]]) -> str:
    headers = ("rank", "peak, MB", "of one rank's", "target", "sent, MB", "step, s")
    lines = [
        (
            f"{row['rank']} of {row['ranks']}",
            f"{row['peak_bytes'] / 1e6:,.1f}",
            f"{row['ratio']:.3f}" if "ratio" in row else "",
            f"at most {row['target']:.2f}" if "target" in row else "",
            f"{row['sent_bytes'] / 1e6:,.1f}",
            seconds(row["seconds"]),
        )
        for row in rows
    ]
    return markdown(headers, lines)
