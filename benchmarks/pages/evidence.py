"""Makes docs/evidence.html: pictures of the records on one page, which needs no scripts, other files or network."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ring_dilated_attention.training.files import check_mine, write_whole

from ..record import Table, provenance, read_record, table_of
from . import figures

MAKER = "python -m benchmarks --html"
HEAD = f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="{MAKER}">\n'
TEMPLATES = Path(__file__).parent


class Section(NamedTuple):
    """One figure of the page. If there is no record for it, `svg` is empty, and `caption` says so."""

    name: str
    title: str
    caption: str
    svg: str = ""
    provenance: str = ""
    table: str = ""


# Each figure: the case whose record it shows, its title, and the function that draws it.
FIGURES: tuple[tuple[str, str, Callable[[figures.Rows], figures.Drawn]], ...] = (
    ("ranks", "Memory per rank", figures.memory),
    ("linear", "Time against length", figures.time),
    ("peers", "Beside others", figures.peers),
    ("learn_text", "Learning text", figures.text),
)


def write_evidence(path: Path, folder: Path, tables: Mapping[str, Table]) -> Path:
    """Make the page from the records in `folder`.

    Args:
        tables: the functions that make tables of records, by the names of cases.

    Raises:
        ValueError: if the file exists and is not this page, or if a file in `folder` is not a record.
    """
    check_mine(path, is_evidence, MAKER)  # refuse another file before anything is drawn
    style = (TEMPLATES / "evidence.css").read_text()
    page = render("evidence.html.jinja", head=HEAD, style=style, sections=sections(folder, tables))
    write_whole(path, page.encode(), is_evidence, MAKER)
    return path


def is_evidence(file: BinaryIO) -> bool:
    """Whether a file is this page. It is known by its first lines."""
    return file.read(len(HEAD)) == HEAD.encode()


def render(template: str, **values: Any) -> str:
    """The text of a template in this folder, with the values in it. A name without a value is an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape="html" in template,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)


def sections(folder: Path, tables: Mapping[str, Table]) -> Iterator[Section]:
    for name, title, draw in FIGURES:
        if not (folder / f"{name}.json").exists():
            yield Section(
                name, title, f"Not recorded yet: there is no {name}.json among the records."
            )
            continue
        record = read_record(folder / f"{name}.json")
        drawing, drawn = figures.svg(name, partial(draw, record["rows"]))
        yield Section(
            name,
            title,
            drawn.caption,
            drawing,
            marked_up(provenance(record)),
            as_html(table_of(record, tables)),
        )


def as_html(markdown: str) -> str:
    """A record's table and the text around it as HTML. The markdown may have paragraphs, lists and tables."""
    made = []
    for block in markdown.split("\n\n"):
        lines = block.splitlines()
        if block.startswith("|"):
            head, _, *body = (
                [marked_up(cell.strip()) for cell in line.strip("|").split("|")] for line in lines
            )
            rows = "\n".join(_row(cells, "td") for cells in body)
            table = f"<table><thead>{_row(head, 'th')}</thead><tbody>\n{rows}\n</tbody></table>"
            made.append(f'<div class="table" tabindex="0">{table}</div>')
        elif block.startswith("- "):
            made.append(f"<ul>{''.join(f'<li>{marked_up(line[2:])}</li>' for line in lines)}</ul>")
        else:
            made.append(f"<p>{marked_up(' '.join(lines))}</p>")
    return "\n".join(made)


def _row(cells: list[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def marked_up(text: str) -> str:
    """A line of markdown as HTML: `code` in backticks, and *words* in asterisks."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"(?<!\w)\*(\w[^*]*)\*", r"<em>\1</em>", text)
