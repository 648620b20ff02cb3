"""Every page: its blocks of code run or say why not, its links lead somewhere, what it names exists.

Above a block may stand a mark. `<!-- block: NAME -->`: a test takes the block by this name, and runs it. `<!-- not run:
REASON -->`: nobody runs it. Without a mark, Python is run here, and what is shown next is what it prints; indented
`rda` commands are run here; TOML is read as hardware; "text" is no code. Pages written from the code are compared
as a whole, by other tests.
"""

import re
import shlex
import tomllib
from importlib import import_module
from importlib.util import find_spec

import api
import pytest
from helpers import ROOT
from pages import PAGES, blocks, text_of

import ring_dilated_attention
from ring_dilated_attention.commands.cli import SUBCOMMANDS, main
from ring_dilated_attention.commands.hardware import machine_of

PACKAGE = ROOT / "src" / "ring_dilated_attention"
WRITTEN_FROM_CODE = {
    "docs/how_it_works.md": "tests/test_how_it_works.py",
    "benchmarks/README.md": "tests/benchmarks",
}
EVERY = [found for page in PAGES if page not in WRITTEN_FROM_CODE for found in blocks(page)]
UNMARKED = [found for found in EVERY if not found.mark]
API = text_of("docs/api.md")
SHOWN = api.ROW.findall(API)


def name_of(found):
    return f"{found.page}: {found.text.splitlines()[0].strip()[:40]}"


def commands(found):
    return found.text.replace("\\\n", " ").splitlines()


SOURCES = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
TAKEN_BY_TESTS = re.findall(r'\bblock\("([^"]+)", "([^"]+)"\)', SOURCES)


@pytest.mark.parametrize("found", EVERY, ids=name_of)
def test_a_block_is_run_or_says_why_not(found):
    kind, _, said = found.mark.partition(": ")
    if kind == "block":
        assert (found.page, said) in TAKEN_BY_TESTS
    elif kind == "not run":
        assert len(said.split()) > 3
    elif found.language == "shell":
        assert all(line.startswith("rda ") for line in commands(found))
    elif not found.language:  # what the Python above it prints
        every = blocks(found.page)
        assert every[every.index(found) - 1].language == "python"
    else:
        assert not found.mark
        assert found.language in ("python", "toml", "text", "")
    # or a reader of the site must scroll
    assert not found.language or max(map(len, found.text.splitlines())) <= 100


@pytest.mark.parametrize("found", [x for x in UNMARKED if x.language == "python"], ids=name_of)
def test_python_prints_what_the_page_shows(found, capsys):
    exec(compile(found.text, found.page, "exec"), {})
    every = blocks(found.page)
    shown = [x.text for x in every[every.index(found) + 1 :][:1] if x.language == "" and not x.mark]
    assert capsys.readouterr().out == "".join(shown)


@pytest.mark.parametrize("found", [x for x in UNMARKED if x.language == "shell"], ids=name_of)
def test_commands_run(found, capsys):
    for line in commands(found):
        assert main(shlex.split(line)[1:]) == 0
        assert capsys.readouterr().out


def test_commands_that_are_not_run_exist():
    """Make targets and subcommands of rda."""
    makefile = (ROOT / "Makefile").read_text()
    for found in EVERY:
        for line in commands(found) if found.language == "shell" else []:
            program, word, *_ = [*line.split(), "", ""]
            assert program != "make" or f"\n{word}:" in makefile
            assert program != "rda" or word in SUBCOMMANDS


@pytest.mark.parametrize("found", [x for x in UNMARKED if x.language == "toml"], ids=name_of)
def test_toml_is_a_file_of_hardware(found, tmp_path):
    file = tmp_path / "here.toml"
    file.write_text(found.text)
    machine = machine_of(str(file))
    assert (
        machine.hardware.flops_per_second
        == tomllib.loads(found.text)["hardware"]["flops_per_second"]
    )


# Links and navigation.


def anchors(page):
    """As a forge makes them of headings, and the API's names."""
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(SHOWN) if page == "docs/api.md" else made


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """By paths in the repository, so that a forge shows what the site shows."""
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.is_file()
        assert not anchor or anchor in anchors(target.relative_to(ROOT).as_posix())


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "README.md", "docs/reliability.md"])
def test_tests_and_files_that_a_page_names_exist(page):
    text = text_of(page).partition("\n## With a GPU\n")[0]
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in SOURCES
    saved = {found.mark.removeprefix("block: ") for found in blocks(page)}
    for path in {*re.findall(r"`([\w/]+\.py|tests/\w+)", text)} - saved:
        found = [ROOT / path, PACKAGE / path, *(ROOT / "tests").rglob(path)]
        assert any(x.exists() for x in found), path


# The API.


@pytest.mark.parametrize("module", ["", ".layers", ".models", ".simulate", ".integrations.torch"])
def test_whatever_is_public_is_on_the_page(module):
    shown = {name.rpartition(".")[2] for name in SHOWN}
    shown |= set(re.findall(r"^## .*\.(\w+)`$", API, re.MULTILINE))
    assert set(import_module(f"ring_dilated_attention{module}").__all__) <= shown


def test_the_page_in_a_clone_says_what_the_code_says():
    """Catches a row that a signature or docstring has made untrue. `python docs/site/api.py` writes the rows anew."""
    names = [name.rpartition(".")[2] for name in SHOWN]
    for row in api.ROW.finditer(API):
        if ".transformers." not in row[1] or find_spec("transformers") is not None:
            assert row[0] == api.row_of(row[1], names)


def test_versions_are_those_of_the_package():
    version = ring_dilated_attention.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in text_of("CHANGELOG.md")
