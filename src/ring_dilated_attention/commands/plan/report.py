"""What `rda plan` finds of one attention call, as JSON has it and as text. No torch."""

from operator import itemgetter
from typing import Any, NamedTuple

from ...forecast.call import Figures
from ...forecast.clock import Hardware, StepTime, time_text
from ...forecast.large import ERRORS_TEXT
from ...forecast.ledger import AttentionMemory
from ...pattern import Branch
from ...plan.exchange import RankPlan
from ...plan.job import Job
from ...plan.sizes import Sizes
from ..hardware import Machine, described, known
from ..numbers import scaled, size_text
from ..output import aligned, wrapped

# More ranks than this are shown by their extremes only.
MOST_ROWS = 16
FLOPS_PER_PAIR = 7 * 2  # of each number of a head: 2 products forward, 5 backward, 2 operations each


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


class ShardingRow(NamedTuple):
    """One way of dealing positions to ranks: the mean work over the largest, the largest number of bytes that a rank
    sends (of many ranks: receives), and the time of a step where one is modelled."""

    sharding: str
    balance: float
    sent_bytes: int
    step_seconds: float | None


def rank_rows(plans: list[RankPlan], memories: list[AttentionMemory], sizes: Sizes) -> list[RankRow]:
    flops = [FLOPS_PER_PAIR * sizes.unit * x.plan.pairs for x in plans]
    rows = []
    for rank, (plan, memory, work) in enumerate(zip(plans, memories, flops, strict=True)):
        sent = [plan.bytes_sent(sizes, backward=backward) for backward in (False, True)]
        rows.append(
            RankRow(
                rank=rank,
                positions=plan.num_rows,
                flops=work,
                share=work / sum(flops) if sum(flops) else 0.0,
                forward_sent_bytes=sent[0],
                sent_bytes=sum(sent),
                forward_peak_bytes=memory.forward.num_bytes,
                peak_bytes=memory.forward_backward.num_bytes,
            )
        )
    return rows


def of_each(
    rows: list[RankRow], memories: list[AttentionMemory], figures: Figures, sizes: Sizes, *, is_dealt: bool
) -> dict[str, Any]:
    """Of so few ranks that each was planned."""
    return {
        "balance": figures.balance,
        "branches": _branches(figures, sizes, is_dealt=is_dealt),
        "ranks": [
            row._asdict() | {"peak_items": [item._asdict() for item in memory.forward_backward.items]}
            for row, memory in zip(rows, memories, strict=True)
        ],
    }


def of_many(figures: Figures, job: Job, sizes: Sizes) -> dict[str, Any]:
    """Of all ranks together, and of the one with most."""
    assert figures.peak is not None
    time = figures.time
    return {
        "num_ranks": job.num_ranks,
        "method": "counted; memory and time are estimates",
        "flops": FLOPS_PER_PAIR * sizes.unit * figures.pairs,
        "largest_flops": FLOPS_PER_PAIR * sizes.unit * figures.most_pairs,
        "busiest_rank": figures.busiest,
        "balance": figures.balance,
        "hops": figures.num_hops,
        "largest_forward_received_bytes": figures.forward_bytes,
        "largest_received_bytes": figures.sent_bytes,
        "peak_bytes": figures.peak.num_bytes,
        "peak_items": [item._asdict() for item in figures.peak.items],
        "branches": _branches(figures, sizes, is_dealt=False),
        "step_seconds": None if time is None else time.seconds,
    }


def _branches(figures: Figures, sizes: Sizes, *, is_dealt: bool) -> list[dict[str, Any]]:
    return [
        {
            "segment_length": share.segment_length,
            "dilation_rate": share.dilation_rate,
            "num_sharing": share.num_sharing,
            "forward_sent_bytes": 0 if is_dealt else share.sent * sizes.unit * sizes.itemsize,
        }
        for share in figures.branches
    ]


def model_json(step: StepTime, hardware: Hardware) -> dict[str, Any]:
    return {
        "hardware": known(hardware),
        "step_seconds": step.step_seconds,
        "forward_seconds": step.forward_seconds,
        "backward_seconds": step.backward_seconds,
        "efficiency": step.efficiency,
        "ranks": [rank._asdict() for rank in step.ranks],
    }


def text(found: dict[str, Any], machine: Machine | None) -> str:
    exchange = found["exchange"]
    words = []
    if exchange["exchange"] != "none":
        words.append(f"exchange: {exchange['exchange']}: {exchange['reason']}")
        words += [_branch_line(i, row, exchange["exchange"]) for i, row in enumerate(found["branches"])]
    if machine is not None:
        words.append(described(machine.hardware, machine.source))
        words += [_model_line(found["model"])] if "model" in found else []
        words += [found["advice"]] if found["advice"] else []
    if found["shardings"]:
        rows = [ShardingRow(**row) for row in found["shardings"]]
        words.append(sharding_line(rows, is_planned="ranks" in found))
    figures = _text_of_each(found) if "ranks" in found else _text_of_many(found)
    return "\n".join([figures, *map(wrapped, words)])


