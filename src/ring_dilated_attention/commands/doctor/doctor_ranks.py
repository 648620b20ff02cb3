"""`rda doctor`: what the ranks find together. Every rank runs all of it, in the same order."""

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention import dilated_attention
from ...forecast.clock import Hardware
from ...pattern import DilatedPattern
from ...ranks.context import ContextParallel
from ...ranks.link import GroupLink
from ..compare import DTYPES, QUANTITIES, Case, measure, relative, tolerances
from ..hardware import NO_LINK

# Small ones say what a message takes whatever its size, large ones how many bytes a second.
SMALL, LARGE = 256, 16 * 2**20
REPEATS = 5
# Measurements apart from each other: a machine that does something else for a second is outvoted.
ROUNDS, SECONDS_APART = 3, 0.5
# Every pair of so many ranks is tried; of more each rank tries those at distances of powers of two.
MOST_PAIRS = 16
# Forward and backward of attention over so many rows are a kernel at work; over the second, hardly more than its call.
ROWS, FEW_ROWS, HEADS, HEAD_DIM = 2048, 32, 4, 64
MORE = 8  # tiles, to see what one takes whatever its size
CASE = Case("doctor", DilatedPattern((16, 96), (1, 3), is_causal=True), 96, 1, 4, 2, 16)


