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


def without_pictures(page):
    """matplotlib's own numbers may differ between its versions."""
    return re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)


def test_evidence_is_made_of_the_records(tmp_path, capsys):
    """Catches a record that was made anew, and a page that shows what was before."""
    made = tmp_path / "page.html"
    shutil.copy(EVIDENCE, made)  # its own may be replaced
    assert command.main(["--html", str(made)]) == 0
    assert capsys.readouterr().out == f"page: {made}\n"
    assert without_pictures(made.read_text()) == without_pictures(EVIDENCE.read_text()), REMAKE


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


@pytest.mark.parametrize("flag", ["--html", "--reports"])
@pytest.mark.parametrize(
    "content",
    ["<p>my page</p>\n", 'It quotes <meta name="generator" content="python -m benchmarks --html">'],
)
def test_a_page_of_somebody_else_stays(flag, content, tmp_path, capsys):
    theirs = tmp_path / "page"
    theirs.write_text(content)
    assert command.main([flag, str(theirs)]) == 2
    assert (
        f"was not made by python -m benchmarks {flag}, and nothing is written over it"
        in capsys.readouterr().err
    )
    assert theirs.read_text() == content


def test_what_is_not_recorded_is_said(tmp_path, capsys):
    results = tmp_path / "results"
    results.mkdir()
    shutil.copy(RESULTS / "linear.json", results)
    assert command.main(["--html", str(tmp_path / "page.html"), "--results", str(results)]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("Not recorded yet") == len(evidence.FIGURES) - 1
    assert page.count("<svg") == 1
    capsys.readouterr()
    assert command.main(["--reports", str(tmp_path / "page.md"), "--results", str(results)]) == 2
    assert capsys.readouterr().err.startswith("--reports: there is no record of reports in ")


def test_reports_quote_the_records(tmp_path, capsys):
    """Catches a record that was made anew, and a page that goes on with what it said before."""
    made = tmp_path / "reports.md"
    assert command.main(["--reports", str(made)]) == 0
    assert made.read_text() == REPORTS.read_text(), REMAKE
    assert capsys.readouterr().out == f"page: {made}\n"