def _branch_line(i: int, row: dict[str, Any], exchange: str) -> str:
    what = "stays at home"
    if exchange == "all_to_all":
        what = "is computed by heads: each rank has all positions of some"
    elif row["forward_sent_bytes"]:
        what = (
            f"travels among up to {row['num_sharing']:,} ranks, {row['forward_sent_bytes'] / 1e6:,.1f} MB of keys and "
            "values in a forward, over all ranks"
        )
    return f"branch {i} ({Branch(row['segment_length'], row['dilation_rate'])}) {what}"


def sharding_line(found: list[ShardingRow], *, is_planned: bool) -> str:
    about, moves = ("", ("sent", "sends")) if is_planned else ("about ", ("received", "receives"))

    def described(row: ShardingRow) -> str:
        time = "" if row.step_seconds is None else f", {about}{time_text(row.step_seconds)} modelled"
        return f"{row.sharding} {row.balance:.1%} ({row.sent_bytes / 1e6:,.1f} MB {moves[0]} at most{time})"

    return f"balance by sharding, near-equal: {', '.join(map(described, found))}: {better(found, moves[1])}"


def better(found: list[ShardingRow], moves: str) -> str:
    """Which sharding is faster or, where no time is modelled, more balanced; a difference below 0.1 % is none."""
    costs = [1 / row.balance if row.step_seconds is None else row.step_seconds for row in found]
    if max(costs) > 1.001 * min(costs):
        return f"{found[costs.index(min(costs))].sharding} is the better one here"
    alike = "equally balanced" if found[0].step_seconds is None else "equally fast"
    sent = [row.sent_bytes for row in found]
    return alike if len(set(sent)) == 1 else f"{alike}, and {found[sent.index(min(sent))].sharding} {moves} less"


def _text_of_each(found: dict[str, Any]) -> str:
    """A row for each rank, the balance, and what the rank with the largest peak holds then."""
    rows = found["ranks"]
    largest = max(rows, key=lambda row: row["peak_bytes"])
    lines = [table(rows, found.get("model")), f"balance: {found['balance']:.1%} (mean work over the largest)"]
    lines.append(f"rank {largest['rank']} holds at its peak:")
    return "\n".join(lines + [_item(item) for item in largest["peak_items"]])


def _item(item: dict[str, Any]) -> str:
    return f"  {item['num_bytes'] / 1e6:>12,.1f} MB  {item['name']}"


def table(rows: list[dict[str, Any]], model: dict[str, Any] | None) -> str:
    shown = rows
    if len(rows) > MOST_ROWS:
        keys = ("flops", "sent_bytes", "peak_bytes")
        extremes = [pick(rows, key=itemgetter(key))["rank"] for key in keys for pick in (min, max)]
        shown = [rows[rank] for rank in sorted({0, len(rows) - 1, *extremes})]
    headers: tuple[str, ...] = ("rank", "positions", "work,\nGFLOP", "share")
    headers += ("sent, MB,\nforward", "in all", "peak, MB,\nforward", "in all", "waits,\nof a step")
    lines: list[tuple[str, ...]] = []
    for row in shown:
        names = ("forward_sent_bytes", "sent_bytes", "forward_peak_bytes", "peak_bytes")
        megabytes = [f"{row[name] / 1e6:,.1f}" for name in names]
        work = (f"{row['positions']:,}", f"{row['flops'] / 1e9:,.1f}", f"{row['share']:.1%}")
        waits = () if model is None else (f"{exposed_shares(model)[row['rank']]:.1%}",)
        lines.append((f"{row['rank']:,}", *work, *megabytes, *waits))
    text = aligned(headers if model else headers[:-1], lines)
    return text if shown is rows else f"{text}\n({len(rows):,} ranks; shown are the first, the last and the extremes)"


def exposed_shares(model: dict[str, Any]) -> list[float]:
    """What part of the step each rank only waits."""
    whole = model["step_seconds"]
    return [rank["exposed_seconds"] / whole if whole else 0.0 for rank in model["ranks"]]


def _model_line(model: dict[str, Any]) -> str:
    step, forward, backward = (time_text(model[f"{name}_seconds"]) for name in ("step", "forward", "backward"))
    return (
        f"modelled step: {step} (forward {forward}, backward {backward}), parallel efficiency "
        f"{model['efficiency']:.1%}, exposed at most {max(exposed_shares(model)):.1%} of it"
    )


def _text_of_many(found: dict[str, Any]) -> str:
    rows = [
        ("work of all ranks", scaled(found["flops"], "FLOP")),
        (f"largest work, rank {found['busiest_rank']:,}", scaled(found["largest_flops"], "FLOP")),
        ("balance (mean work over the largest)", f"{found['balance']:.1%}"),
        ("received by a rank in a forward, at most", size_text(found["largest_forward_received_bytes"])),
        ("and in all, gradients sent included", size_text(found["largest_received_bytes"])),
        ("peak memory of a rank", f"about {size_text(found['peak_bytes'])}"),
    ]
    if found["step_seconds"] is not None:
        rows.append(("modelled step", f"about {time_text(found['step_seconds'])}"))
    lines = [f"{found['num_ranks']:,} ranks, {found['method']}", aligned(("", "forward and backward"), rows)]
    return "\n".join([*lines, *(_item(item) for item in found["peak_items"]), wrapped(ERRORS_TEXT)])
