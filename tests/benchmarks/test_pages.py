"""The pages made from the records: docs/evidence.html and docs/reports.md."""

import re
import shutil

import pytest
from helpers import ROOT

from benchmarks import command

RESULTS, EVIDENCE, REPORTS = (
    ROOT / "benchmarks/results",
    ROOT / "docs/evidence.html",
    ROOT / "docs/reports.md",
)
REMAKE = "python -m benchmarks --page --html docs/evidence.html --reports docs/reports.md"


@pytest.mark.parametrize(("flag", "page"), [("--html", EVIDENCE), ("--reports", REPORTS)])
def test_a_page_is_made_of_the_records(flag, page, tmp_path, capsys):
    """Catches a record that was made anew, and a page that shows what was before. (matplotlib's own numbers may differ
    between its versions.)"""
    made = tmp_path / "page"
    shutil.copy(page, made)  # its own may be replaced
    assert command.main([flag, str(made)]) == 0
    assert capsys.readouterr().out == f"page: {made}\n"
    found, kept = (
        re.sub(r"<svg.*?</svg>", "", path.read_text(), flags=re.DOTALL) for path in (made, page)
    )
    assert found == kept, REMAKE


def test_evidence_stands_alone():
    """One file of less than 2 MB that loads nothing."""
    page = EVIDENCE.read_text()
    assert len(page.encode()) < 2e6
    assert not re.findall(
        r"""<script|<link|<img|<iframe|@import|\bsrc=|url\((?!#)|href="(?!#)""", page
    )
