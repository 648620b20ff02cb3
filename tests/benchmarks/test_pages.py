"""The pages made from the records: docs/evidence.html and docs/reports.md."""

import json
import re
import shutil

import browse
import pytest
from helpers import ROOT

from benchmarks import command
from benchmarks.pages import evidence, figures, reports

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


@pytest.mark.parametrize("flag", ["--html", "--reports"])
def test_a_page_and_cases_are_refused(flag, capsys):
    assert command.main(["linear", flag, "page"]) == 2
    assert f"leave out {flag}" in capsys.readouterr().err


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


def test_peers_and_learning_are_drawn():
    """With rows as their cases make them."""
    right, wrong = ({"full": {"verdict": verdict}} for verdict in ("right", "wrong"))
    ratio = {"min": 0.9, "median": 1.1, "max": 5.0}
    rows = [
        {"peer": "a", "version": "a==1", "inputs": right, "ratio": ratio},
        {"peer": "b", "version": "b==2", "inputs": wrong, "ratio": ratio},
        {"peer": "c", "version": "c==3", "inputs": {}, "reason": "no"},
        {"peer": "this library", "version": "", "inputs": right, "ratio": ratio},
    ]
    drawn = figures.peers(rows)
    assert drawn.alternative == "a: 1.10 times. b: 1.10 times, wrong for full."
    assert drawn.caption.endswith("the table says more, also why 1 could not be measured.")
    curve = [[25, 1.5, 0.25, 0.5], [50, 3.0, 0.5, 0.9]]
    text = {
        "segment_lengths": [32],
        "dilation_rates": [1],
        "settings": {"seq_len": 1024},
        "curve": curve,
    }
    assert (
        figures.text([text]).alternative == "(32)/(1) at 1,024: 0.90 bits per byte after 3 seconds."
    )


def test_a_table_as_html():
    assert evidence.as_html(
        "of *what* it\n`claims` < 3\n\n- a\n- b\n\n| x | y |\n|---|--:|\n| 2 * 3 | 4 * 5 |"
    ) == (
        "<p>of <em>what</em> it <code>claims</code> &lt; 3</p>\n<ul><li>a</li><li>b</li></ul>\n"
        '<div class="table" tabindex="0"><table><thead><tr><th>x</th><th>y</th></tr></thead><tbody>\n'
        "<tr><td>2 * 3</td><td>4 * 5</td></tr>\n</tbody></table></div>"
    )


def test_reports_quote_the_records(tmp_path, capsys):
    """Catches a record that was made anew, and a page that goes on with what it said before."""
    made = tmp_path / "reports.md"
    assert command.main(["--reports", str(made)]) == 0
    assert made.read_text() == REPORTS.read_text(), REMAKE
    rows = json.loads((RESULTS / "reports.json").read_text())["rows"]
    [row] = [
        row for row in rows if (row["heads"], row["seq_len"], row["ranks"]) == ("split", 65_536, 2)
    ]
    assert (
        f"{1e3 * row['forward_seconds']['median']:,.0f} / {1e3 * row['seconds']['median']:,.0f}"
        in made.read_text()
    )
    assert capsys.readouterr().out == f"page: {made}\n"


@pytest.mark.parametrize(
    "link", sorted(set(re.findall(r"\]\(([^)]+)\)", (reports.TEMPLATE).read_text())))
)
def test_links_of_the_reports_lead_somewhere(link):
    path, _, heading = link.partition("#")
    target = (REPORTS.parent / path).resolve() if path else REPORTS
    headings = [
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in target.read_text().splitlines()
        if line.startswith("#")
    ]
    assert not heading or heading in headings


def test_evidence_in_a_browser():
    """On a phone and on a desk, light and dark: nothing is wider than the window, nothing is complained of."""
    if reason := browse.why_no_browser():
        pytest.skip(reason)
    with browse.browser() as opened:
        for width, scheme, paper in (
            (390, "light", "rgba(254, 254, 254, 1)"),
            (1280, "dark", "rgba(20, 23, 26, 1)"),
        ):
            browse.be(opened, width, scheme)
            assert [*browse.faults_of(opened, EVIDENCE.parent.as_uri(), EVIDENCE.name, width)] == []
            opened.execute_script(
                "document.querySelectorAll('details').forEach(each => { each.open = true; })"
            )
            assert opened.execute_script(browse.TOO_WIDE) is None
            assert (
                opened.find_element("tag name", "body").value_of_css_property("background-color")
                == paper
            )
            drawn = "body, h1, h2, p, figure, figcaption, svg, svg text, small, .table"
            beyond = f"return [...document.querySelectorAll('{drawn}')].filter(each => "
            beyond += (
                "each.getBoundingClientRect().right > innerWidth + 1).map(each => each.textContent)"
            )
            assert opened.execute_script(beyond) == []
        # The same checks notice what is wrong.
        opened.execute_script(
            "console.error('heard'); document.body.insertAdjacentHTML('beforeend', '<img width=3000>')"
        )
        assert opened.execute_script(browse.TOO_WIDE)
        assert "heard" in "".join(entry["message"] for entry in opened.get_log("browser"))
