"""Peak memory of one forward and backward on a GPU: on the 8 GB card of the reports, and as long as this card holds.

Peaks are what torch's allocator gave out, inputs and gradients included; CUDA's own context comes on top. They are
compared with the eight tensors that any call needs: query, key, value, out, and their gradients.

On an H100 it should take about a minute, two processes to start among them.
"""

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_dilated_attention.attention import dilated_attention
from ring_dilated_attention.commands.errors import relative, squares, tolerances
from ring_dilated_attention.commands.local_ranks import Worker
from ring_dilated_attention.pattern import DilatedPattern

from .apart import Budget, measure_apart, refuse_empty
from .candidates import OWN, Candidate, backend_on
from .device import peak_bytes, release, resolve
from .gate import GateError, gate, gate_squares, small_case
from .measure import Sizes, make_tensors
from .record import branches, markdown, not_measured, tensors
from .side_by_side import QUANTITIES

SUMMARY = "peak memory on a GPU: half a million positions, and the most that fit"
MINUTES = 1
NEEDS_GPU = True
NUM_TENSORS = 8


class Settings(NamedTuple):
    """card_bytes: what a call may take when the longest sequence is looked for; None is all that there is."""

    device: str | None = "cuda"
    sizes: Sizes = Sizes(524_288, 12, 64, torch.float16)
    pattern: DilatedPattern = DilatedPattern((2048, 4096, 8192, 16_384, 32_768), (1, 2, 4, 6, 12))
    limit_bytes: float = 8e9
    card_bytes: float | None = None
    seconds: float = 120  # of a row
    budget: float = 420  # of the case


FULL = Settings()
QUICK = Settings(
    None, Sizes(2048, 4, 16, torch.float16), DilatedPattern((256, 512), (1, 2)), 8e6, 8e6, 60
)


def run(settings: Settings, step: Callable[[str], None]) -> list[dict[str, Any]]:
    settings = settings._replace(device=resolve(settings.device))
    rows, budget = [], Budget(settings.budget)
    for item in ITEMS:
        name = item.__name__.replace("_", " ")
        step(name)
        found, lost = measure_apart(
            _measure, (settings, item), 1, lambda _: None, settings.seconds, budget
        )
        result = found.get(0, lost.get(0, ""))
        rows.append(
            _Trial(settings).row | {"reason": f"{name}: {result}"}
            if isinstance(result, str)
            else result
        )
    refuse_empty(rows)
    return rows


def _measure(
    worker: Worker, what: tuple[Settings, "Item"], left_out: Collection[int]
) -> dict[int, Any]:
    """One row, in a process of its own: one that is ended takes no other with it."""
    settings, measure = what
    worker.report(0)
    try:
        return {0: measure(_Trial(settings))}
    except Exception as error:  # noqa: BLE001  whatever it was, the row says it
        return {0: f"{type(error).__name__}: {error}"[:300]}


