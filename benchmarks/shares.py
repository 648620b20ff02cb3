"""From times to shares of the speed-up over dense attention that FLOPs allow. Numbers only, nothing runs here.

share = (time of dense / our time) * (our FLOPs / FLOPs of dense)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ring_dilated_attention.forecast.call_cost import pairs
from ring_dilated_attention.pattern import DilatedPattern

from .candidates import Candidate
from .device import Ceilings
from .measure import Sizes, quantiles, seconds_of
from .side_by_side import Found, Group

# Matrix products for each (query, key) pair, 2 * D operations each: two forward, five backward.
PRODUCTS = {"forward": 2, "forward + backward": 7}
OWN_DENSE_TARGET = 0.90
FASTEST_DENSE_TARGETS = {"forward": 0.70, "forward + backward": 0.60}


class DenseTime(NamedTuple):
    """Dense attention at a length: pairs, and for each stage the seconds of each repeat."""

    seq_len: int
    pairs: int
    seconds: dict[str, list[float]]


DenseTimes = dict[str, DenseTime]  # by name of the candidate


def count_pairs(sizes: Sizes, pattern: DilatedPattern) -> int:
    return sizes.batch * pairs(pattern, sizes.seq_len, sizes.num_heads)


def dense_times(group: Group, found: Sequence[Found | str]) -> DenseTimes:
    """What a group says of dense attention."""
    return {
        candidate.name: DenseTime(
            group.sizes.seq_len,
            count_pairs(group.sizes, group.pattern_of(candidate)),
            {stage: seconds_of(result.times, stage) for stage in PRODUCTS},
        )
        for candidate, result in zip(group.candidates, found, strict=True)
        if candidate.pattern is None and isinstance(result, Found)
    }


def share(
    seconds: Sequence[float], our_pairs: int, name: str, dense: DenseTime, stage: str
) -> dict[str, Any]:
    """The share kept. If dense attention was measured at another length, its time goes by FLOPs, that is by pairs."""
    theirs = quantiles(dense.seconds[stage])
    return {
        "candidate": name,
        "measured_at": dense.seq_len,
        "seconds_there": theirs,
        "share": quantiles(theirs["median"] * our_pairs / dense.pairs / t for t in seconds),
    }


def row_of(
    group: Group, candidate: Candidate, found: Found | str, dense: DenseTimes, most: Ceilings
) -> dict[str, Any]:
    row = candidate.as_json(group.sizes, group.is_causal, group.device)
    if isinstance(found, str):
        return row | {"reason": found}
    return row | {
        "stages": {stage: _stage(group, candidate, found, dense, stage) for stage in PRODUCTS},
        "ceilings": most._asdict(),
        "peak_bytes": found.peak_bytes,
        "attention_ops": found.profile.attention_ops,
        "kernels": [kernel._asdict() for kernel in found.profile.kernels[:8]],
        "gate": found.gate,
    }


def _stage(
    group: Group, candidate: Candidate, found: Found, dense: DenseTimes, stage: str
) -> dict[str, Any]:
    sizes = group.sizes
    seconds = seconds_of(found.times, stage)
    median = quantiles(seconds)["median"]
    counted = count_pairs(sizes, group.pattern_of(candidate))
    flops = PRODUCTS[stage] * 2 * sizes.head_dim * counted
    return {
        "seconds": quantiles(seconds),
        "flops": flops,
        "flops_per_second": flops / median,
        **(_shares(candidate, seconds, counted, dense, stage) if candidate.pattern else {}),
    }


def _shares(
    candidate: Candidate, seconds: Sequence[float], counted: int, dense: DenseTimes, stage: str
) -> dict[str, Any]:
    found = {}
    own = candidate.own_dense.name
    if own in dense:
        found["own_dense"] = share(seconds, counted, own, dense[own], stage) | {
            "target": OWN_DENSE_TARGET
        }
    if dense:
        name = min(dense, key=lambda name: quantiles(dense[name].seconds[stage])["median"])
        target = FASTEST_DENSE_TARGETS[stage]
        found["fastest_dense"] = share(seconds, counted, name, dense[name], stage) | {
            "target": target
        }
    return found