def told(parallel: ContextParallel, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Everybody's facts."""
    encoded = torch.tensor(list(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = parallel.ranks.records(torch.tensor([len(encoded)]), "the exchange of facts")
    record = torch.zeros(max(int(x) for x in sizes), dtype=torch.uint8)
    record[: len(encoded)] = encoded
    records = parallel.ranks.records(record, "the exchange of facts")
    return [json.loads(bytes(r[: int(n)].tolist())) for r, n in zip(records, sizes, strict=True)]


def agreement(parallel: ContextParallel, device: str) -> dict[str, Any]:
    """A forward and backward of all ranks against the definition: the result nearest to its tolerance."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    assert dtype in DTYPES
    squares = measure(CASE, dtype, "auto", device, parallel)
    own = torch.tensor([squares[name] for name in QUANTITIES], dtype=torch.float64)
    total = torch.stack(parallel.ranks.records(own, "the comparison with the definition")).sum(0)
    allowed = tolerances(CASE, dtype, device.partition(":")[0])
    found = [
        (relative((float(d), float(s))), allowed[name], name) for name, (d, s) in zip(QUANTITIES, total, strict=True)
    ]
    error, tolerance, name = max(found, key=lambda x: x[0] / x[1])
    return {"quantity": name, "error": error, "tolerance": tolerance, "passed": error <= tolerance}


def speeds(parallel: ContextParallel, device: str) -> dict[str, Any]:
    """What `rates` and `links` find, typically, and what `speedup` does."""
    rounds = []
    for i in range(ROUNDS):
        time.sleep(SECONDS_APART * (i > 0))
        found: dict[str, Any] = {"rates": rates(parallel, device)}
        if parallel.world_size > 1:
            found["links"] = links(parallel, device)
        rounds.append(found)
    return typical(rounds) | {"bfloat16_speedup": speedup(parallel, device)}


def typical(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each number the median."""
    columns = {name: [found[name] for found in rounds] for name in rounds[0]}
    return {
        name: typical(column) if isinstance(column[0], dict) else statistics.median(column)
        for name, column in columns.items()
    }


def rates(parallel: ContextParallel, device: str) -> dict[str, float]:
    """This rank's kernel at work while all others' are: rates of forward and backward, and what a call takes."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    many = ROWS if device == "cpu" else 8 * ROWS
    large = _times(parallel, device, dtype, many, DilatedPattern.dense())
    one = _times(parallel, device, dtype, FEW_ROWS, DilatedPattern.dense())
    several = _times(parallel, device, dtype, FEW_ROWS, DilatedPattern((FEW_ROWS,) * (1 + MORE), (1,) * (1 + MORE)))
    tile = max(0.0, *((b - a) / MORE for a, b in zip(one, several, strict=True)))
    work = [products * 2 * HEAD_DIM * HEADS * many**2 for products in (2, 5)]
    rate = [flops / max(a - b, a / 2) for flops, a, b in zip(work, large, one, strict=True)]
    return {
        "flops_per_second": rate[0],
        "backward_flops_per_second": rate[1],
        "call_seconds": tile,
        "around_seconds": max(0.0, max(one) - tile),
    }


def speedup(parallel: ContextParallel, device: str) -> float:
    """How many times as fast as in float32 attention is in bfloat16, forward and backward."""
    rows, dtypes = ROWS // 2 if device == "cpu" else 8 * ROWS, (torch.float32, torch.bfloat16)
    seconds = [sum(_times(parallel, device, dtype, rows, DilatedPattern.dense())) for dtype in dtypes]
    return seconds[0] / seconds[1]


def _times(
    parallel: ContextParallel, device: str, dtype: torch.dtype, rows: int, pattern: DilatedPattern
) -> tuple[float, float]:
    """Seconds of a forward and of a backward, the medians, begun together with all ranks."""
    shape = (1, rows, HEADS, HEAD_DIM)
    query, key, value = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    forward, backward = [], []
    for _ in range(REPEATS):
        parallel.ranks.handshake(1, {"call": "rda doctor"})
        began = time.perf_counter()
        out = dilated_attention(query, key, value, pattern)
        _finish(device)
        middle = time.perf_counter()
        assert isinstance(out, Tensor)
        torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
        _finish(device)
        forward.append(middle - began)
        backward.append(time.perf_counter() - middle)
    return statistics.median(forward[1:]), statistics.median(backward[1:])


def links(parallel: ContextParallel, device: str) -> dict[str, Any]:
    """Seconds of small and large messages to other ranks, by how far on in the ring they are; and of a handshake."""
    link = getattr(parallel.ranks, "all", None)
    assert isinstance(link, GroupLink)
    p = link.world_size
    times = []
    for _ in range(3 * REPEATS):
        began = time.perf_counter()
        parallel.ranks.handshake(1, {"call": "rda doctor"})
        times.append(time.perf_counter() - began)
    found: dict[str, Any] = {"handshake_seconds": statistics.median(times), "small": {}, "large": {}}
    distances = range(1, p) if p <= MOST_PAIRS else [2**k for k in range(p.bit_length()) if 2**k < p]
    on = device if link.backends.get(torch.device(device).type) else "cpu"
    for name, size in (("small", SMALL), ("large", LARGE)):
        leaves = torch.zeros(size, dtype=torch.uint8, device=on)
        comes = torch.empty_like(leaves)
        for distance in distances:
            onward, back = (link.rank + distance) % p, (link.rank - distance) % p
            seconds = []
            for _ in range(REPEATS):
                parallel.ranks.handshake(1, {"call": "rda doctor"})
                began = time.perf_counter()
                link.exchange([(leaves, onward)], [(comes, back)], "rda doctor").wait()
                _finish(on)
                seconds.append(time.perf_counter() - began)
            found[name][str(distance)] = statistics.median(seconds[1:])
    return found


def _finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def hardware_of(everyone: list[dict[str, Any]]) -> Hardware:
    """What a plan assumes of each rank: the slowest one's rates, and the slowest neighbours' link, if there is one."""
    slowest = {
        name: min(x["rates"][name] for x in everyone) for name in ("flops_per_second", "backward_flops_per_second")
    }
    call = max(x["rates"]["call_seconds"] for x in everyone)
    if "links" not in everyone[0]:
        return Hardware(slowest["flops_per_second"], NO_LINK, 0.0, slowest["backward_flops_per_second"], call)
    small = max(x["links"]["small"]["1"] for x in everyone)
    large = max(x["links"]["large"]["1"] for x in everyone)
    # What surrounds the tiles of a call is paid once a stage, as the handshake is.
    handshake = max(x["links"]["handshake_seconds"] + x["rates"]["around_seconds"] for x in everyone)
    # On a machine that others use the small one may have taken as long: then only the whole is known.
    bandwidth = LARGE / (large - small) if large > 2 * small else LARGE / large
    return Hardware(
        slowest["flops_per_second"], bandwidth, small, slowest["backward_flops_per_second"], call, handshake
    )


def pairs_of(everyone: list[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """(rank, peer, bytes per second) of all pairs that were tried, by place in the ring; the slowest first."""
    p = len(everyone)
    found = [
        (place, (place + int(distance)) % p, LARGE / seconds)
        for place, one in enumerate(everyone)
        for distance, seconds in one.get("links", {"large": {}})["large"].items()
    ]
    return sorted(found, key=lambda x: x[2])
