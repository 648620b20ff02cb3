"""docs/evidence.html: one page of pictures made from the records, without scripts, other files or a network."""

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
    """One figure of the page. Without `svg` there is no record, and `caption` says how to make it."""

    name: str
    title: str
    caption: str
    svg: str = ""
    provenance: str = ""
    table: str = ""


# Each figure: the case of its record, its title, and what draws it.
FIGURES: tuple[tuple[str, str, Callable[[figures.Rows], figures.Drawn]], ...] = (
    ("ranks", "Memory per rank", figures.memory),
    ("linear", "Time against length", figures.time),
    ("peers", "Beside others", figures.peers),
    ("learn_text", "Learning text", figures.text),
)


def write_evidence(path: Path, folder: Path, tables: Mapping[str, Table]) -> Path:
    """Make the page from the records in `folder`.

    Args:
        tables: what makes a record's table, by the name of its case.

    Raises:
        ValueError: if the file is somebody else's, or a record is none.
    """
    check_mine(path, is_evidence, MAKER)  # before anything is drawn
    style = (TEMPLATES / "evidence.css").read_text()
    page = render("evidence.html.jinja", head=HEAD, style=style, sections=sections(folder, tables))
    write_whole(path, page.encode(), is_evidence, MAKER)
    return path


def is_evidence(file: BinaryIO) -> bool:
    """Whether a file is this page, by how it begins."""
    return file.read(len(HEAD)) == HEAD.encode()


def render(template: str, **values: Any) -> str:
    """A template of this folder. What it names must be given."""
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
    """Paragraphs, lists and tables, as the records' tables have them, as HTML."""
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
    """Text as HTML, with its code in backticks and its words in asterisks."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"(?<!\w)\*(\w[^*]*)\*", r"<em>\1</em>", text)
