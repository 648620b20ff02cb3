"""Reads the pages: their blocks of code, and the marks above them. `test_documentation.py` has the rules."""

import re
from functools import cache
from typing import NamedTuple

from helpers import ROOT

ELSEWHERE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
IN_FOLDERS = ("benchmarks/README.md", "examples/README.md")
PAGES = (
    *ELSEWHERE,
    *IN_FOLDERS,
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
# A block has an optional mark above it, and is fenced or indented.
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n\n?)?"
    r"(?:^```(?P<language>\w*)\n(?P<fenced>.*?)^```$|"
    r"(?<=\n\n)(?P<indented>(?:^    \S[^\n]*\n(?:^    [^\n]*\n|\n(?=    ))*)))",
    flags=re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    page: str
    language: str  # "shell" of an indented block, "" of a fence without one
    text: str
    mark: str  # what stands in a comment right above it


@cache
def text_of(page):
    return (ROOT / page).read_text()


@cache
def blocks(page):
    return tuple(
        Block(
            page,
            "shell",
            re.sub(r"^    ", "", found["indented"], flags=re.MULTILINE),
            found["mark"] or "",
        )
        if found["indented"]
        else Block(page, found["language"], found["fenced"], found["mark"] or "")
        for found in BLOCK.finditer(text_of(page))
    )


def block(page, name):
    """The text of the block with the mark `<!-- block: NAME -->`: a test takes it so, and runs it."""
    [found] = [made.text for made in blocks(page) if made.mark == f"block: {name}"]
    return found
