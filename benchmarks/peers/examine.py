"""Examines one peer: are its results right for each kind of input, and what do its calls cost beside this library's?

Peer and library are timed in turn in the same processes. Run as a program, in the peer's environment, this file prints
the results as JSON on its last line.
"""

import json
import pickle
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_dilated_attention.commands.errors import (
    QUANTITIES,
    Case,
    Squares,
    defined,
    make_inputs,
    relative,
    squares,
    tolerances,
)
from ring_dilated_attention.commands.local_ranks import Launch, RankFailedError, Worker, run_ranks
from ring_dilated_attention.pattern import DilatedPattern
from ring_dilated_attention.ranks.context import ContextParallel

from ..gate import gate, gate_squares, small_case
from ..measure import Sizes, allocated, quantiles
from ..scaled import scaled_down
from .adapters import Attend, Call, this_library
from .catalogue import SEQ_LEN, Peer
from .environments import last_line

# This library may have twice the error of torch's attention in the same dtype under the same mask, plus a floor. A peer
# is right if its error is at most FACTOR times as large.
FACTOR = 5


class Settings(NamedTuple):
    """How peers are examined.

    inputs: the kinds of input, as `small` makes them.
    repeats: how often a call is timed.
    seconds: two limits, for the check of one kind of input, and for all measurements of cost.
    """

    sizes: Sizes = Sizes(SEQ_LEN, 4, 64)
    inputs: tuple[str, ...] = ("full", "causal", "uneven", "grouped", "packed", "16 bits")
    repeats: int = 5
    seconds: tuple[float, float] = (60, 900)


class Found(NamedTuple):
    """The costs that one rank measured. In each pair the peer's come first, and then this library's.

    seconds: CPU seconds of each turn. peak_bytes: the peak without the inputs. sent_bytes: in forward and backward.
    """

    seconds: tuple[list[float], list[float]]
    peak_bytes: tuple[int, int]
    sent_bytes: tuple[list[int], list[int]]
    gate: Squares


def examine(peer: Peer, settings: Settings) -> dict[str, Any]:
    """Check a peer for each kind of input, and measure its costs. Returns the entries of its row."""
    checks = {name: check(peer, settings, name) for name in settings.inputs}
    return {"inputs": checks, **cost(peer, settings)}


def check(peer: Peer, settings: Settings, name: str) -> dict[str, Any]:
    """Check a peer with one kind of input. Returns the "verdict", with errors or a reason.

    right         The results are right.
    wrong         The results are wrong, and the peer raises no error.
    refused       The peer raises an error. Other failures are "crashed" and "hung".
    not offered   The peer's interface cannot express this input.
    not run       The peer needs a GPU for this input, and has no stand-in.
    """
    if name in peer.lacks or name in peer.not_run:
        return {"verdict": "not run" if name in peer.not_run else "not offered"}
    case, dtype = small(peer, settings.sizes, name)
    launch = Launch(peer.ranks, seconds=settings.seconds[0])
    try:
        ranks = run_ranks(launch, _check, peer, case, dtype)
    except RankFailedError as error:
        text = str(error)
        verdict = "refused"
        if "no answer within" in text:
            verdict = "hung"
        elif "died without a word" in text:
            verdict = "crashed"
        return {"verdict": verdict, "reason": reason_of(error)}
    if strange := [shape for shape in ranks if isinstance(shape, str)]:
        return {"verdict": "wrong", "reason": strange[0]}
    of_torch = tolerances(case, dtype)
    errors = {}
    allowed = {}
    verdict = "right"
    for key in ranks[0]:
        difference = sum(rank[key][0] for rank in ranks)
        size = sum(rank[key][1] for rank in ranks)
        errors[key] = relative((difference, size))
        allowed[key] = FACTOR * of_torch[key]
        # NaN is not at most anything, so it is wrong too.
        if not errors[key] <= allowed[key]:
            verdict = "wrong"
    return {
        "verdict": verdict,
        "dtype": str(dtype).removeprefix("torch."),
        "errors": errors,
        "allowed": allowed,
    }


