"""Candidates on the same tensors, by turns, in a process of their own. One that fails leaves its reason."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_dilated_attention.commands.errors import (
    defined,
    make_inputs,
    relative,
    squares,
    tolerances,
)
from ring_dilated_attention.commands.local_ranks import Worker
from ring_dilated_attention.pattern import DilatedPattern

from .apart import Budget, measure_apart
from .candidates import OPS, OWN, Candidate, attention, backend_on, chosen
from .device import Mark, Profile, peak_bytes, profiled, release, synchronize
from .gate import GateError, gate, gate_squares, small_case
from .measure import Sizes, Times, make_tensors

QUANTITIES = ("out", "dq", "dk", "dv")


class Group(NamedTuple):
    """What is measured side by side.

    compares: candidates of the same pattern must agree at this size; their results are kept for it.
    """

    sizes: Sizes
    is_causal: bool
    candidates: tuple[Candidate, ...]
    repeats: int
    device: str
    compares: bool = True

    def pattern_of(self, candidate: Candidate) -> DilatedPattern:
        return candidate.pattern_at(self.sizes.seq_len, is_causal=self.is_causal)


class Found(NamedTuple):
    """What was measured of a candidate.

    gate: torch's own ops pass none. A peer's gate: the errors of what it computes.
    peak_bytes: what the call takes beyond query, key, value and dout.
    host_seconds: until the host has queued forward and backward.
    """

    gate: dict[str, Any]
    peak_bytes: int
    profile: Profile
    times: list[Times]
    host_seconds: list[float]


def measure_group(
    group: Group, step: Callable[[str], None], *, seconds: float, budget: Budget
) -> list[Found | str]:
    """For each candidate what was found, or the reason why nothing was. A process has so many seconds."""
    number = len(group.candidates)
    found, lost = measure_apart(
        _measure, group, number, lambda i: step(_title(group, i)), seconds, budget
    )
    return [found[i] if i in found else lost[i] for i in range(len(group.candidates))]


def _title(group: Group, i: int) -> str:
    return f"{group.sizes.seq_len:,} x {group.sizes.head_dim}, {group.candidates[i].name}"


def _measure(worker: Worker, group: Group, left_out: Collection[int]) -> dict[int, Found | str]:
    return measure_here(group, left_out, worker.report)


def measure_here(
    group: Group, left_out: Collection[int], report: Callable[[int], None]
) -> dict[int, Found | str]:
    """First everything that can go wrong, candidate by candidate, then the clock, by turns."""
    inputs, dout = make_tensors(group.sizes, device=group.device)
    calls: dict[int, _Call] = {}
    references: dict[Any, list[Tensor]] = {}
    found: dict[int, Found | str] = {}

    @contextmanager
    def attempt(i: int) -> Iterator[None]:
        report(i)
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever it was, the row says it
            found[i] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
        if isinstance(found.get(i), str):
            synchronize(group.device)  # raises if nothing runs in this process any more
            release(group.device)

    for i, candidate in enumerate(group.candidates):
        if i not in left_out:
            with attempt(i):
                calls[i] = _Call(group, candidate, inputs, dout)
                found[i] = _prepare(group, candidate, calls[i], references)
    references.clear()
    marks: dict[int, list[tuple[Mark, Mark, Mark]]] = {i: [] for i in calls}
    for _ in range(group.repeats):
        for i, call in calls.items():
            ready = found[i]
            if isinstance(ready, Found):
                with attempt(i):
                    start = time.perf_counter()
                    marks[i].append(call()[1])
                    ready.host_seconds.append(time.perf_counter() - start)
    synchronize(group.device)  # once, so that the host runs ahead of the device
    for i, ready in found.items():
        if isinstance(ready, Found):
            ready.times.extend(
                Times(middle.since(start), end.since(middle)) for start, middle, end in marks[i]
            )
    return found


class _Call:
    """Forward and backward of a candidate."""

    def __init__(
        self, group: Group, candidate: Candidate, inputs: list[Tensor], dout: Tensor
    ) -> None:
        self.device, self.op, self.inputs, self.dout = group.device, candidate.op, inputs, dout
        self.attend = attention(candidate, inputs[0], is_causal=group.is_causal)

    def __call__(self) -> tuple[list[Tensor], tuple[Mark, Mark, Mark]]:
        """out, dq, dk, dv, and the moments before, between and after forward and backward."""
        with chosen(self.op):
            start = Mark(self.device)
            out = self.attend(*self.inputs)
            middle = Mark(self.device)
            grads = torch.autograd.grad(out, self.inputs, self.dout)
            end = Mark(self.device)
        return [out.detach(), *grads], (start, middle, end)


def _prepare(
    group: Group, candidate: Candidate, call: _Call, references: dict[Any, list[Tensor]]
) -> Found:
    """The gate, a first call (which compiles), agreement with others of the same pattern, and a profile."""
    passed = _gate(group, candidate)
    results: list[Tensor] = []
    peak = peak_bytes(group.device, lambda: results.extend(call()[0]))
    if group.compares and candidate.how != "torchscale":
        reference = references.setdefault(candidate.pattern, results)
        passed |= {"agreement": _agreement(group, candidate, results, reference)}
    results = []
    profile = profiled(group.device, call)
    if candidate.op and not any(OPS[candidate.op].name in name for name in profile.attention_ops):
        ran = ", ".join(profile.attention_ops) or "none of torch's attention ops"
        raise RuntimeError(f"asked for {candidate.op}, and {ran} ran")
    return Found(passed, peak, profile, [], [])


def _gate(group: Group, candidate: Candidate) -> dict[str, Any]:
    pattern = group.pattern_of(candidate)
    with chosen(candidate.op):
        if candidate.how == OWN:
            backend = backend_on(group.device)
            # An op that is all there is may not take the column for a gradient of lse, and what is timed has none.
            through_lse = not candidate.op
            passed = gate_squares(
                group.sizes, pattern, backend=backend, device=group.device, through_lse=through_lse
            )
            return gate(group.sizes, pattern, [passed], device=group.device)
        if candidate.how == "torchscale":
            return {"errors": _peer_errors(group, candidate)}
    return {}


def _peer_errors(group: Group, candidate: Candidate) -> dict[str, float]:
    """Relative L2 errors of a peer against the definition, at the gate's size."""
    assert candidate.pattern is not None
    case = small_case(group.sizes, candidate.pattern)
    inputs, dout, _ = make_inputs(case, group.sizes.dtype)
    expected = defined(case, inputs, dout, None)
    leaves = [x.to(group.device, group.sizes.dtype).requires_grad_() for x in inputs]
    out = attention(candidate._replace(pattern=case.pattern), leaves[0], is_causal=group.is_causal)(
        *leaves
    )
    results = (out, *torch.autograd.grad(out, leaves, dout.to(out)))
    return {
        name: relative(squares(x, expected[name]))
        for name, x in zip(QUANTITIES, results, strict=True)
    }


def _agreement(
    group: Group, candidate: Candidate, results: list[Tensor], reference: list[Tensor]
) -> dict[str, float]:
    """The largest relative L2 difference at full size, with what is allowed: each may be off by its tolerance.

    The gate's size may call for another shape of tiles than the measured one; this is the same call.
    """
    tolerance = tolerances(
        small_case(group.sizes, group.pattern_of(candidate)), group.sizes.dtype, group.device
    )
    worst = {"error": 0.0, "tolerance": 1.0}
    for name, x, y in zip(QUANTITIES, results, reference, strict=True):
        error, allowed = (
            float((x.float() - y.float()).norm() / y.float().norm()),
            2 * tolerance[name],
        )
        if not error <= allowed:  # NaN fails
            raise GateError(
                f"{name} at {group.sizes.seq_len:,} positions differs by {error:.2e} from that of the first candidate "
                f"with this pattern, and {allowed:.2e} is allowed"
            )
        if error / allowed >= worst["error"] / worst["tolerance"]:
            worst = {"error": error, "tolerance": allowed}
    return worst
