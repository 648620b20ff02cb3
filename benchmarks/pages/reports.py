"""Makes docs/reports.md: tables and promises of five reports on dilated attention, with our records beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ring_dilated_attention.training.files import check_mine, write_whole

from ..record import Record, markdown, provenance, read_record
from . import figures
from .evidence import TEMPLATES, render

MAKER = "python -m benchmarks --reports"
HEAD = (
    f"# The five reports, answered\n\nMade by `{MAKER}` from the records in `benchmarks/results/`."
)
TEMPLATE = TEMPLATES / "reports.md.jinja"
NEEDED = ("reports", "ranks", "scaling", "overlap", "million", "billion", "crossover")


def write_reports(path: Path, folder: Path) -> Path:
    """Make the page from the records in `folder`.

    Raises:
        ValueError: if a record that the page quotes is missing, or if the file exists and is not this page.
    """
    check_mine(path, is_reports, MAKER)
    if missing := [name for name in NEEDED if not (folder / f"{name}.json").exists()]:
        raise ValueError(
            f"--reports: there is no record of {missing[0]} in {folder}, and the page quotes it."
        )
    records = {name: read_record(folder / f"{name}.json") for name in NEEDED}
    values = said(records) | cells(records["reports"]["rows"])
    peers = ""
    if (folder / "peers.json").exists():
        peers = ", and [others](../benchmarks/README.md#peers)"
    page = render(TEMPLATE.name, head=HEAD, table=table, peers=peers, **values)
    write_whole(path, page.encode(), is_reports, MAKER)
    return path


def is_reports(file: BinaryIO) -> bool:
    """Whether a file is this page. It is known by its first lines."""
    return file.read(len(HEAD)) == HEAD.encode()


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in markdown. The template gives lists."""
    return markdown(tuple(headers), [tuple(row) for row in rows])


def cells(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Values for the template's tables. Functions such as `ms` make the cell of a length and a number of ranks."""
    found = {(row["heads"], row["seq_len"], row["ranks"]): row for row in rows}

    def ms(n: int, p: int, heads: str = "split") -> str:
        """Milliseconds of a forward, and of forward and backward."""
        row = found[heads, n, p]
        forward = 1e3 * row["forward_seconds"]["median"]
        both = 1e3 * row["seconds"]["median"]
        return f"{forward:,.0f} / {both:,.0f}"

    def size(n: int, p: int, heads: str = "split", unit: float = 1e6, places: int = 1) -> str:
        """The peak memory of a forward, and of forward and backward. unit: in bytes."""
        row = found[heads, n, p]
        forward = row["forward_bytes"] / unit
        both = row["forward_backward_bytes"] / unit
        return f"{forward:,.{places}f} / {both:,.{places}f}"

    def ours(heads: str) -> str:
        """The table of all lengths. heads: "split" has one branch for each head, and "all" has every branch."""
        headers = (
            "positions",
            "1 rank, ms",
            "2 ranks, ms",
            "speed-up",
            "from",
            "to",
            "1 rank, MB",
            "2 ranks, MB each",
        )
        lines = []
        for n in sorted({row["seq_len"] for row in rows}):
            speed_up = found[heads, n, 2]["speed_up"]
            line = (
                f"{n:,}",
                ms(n, 1, heads),
                ms(n, 2, heads),
                f"{speed_up['median']:.2f}",
                f"{speed_up['min']:.2f}",
                f"{speed_up['max']:.2f}",
                size(n, 1, heads),
                size(n, 2, heads),
            )
            lines.append(line)
        return f"Heads: {heads}.\n\n{markdown(headers, lines)}"

    two = [row for row in rows if row["ranks"] == 2]
    # of calls that send messages, and of those that send none
    lengths: dict[bool, list[int]] = {True: [], False: []}
    shares: dict[bool, list[float]] = {True: [], False: []}
    for row in two:
        alone = found[row["heads"], row["seq_len"], 1]
        sends = row["sent_bytes"] > 0
        lengths[sends].append(row["seq_len"])
        shares[sends].append(row["forward_backward_bytes"] / alone["forward_backward_bytes"])
    return {
        "ms": ms,
        "mb": size,
        "gb": lambda n, p: size(n, p, unit=1e9, places=3),
        "ours": ours,
        "half_at_home": _span(shares[False], "{:.3f}"),
        "half_travelling": _span(shares[True], "{:.3f}"),
        "repeats": two[0]["seconds"]["repeats"],
        "no_message": f"{min(lengths[False]):,}",
        "messages": f"{max(lengths[True]):,}",
    }


def said(records: Mapping[str, Record]) -> dict[str, Any]:
    """The numbers that the template has within sentences, as text."""
    rows = {}
    for name, record in records.items():
        rows[name] = record["rows"]
    eight = [row for row in rows["ranks"] if row["ranks"] == 8]
    million = rows["million"][0]
    return {
        "provenance": provenance(records["reports"]),
        "waiting": _percent([row["waiting_share"]["median"] for row in rows["scaling"]]),
        "ceiling": _percent([row["ratio"] for row in rows["scaling"]]),
        "efficiency": _percent([row["efficiency"]["median"] for row in rows["scaling"]]),
        "exposed": _percent([row["exposed_share"]["median"] for row in rows["overlap"]]),
        "of_line": figures.listed(f"{row['of_one_rank']:.2f}" for row in eight),
        "million": f"{million['seq_len']:,}",
        "million_gb": f"{million['peak_bytes'] / 1e9:.1f}",
        "billion": f"{rows['billion'][0]['seq_len']:,}",
        "crossover": f"{max(row['faster_from'] for row in rows['crossover']):,}",
    }


def _percent(shares: Sequence[float]) -> str:
    percents = [100 * share for share in shares]
    return f"{_span(percents, '{:.1f}')} %"


def _span(values: Sequence[float], form: str) -> str:
    """The least and the largest value as text, or one of them if both read alike."""
    least = form.format(min(values))
    most = form.format(max(values))
    return least if least == most else f"{least} to {most}"
