"""`rda evaluate` against training's forward: tokens per second of the processor, for short contexts and long ones."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ring_dilated_attention.models import LongNetLM
from ring_dilated_attention.models.longnet_config import LongNetConfig
from ring_dilated_attention.training.scoring import Score, score

from .gate import GateError, gate
from .measure import Sizes
from .record import branches, markdown

SUMMARY = "rda evaluate against training's forward, by the length of its contexts"
BYTES = 256  # the vocabulary
ROUNDING = 1e-5  # relative, between the bits of whole contexts and those of caches, in float32


class Settings(NamedTuple):
    config: LongNetConfig = LongNetConfig(
        (512, 4096, 65_536), (1, 4, 16), vocab_size=BYTES, num_layers=2, embed_dim=128
    )
    num_bytes: int = 65_536
    contexts: tuple[int, ...] = (2, 64, 4096, 65_536)
    num_gated: int = 512  # bytes at least whose bits are compared with those of caches
    repeats: int = 5
    target: float = 1.0


FULL = Settings()
QUICK = Settings(LongNetConfig((32, 128), (1, 4), vocab_size=BYTES, num_layers=1, embed_dim=32), 512, (2, 64), 64, 2)


def num_steps(settings: Settings) -> int:
    return len(settings.contexts) * (1 + settings.repeats)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads that wait for each other take time of the processor, too
    try:
        return _rows(settings, step)
    finally:
        torch.set_num_threads(before)


def _rows(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    model, config = LongNetLM(settings.config), settings.config
    sizes = Sizes(settings.num_bytes, config.num_heads, config.embed_dim // config.num_heads)
    passed = gate(sizes, config.pattern)
    text = bytes(torch.randint(BYTES, (settings.num_bytes,)).tolist())
    rows = [_row(model, text, context, settings, step) for context in settings.contexts]
    return [row | sizes.as_json() | {"gate": passed} for row in rows]


def _row(
    model: LongNetLM, text: bytes, context: int, settings: Settings, step: Callable[[str], None]
) -> dict[str, Any]:
    bits = [_bits(model, text[: max(context, settings.num_gated)], context, num_bytes) for num_bytes in (None, 4096)]
    if abs(bits[0] - bits[1]) > ROUNDING * bits[1]:
        raise GateError(f"contexts of {context}: {bits[0]} bits per byte whole, {bits[1]} by caches")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[None]

    def forward() -> None:
        model.loss(tokens)

    calls: tuple[Callable[[], object], ...] = (forward, partial(_bits, model, text, context, None))
    times: list[list[float]] = [[], []]
    for repeat in range(1 + settings.repeats):
        step(f"contexts of {context:,}")
        for call, found in zip(calls, times, strict=True):
            began = time.process_time()  # what else runs on the machine disturbs it less than a clock
            call()
            if repeat:
                found.append(time.process_time() - began)
    ratios = [forward / evaluate for forward, evaluate in zip(*times, strict=True)]
    config = settings.config
    return {
        "segment_lengths": config.segment_lengths,
        "dilation_rates": config.dilation_rates,
        "is_causal": True,
        "num_layers": config.num_layers,
        "embed_dim": config.embed_dim,
        "context": context,
        "forward_seconds": statistics.median(times[0]),
        "seconds": statistics.median(times[1]),
        "speed": [min(ratios), statistics.median(ratios), max(ratios)],
        "target": settings.target,
        "bits_whole_and_by_caches": bits,
    }


def _bits(model: LongNetLM, text: bytes, context: int, num_bytes: int | None) -> float:
    total = Score()
    for scored in score(model, [text], context, num_bytes):
        total = total.plus(scored)
    return total.mean()


def table(rows: list[dict[str, Any]]) -> str:
    headers = (
        "context",
        "forward, tokens/s",
        "evaluate, tokens/s",
        "of the forward: median",
        "least",
        "most",
        "target",
    )
    lines = []
    for row in rows:
        speeds = [f"{row['seq_len'] / row[name]:,.0f}" for name in ("forward_seconds", "seconds")]
        least, median, most = (f"{ratio:.2f}x" for ratio in row["speed"])
        lines.append((f"{row['context']:,}", *speeds, median, least, most, f"at least {row['target']:g}x"))
    row = rows[0]
    said = (
        f"A model of {row['num_layers']} layers of {row['embed_dim']}, {branches(row)}. Tokens per second of the "
        f"processor, on one thread. The forward is that of a step of training: the loss of all {row['seq_len']:,} "
        "tokens as one sequence. Bits per byte equal those that are read through caches to within "
        f"{ROUNDING:g}."
    )
    return f"{said}\n\n{markdown(headers, lines)}"
