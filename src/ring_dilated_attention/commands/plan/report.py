"""Writes the figures of `rda plan` as JSON and as text. No torch."""

from operator import itemgetter
from typing import Any

from ...forecast.call_cost import FLOPS_PER_PAIR, Figures
from ...forecast.clock import Hardware, StepTime, time_text
from ...forecast.large import ERRORS_TEXT
from ...forecast.ledger import Peak
from ...pattern import Branch
from ...plan.sizes import Sizes
from ..hardware import Machine, described, known
from ..numbers import DECIMAL, scaled, size_text
from ..output import aligned, wrapped

MOST_ROWS = 16  # with more ranks, the table has only the first, the last and the extremes


def of_each(figures: Figures, sizes: Sizes) -> dict[str, Any]:
    """The figures of ranks that were planned, one by one."""
    ranks = []
    for rank, row in enumerate(figures.ranks):
        assert row.memory is not None
        found = {
            "rank": rank,
            "positions": row.num_rows,
            "flops": FLOPS_PER_PAIR * sizes.unit * row.pairs,
            "share": row.pairs / figures.pairs if figures.pairs else 0.0,
            "forward_sent_bytes": row.forward_bytes,
            "sent_bytes": row.sent_bytes,
            "forward_peak_bytes": row.memory.forward.num_bytes,
        }
        ranks.append(found | _peak(row.memory.forward_backward))
    return {"balance": figures.balance, "branches": _branches(figures, sizes), "ranks": ranks}


def of_many(figures: Figures, num_ranks: int, sizes: Sizes) -> dict[str, Any]:
    """The figures of all ranks together, and of the rank that has most."""
    assert figures.peak is not None
    return {
        "num_ranks": num_ranks,
        "method": "counted; memory and time are estimates",
        "flops": FLOPS_PER_PAIR * sizes.unit * figures.pairs,
        "largest_flops": FLOPS_PER_PAIR * sizes.unit * figures.most_pairs,
        "busiest_rank": figures.busiest,
        "balance": figures.balance,
        "hops": figures.num_hops,
        "largest_forward_received_bytes": figures.forward_bytes,
        "largest_received_bytes": figures.sent_bytes,
        **_peak(figures.peak),
        "branches": _branches(figures, sizes),
        "step_seconds": None if figures.time is None else figures.seconds,
    }


def _peak(peak: Peak) -> dict[str, Any]:
    return {"peak_bytes": peak.num_bytes, "peak_items": [item._asdict() for item in peak.items]}


def _branches(figures: Figures, sizes: Sizes) -> list[dict[str, Any]]:
    names, unit = ("segment_length", "dilation_rate", "num_sharing"), sizes.unit * sizes.itemsize
    return [
        {name: getattr(share, name) for name in names} | {"forward_sent_bytes": share.sent * unit}
        for share in figures.branches
    ]


def model_json(step: StepTime, hardware: Hardware) -> dict[str, Any]:
    names = ("step_seconds", "forward_seconds", "backward_seconds", "efficiency")
    figures = {name: getattr(step, name) for name in names}
    return {"hardware": known(hardware), **figures, "ranks": [rank._asdict() for rank in step.ranks]}


def text(found: dict[str, Any], machine: Machine | None) -> str:
    exchange, is_planned = found["exchange"], "ranks" in found
    words = []
    if exchange["exchange"] != "none":
        words.append(f"exchange: {exchange['exchange']}: {exchange['reason']}")
        words += [_branch_line(i, row, exchange["exchange"]) for i, row in enumerate(found["branches"])]
    if machine is not None:
        words.append(described(machine.hardware, machine.source))
        words += [_model_line(found["model"])] if "model" in found else []
        words += [found["advice"]] if found["advice"] else []
    if found["shardings"]:
        words.append(_sharding_line(found["shardings"], is_planned=is_planned))
    figures = _text_of_each(found) if is_planned else _text_of_many(found)
    return "\n".join([figures, *map(wrapped, words)])


def _branch_line(i: int, row: dict[str, Any], exchange: str) -> str:
    what = "stays at home"
    if exchange == "all_to_all":
        what = "is computed by heads: each rank has all positions of some heads"
    elif row["forward_sent_bytes"]:
        sent = f"{row['forward_sent_bytes'] / 1e6:,.1f} MB of keys and values in a forward, over all ranks"
        what = f"travels among up to {row['num_sharing']:,} ranks, {sent}"
    return f"branch {i} ({Branch(row['segment_length'], row['dilation_rate'])}) {what}"


