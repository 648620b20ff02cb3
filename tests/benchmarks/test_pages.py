"""The pages made from the records: docs/evidence.html and docs/reports.md."""

import re
import shutil

import pytest
from helpers import ROOT

from benchmarks import command
from benchmarks.pages import evidence

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
    """One file of less than 2 MB that loads nothing; every picture says in words what it shows, and whence."""
    page = EVIDENCE.read_text()
    assert len(page.encode()) < 2e6
    assert not re.findall(
        r"""<script|<link|<img|<iframe|@import|\bsrc=|url\((?!#)|href="(?!#)""", page
    )
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {name for name, *_ in re.findall(r"(?:url\(|href=\")#([^\")]+)", page)} <= {
        name[0] for name in ids
    }
    sections = re.findall(r"<section.*?</section>", page, flags=re.DOTALL)
    assert len(sections) == len(evidence.FIGURES)
    for section in sections:
        assert re.search(r"<figcaption>[^<]{20,}</figcaption>", section)
        if "<svg" in section:
            [name] = re.findall(r'<svg [^>]*role="img" aria-labelledby="([^"]+)"', section)
            assert re.search(rf'<title id="{name}">[^<]{{40,}}</title>', section)
            assert not re.findall(r"#[0-9a-f]{6}\b", section)  # colours are the style sheet's
            assert "commit" in section


def test_what_is_not_recorded_is_said(tmp_path):
    shutil.copy(RESULTS / "linear.json", tmp_path)
    assert command.main(["--html", str(tmp_path / "page.html"), "--results", str(tmp_path)]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("Not recorded yet") == len(evidence.FIGURES) - 1
    assert page.count("<svg") == 1
