"""What `rda plan` prints of the plans: rows, and how they are shown as text and as JSON. No torch."""

from typing import Any, NamedTuple

from ..pattern import Branch
from ..plan.clock import Hardware, StepTime, time_text
from ..plan.memory import AttentionMemory
from .hardware import known
from .output import aligned

# More ranks than this are shown by their extremes only.
MOST_ROWS = 16


class RankRow(NamedTuple):
    """One rank's share of a call, forward and backward."""

    rank: int
    positions: int
    flops: int
    share: float
    forward_sent_bytes: int
    sent_bytes: int
    forward_peak_bytes: int
    peak_bytes: int


class BranchRow(NamedTuple):
    """A branch, the most ranks that share a segment of it, and the bytes of keys and values that one forward sends for
    it, over all ranks."""

    segment_length: int
    dilation_rate: int
    num_sharing: int
    forward_sent_bytes: int


class ShardingRow(NamedTuple):
    """One way of dealing positions to ranks: the mean work over the largest, the largest number of bytes that a rank
    sends, and the time of a step where one is modelled."""

    sharding: str
    balance: float
    sent_bytes: int
    step_seconds: float | None


def balance(rows: list[RankRow]) -> float:
    """Mean work over the largest: the efficiency that the distribution of work allows."""
    largest = max(row.flops for row in rows)
    return sum(row.flops for row in rows) / (len(rows) * largest) if largest else 1.0


def branch_lines(rows: list[BranchRow], *, is_dealt: bool) -> str:
    def described(row: BranchRow) -> str:
        if is_dealt:
            return "is computed by heads: each rank has all positions of some"
        if not row.forward_sent_bytes:
            return "stays at home"
        return f"travels, {row.forward_sent_bytes / 1e6:,.1f} MB of keys and values in a forward, over all ranks"

    return "\n".join(
        f"branch {i} ({Branch(row.segment_length, row.dilation_rate)}) {described(row)}" for i, row in enumerate(rows)
    )


def better(found: list[ShardingRow]) -> str:
    """Which sharding is faster or, where no time is modelled, more balanced; a difference below 0.1 % is none."""
    costs = [1 / row.balance if row.step_seconds is None else row.step_seconds for row in found]
    if max(costs) > 1.001 * min(costs):
        return f"{found[costs.index(min(costs))].sharding} is the better one here"
    alike = "equally balanced" if found[0].step_seconds is None else "equally fast"
    sent = [row.sent_bytes for row in found]
    return alike if len(set(sent)) == 1 else f"{alike}, and {found[sent.index(min(sent))].sharding} sends less"


def sharding_lines(found: list[ShardingRow]) -> str:
    def described(row: ShardingRow) -> str:
        time = "" if row.step_seconds is None else f", {time_text(row.step_seconds)} modelled"
        return f"{row.sharding} {row.balance:.1%} ({row.sent_bytes / 1e6:,.1f} MB sent at most{time})"

    return f"balance by sharding, near-equal: {', '.join(map(described, found))}: {better(found)}"


def table(rows: list[RankRow], step: StepTime | None) -> str:
    shown = rows
    if len(rows) > MOST_ROWS:
        extremes = {min(rows, key=key) for key in _KEYS} | {max(rows, key=key) for key in _KEYS}
        shown = sorted({rows[0], rows[-1]} | extremes)
    headers: tuple[str, ...] = (
        *("rank", "positions", "work, GFLOP", "share", "sent forward, MB", "sent in all, MB", "peak forward, MB"),
        *("peak, MB", "exposed, % of step"),
    )
    exposed = [""] * len(rows) if step is None else [f"{share:.1%}" for share in exposed_shares(step)]
    lines: list[tuple[str, ...]] = []
    for row in shown:
        sizes = (row.forward_sent_bytes, row.sent_bytes, row.forward_peak_bytes, row.peak_bytes)
        megabytes = [f"{size / 1e6:,.1f}" for size in sizes]
        work = (f"{row.positions:,}", f"{row.flops / 1e9:,.1f}", f"{row.share:.1%}")
        lines.append((f"{row.rank:,}", *work, *megabytes, exposed[row.rank]))
    if step is None:
        headers, lines = headers[:-1], [line[:-1] for line in lines]
    text = aligned(headers, lines)
    return text if shown is rows else f"{text}\n({len(rows):,} ranks; shown are the first, the last and the extremes)"


_KEYS = (lambda row: row.flops, lambda row: row.sent_bytes, lambda row: row.peak_bytes)


def summary(rows: list[RankRow], memories: list[AttentionMemory]) -> str:
    """Balance, and what the rank with the largest peak holds then."""
    largest = max(rows, key=lambda row: row.peak_bytes)
    items = memories[largest.rank].forward_backward.items
    lines = [f"balance: {balance(rows):.1%} (mean work over the largest)", f"rank {largest.rank} holds at its peak:"]
    return "\n".join(lines + [f"  {item.num_bytes / 1e6:>12,.1f} MB  {item.name}" for item in items])


def exposed_shares(step: StepTime) -> list[float]:
    """What part of the step each rank only waits."""
    whole = step.step_seconds
    return [rank.exposed_seconds / whole if whole else 0.0 for rank in step.ranks]


def model_line(step: StepTime) -> str:
    return (
        f"modelled step: {time_text(step.step_seconds)} (forward {time_text(step.forward_seconds)}, backward "
        f"{time_text(step.backward_seconds)}), parallel efficiency {step.efficiency:.1%}, exposed at most "
        f"{max(exposed_shares(step)):.1%} of it"
    )


def model_json(step: StepTime, hardware: Hardware | None) -> dict[str, Any]:
    assert hardware is not None
    return {
        "hardware": known(hardware),
        "step_seconds": step.step_seconds,
        "forward_seconds": step.forward_seconds,
        "backward_seconds": step.backward_seconds,
        "efficiency": step.efficiency,
        "ranks": [rank._asdict() for rank in step.ranks],
    }


def as_json(rows: list[RankRow], memories: list[AttentionMemory], branches: list[BranchRow]) -> dict[str, Any]:
    return {
        "balance": balance(rows),
        "branches": [row._asdict() for row in branches],
        "ranks": [
            row._asdict() | {"peak_items": [item._asdict() for item in memory.forward_backward.items]}
            for row, memory in zip(rows, memories, strict=True)
        ],
    }