def _sharding_line(found: list[dict[str, Any]], *, is_planned: bool) -> str:
    about, moved, moves = ("", "sent", "sends") if is_planned else ("about ", "received", "receives")

    def described(row: dict[str, Any]) -> str:
        time = "" if row["step_seconds"] is None else f", {about}{time_text(row['step_seconds'])} modelled"
        return f"{row['sharding']} {row['balance']:.1%} ({row['sent_bytes'] / 1e6:,.1f} MB {moved} at most{time})"

    return f"balance by sharding, with near-equal shards: {', '.join(map(described, found))}: {_better(found, moves)}"


def _better(found: list[dict[str, Any]], moves: str) -> str:
    """Which sharding is faster; if times are unknown, which is more balanced. Differences below 0.1 % do not count."""
    is_timed = found[0]["step_seconds"] is not None
    costs = [row["step_seconds"] if is_timed else 1 / row["balance"] for row in found]
    if max(costs) > 1.001 * min(costs):
        best = next(row for row, cost in zip(found, costs, strict=True) if cost <= 1.001 * min(costs))
        return f"{best['sharding']} is the {'better one' if len(found) == 2 else 'best one'} here"
    alike = "equally fast" if is_timed else "equally balanced"
    sent = [row["sent_bytes"] for row in found]
    return alike if len(set(sent)) == 1 else f"{alike}, and {found[sent.index(min(sent))]['sharding']} {moves} less"


def _text_of_each(found: dict[str, Any]) -> str:
    """A table of ranks, the balance, and what the rank with the largest peak holds at that moment."""
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

    def unit_of(key: str, least: str) -> tuple[str, int]:
        """The prefix and the size of a column's unit. Numbers of six digits before the point would be too wide."""
        units = [unit for unit in DECIMAL.items() if unit[1] >= DECIMAL[least]]
        return next((unit for unit in units if max(row[key] for row in rows) < 10**5 * unit[1]), units[-1])

    flop, sent, peak = unit_of("flops", "G"), unit_of("sent_bytes", "M"), unit_of("peak_bytes", "M")
    headers: tuple[str, ...] = ("rank", "positions", f"work,\n{flop[0]}FLOP", "share")
    headers += (f"sent, {sent[0]}B,\nforward", "in all", f"peak, {peak[0]}B,\nforward", "in all")
    headers += () if model is None else ("waits,\nof a step",)
    units = {"forward_sent_bytes": sent, "sent_bytes": sent, "forward_peak_bytes": peak, "peak_bytes": peak}
    lines: list[tuple[str, ...]] = []
    for row in shown:
        sizes = [f"{row[name] / unit:,.1f}" for name, (_, unit) in units.items()]
        waits = () if model is None else (f"{_exposed_shares(model)[row['rank']]:.1%}",)
        work = (f"{row['rank']:,}", f"{row['positions']:,}", f"{row['flops'] / flop[1]:,.1f}", f"{row['share']:.1%}")
        lines.append((*work, *sizes, *waits))
    text = aligned(headers, lines)
    return text if shown is rows else f"{text}\n({len(rows):,} ranks; shown are the first, the last and the extremes)"


def _exposed_shares(model: dict[str, Any]) -> list[float]:
    """For each rank, the share of the step in which it waits."""
    whole = model["step_seconds"]
    return [rank["exposed_seconds"] / whole if whole else 0.0 for rank in model["ranks"]]


def _model_line(model: dict[str, Any]) -> str:
    step, forward, backward = (time_text(model[f"{name}_seconds"]) for name in ("step", "forward", "backward"))
    rest = f"{model['efficiency']:.1%}; a rank waits at most {max(_exposed_shares(model)):.1%} of the step"
    return f"modelled step: {step} (forward {forward}, backward {backward}), parallel efficiency {rest}"


def _text_of_many(found: dict[str, Any]) -> str:
    rows = [
        ("work of all ranks", scaled(found["flops"], "FLOP")),
        (f"largest work, rank {found['busiest_rank']:,}", scaled(found["largest_flops"], "FLOP")),
        ("balance (mean work over the largest)", f"{found['balance']:.1%}"),
        ("received by a rank in a forward, at most", size_text(found["largest_forward_received_bytes"])),
        ("received in both stages plus gradients sent, at most", size_text(found["largest_received_bytes"])),
        ("peak memory of a rank, at most", f"about {size_text(found['peak_bytes'])}"),
    ]
    if found["step_seconds"] is not None:
        rows.append(("modelled step", f"about {time_text(found['step_seconds'])}"))
    lines = [f"{found['num_ranks']:,} ranks, {found['method']}", aligned(("", "forward and backward"), rows)]
    lines.append("at its peak, the rank that holds most has about:")
    return "\n".join([*lines, *map(_item, found["peak_items"]), wrapped(ERRORS_TEXT)])