def small(peer: Peer, sizes: Sizes, name: str) -> tuple[Case, torch.dtype]:
    """A call with one kind of input, and its dtype. It is so small that the definition can be computed."""
    case = small_case(sizes, measured(peer, sizes))
    is_causal = name == "causal" or "full" in peer.lacks
    pattern = replace(case.pattern, is_causal=is_causal)
    case = case._replace(name=name, pattern=pattern)
    if name == "uneven":  # one position more than a number that ranks and segments divide
        case = case._replace(seq_len=case.seq_len + 1)
    elif name == "grouped":
        case = case._replace(num_kv_heads=case.num_heads // 2)
    elif name == "packed":
        case = case._replace(documents=(0, 2 * case.seq_len // 5, case.seq_len))
    dtype = peer.dtype
    if name == "16 bits":
        dtype = torch.float16 if peer.dtype == torch.bfloat16 else torch.bfloat16
    return case, dtype


def positions(peer: Peer, seq_len: int, worker: Worker) -> Tensor:
    """The positions of a rank's rows, in their order."""
    if peer.sharding == "stripe":
        return torch.arange(worker.rank, seq_len, worker.world_size)
    return ContextParallel(sharding=peer.sharding).positions(seq_len)


def _check(worker: Worker, peer: Peer, case: Case, dtype: torch.dtype) -> Squares | str:
    """Compare this rank's results with the definition of what the peer claims to compute.

    Returns for each quantity the sums of squares of errors and of expected values; or a text if out has a wrong shape.
    """
    inputs, dout, _ = make_inputs(case, dtype)
    expected = defined(case, inputs, dout, None)
    rows = positions(peer, case.seq_len, worker)
    leaves = [x[:, rows].to(dtype).requires_grad_(peer.has_backward) for x in inputs]
    with ExitStack() as lasting:
        call = Call(
            case.pattern,
            case.seq_len,
            case.num_heads,
            case.head_dim,
            case.documents,
            peer.sharding,
            lasting,
        )
        out = peer.adapter(call)(*leaves)
        if out.shape != leaves[0].shape:
            return f"out is {tuple(out.shape)} for a query of {tuple(leaves[0].shape)}"
        found = [out]
        if peer.has_backward:
            found += torch.autograd.grad(out, leaves, dout[:, rows].to(out))
    sums = {}
    names = [name for name in QUANTITIES if name != "lse"]
    for name, x in zip(names, found, strict=False):
        sums[name] = squares(x, expected[name][:, rows])
    return sums


def reason_of(error: Exception) -> str:
    """The last line of what the first failed rank reported, for a row."""
    first_rank, _, _ = str(error).partition("\nrank ")
    reason = last_line(first_rank).removeprefix("rank 0: ")
    return reason[:300]


def measured(peer: Peer, sizes: Sizes, pattern: DilatedPattern | None = None) -> DilatedPattern:
    """The peer's pattern, or another one of the catalogue, scaled to the length at which costs are measured."""
    scaled, _ = scaled_down(pattern or peer.pattern, SEQ_LEN, sizes.seq_len)
    return replace(scaled, is_causal=peer.is_causal)


def own_pattern(peer: Peer, sizes: Sizes) -> DilatedPattern:
    """The pattern that this library computes where its costs are compared with the peer's."""
    return measured(peer, sizes, peer.beside)


def cost(peer: Peer, settings: Settings) -> dict[str, Any]:
    """CPU seconds, memory and bytes sent, of a peer and of this library, and this library's gate.

    If the peer cannot be measured, the entry "reason" says why.
    """
    sizes = settings.sizes._replace(dtype=peer.dtype)
    try:
        launch = Launch(peer.ranks, num_threads=1, seconds=settings.seconds[1])
        ranks: list[Found] = run_ranks(launch, _cost, peer, sizes, settings.repeats)
    except RankFailedError as error:
        return {"reason": reason_of(error), "gate": gate(sizes, own_pattern(peer, sizes))}
    elements = sizes.batch * sizes.seq_len * sizes.num_heads * sizes.head_dim
    shard = elements * sizes.dtype.itemsize / peer.ranks
    turns = []
    sent = []
    peaks = []
    for who in (0, 1):
        of_ranks = [rank.seconds[who] for rank in ranks]
        turns.append([sum(turn) for turn in zip(*of_ranks, strict=True)])
        forward = max(rank.sent_bytes[who][0] for rank in ranks)
        backward = max(rank.sent_bytes[who][1] for rank in ranks)
        sent.append([forward / shard, backward / shard])
        peaks.append(max(rank.peak_bytes[who] for rank in ranks) / shard)
    return {
        "seconds": quantiles(turns[0]),
        "own_seconds": quantiles(turns[1]),
        "ratio": quantiles(theirs / own for theirs, own in zip(*turns, strict=True)),
        "peak_tensors": peaks[0],
        "own_peak_tensors": peaks[1],
        "sent_shards": sent[0],
        "own_sent_shards": sent[1],
        "gate": gate(sizes, own_pattern(peer, sizes), [rank.gate for rank in ranks]),
    }


def _cost(worker: Worker, peer: Peer, sizes: Sizes, repeats: int) -> Found:
    """On one rank: the costs of the peer and of this library, by turns with the same inputs."""
    own = peer.sharding
    if own == "stripe":
        own = "contiguous"
    with ExitStack() as lasting:
        claimed = measured(peer, sizes)
        common = (sizes.seq_len, sizes.num_heads, sizes.head_dim, None)
        parallel = ContextParallel(sharding=own, exchange="ring")
        passed = gate_squares(sizes, own_pattern(peer, sizes), parallel)
        generator = torch.Generator().manual_seed(worker.rank)
        num_rows = len(parallel.positions(sizes.seq_len))
        shape = (sizes.batch, num_rows, sizes.num_heads, sizes.head_dim)
        *leaves, dout = (torch.randn(shape, generator=generator).to(sizes.dtype) for _ in range(4))
        leaves = [x.requires_grad_(peer.has_backward) for x in leaves]
        attends = (
            peer.adapter(Call(claimed, *common, peer.sharding, lasting)),
            this_library(Call(own_pattern(peer, sizes), *common, own, lasting)),
        )

        def seconds(attend: Attend) -> float:
            """The CPU seconds of a forward, and of its backward if the peer has one."""
            dist.barrier()
            start = time.process_time()
            out = attend(*leaves)
            if peer.has_backward:
                torch.autograd.grad(out, leaves, dout)
            return time.process_time() - start

        def traffic(attend: Attend) -> tuple[int, list[int]]:
            """The peak of memory, and the bytes sent in forward and in backward."""
            seconds(attend)  # the first call also allocates what later calls use again
            outs: list[Tensor] = []
            dist.barrier()
            forward = allocated(lambda: outs.append(attend(*leaves)))
            if not peer.has_backward:
                return forward.peak_bytes, [forward.sent_bytes, 0]
            backward = allocated(lambda: torch.autograd.grad(outs[0], leaves, dout))
            outs.clear()
            both = allocated(lambda: seconds(attend))
            return both.peak_bytes, [forward.sent_bytes, backward.sent_bytes]

        peaks, sent = zip(*map(traffic, attends), strict=True)
        times: tuple[list[float], list[float]] = ([], [])
        for repeat in range(repeats):
            # each comes first in every second turn
            order = (0, 1) if repeat % 2 else (1, 0)
            for who in order:
                times[who].append(seconds(attends[who]))
    return Found(
        seconds=times,
        peak_bytes=(peaks[0], peaks[1]),
        sent_bytes=(sent[0], sent[1]),
        gate=passed,
    )


def encoded(peer: Peer, settings: Settings) -> str:
    """The argument for this file when it is run as a program: a peer and settings, as text.

    Both programs are ours, so it is safe to unpickle.
    """
    return pickle.dumps((peer, settings)).hex()


if __name__ == "__main__":
    peer, settings = pickle.loads(bytes.fromhex(sys.argv[1]))
    print(json.dumps(examine(peer, settings)))