class _Trial:
    """The calls of a row."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.sizes, self.pattern = settings, settings.sizes, settings.pattern
        self.device = settings.device or "cpu"
        self.backend = backend_on(self.device)
        self.row = Candidate(OWN, "", self.pattern).as_json(
            self.sizes, self.pattern.is_causal, self.device
        )

    def gate(self) -> dict[str, Any]:
        """The gate; and a first call at the same strides, since what is made once is not a later call's."""
        squares = gate_squares(self.sizes, self.pattern, backend=self.backend, device=self.device)
        passed = gate(self.sizes, self.pattern, [squares], device=self.device)
        self.call(1024)
        return passed

    def call(self, seq_len: int) -> None:
        """query, key, value and dout are made, then out and all gradients."""
        self.both_ways(*make_tensors(self.sizes._replace(seq_len=seq_len), device=self.device))

    def both_ways(self, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
        query, key, value = inputs
        out = dilated_attention(query, key, value, self.pattern, backend=self.backend)
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    def peak_row(self, seq_len: int) -> dict[str, Any]:
        release(self.device)
        peak = peak_bytes(self.device, partial(self.call, seq_len))
        tensor = (
            self.sizes.batch
            * seq_len
            * self.sizes.num_heads
            * self.sizes.head_dim
            * self.sizes.dtype.itemsize
        )
        return self.row | {
            "seq_len": seq_len,
            "peak_bytes": peak,
            "ratio": peak / (NUM_TENSORS * tensor),
        }

    def tail_errors(self, seq_len: int) -> dict[str, float]:
        """The last segments of a long call against a call of these alone, whose offsets are small: relative L2 errors.

        Raises:
            GateError: if they differ by more than twice the tolerance.
        """
        unit = math.lcm(*self.pattern.segment_lengths)
        start = (seq_len - 1) // unit * unit
        inputs, dout = make_tensors(self.sizes._replace(seq_len=seq_len), device=self.device)
        whole = [x[:, start:].clone() for x in self.both_ways(inputs, dout)]
        alone = self.both_ways(
            [x.detach()[:, start:].clone().requires_grad_() for x in inputs],
            dout[:, start:].clone(),
        )
        allowed = tolerances(small_case(self.sizes, self.pattern), self.sizes.dtype, self.device)
        errors = {}
        for name, x, y in zip(QUANTITIES, whole, alone, strict=True):
            errors[name] = relative(squares(x, y.cpu().double()))
            if not errors[name] <= 2 * allowed[name]:
                raise GateError(
                    f"{name} at the end of {seq_len:,} positions is off by {errors[name]:.2e}"
                )
        return errors


def given_length(trial: _Trial) -> dict[str, Any]:
    passed = trial.gate()
    limit = trial.settings.limit_bytes
    return trial.peak_row(trial.sizes.seq_len) | {"limit_bytes": limit, "gate": passed}


def longest_length(trial: _Trial) -> dict[str, Any]:
    passed, most = trial.gate(), trial.settings.card_bytes
    rows: dict[int, dict[str, Any]] = {}

    def fits(seq_len: int) -> bool:
        try:
            rows[seq_len] = trial.peak_row(seq_len)
        except RuntimeError as error:
            # torch's allocator, or a library that takes memory for itself
            if "out of memory" not in str(error):
                raise
            return False
        return most is None or rows[seq_len]["peak_bytes"] <= most

    power, seq_len = longest(fits, trial.sizes.seq_len)
    release(trial.device)
    return rows[seq_len] | {
        "card_bytes": most or torch.cuda.get_device_properties(trial.device).total_memory,
        "gate": passed | {"tail_seq_len": power, "tail": trial.tail_errors(power)},
    }


Item = Callable[[_Trial], dict[str, Any]]
ITEMS: tuple[Item, ...] = (given_length, longest_length)


def longest(fits: Callable[[int], bool], start: int) -> tuple[int, int]:
    """The largest start * 2**k that fits, and the largest of its steps, 16 to the next, that does.

    Raises:
        ValueError: if not even one position fits.
    """
    power = start
    while not fits(power):
        power //= 2
        if not power:
            raise ValueError("not even one position fits")
    while power >= start and fits(2 * power):
        power *= 2
    low, high = 16, 32
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(power * middle // 16) else (low, middle)
    return power, power * low // 16


def table(rows: list[dict[str, Any]]) -> str:
    headers = ("backend", "positions", "peak, GB", "of 8 tensors", "beside")
    measured = [row for row in rows if "reason" not in row]
    lines = [
        (
            row["candidate"],
            f"{row['seq_len']:,}",
            f"{row['peak_bytes'] / 1e9:.3g}",
            f"{row['ratio']:.3f}",
            f"limit: {row['limit_bytes'] / 1e9:g} GB"
            if "limit_bytes" in row
            else f"longest in {row['card_bytes'] / 1e9:.3g} GB",
        )
        for row in measured
    ]
    first = measured[0]
    title = f"{branches(first)}, {tensors(first)}, forward and backward, on {first['device']}."
    return "\n\n".join([title, markdown(headers, lines), *not_measured(rows)])
