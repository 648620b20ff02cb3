"""Every page: its blocks of code run or say why not, its links lead somewhere, its figures are those of the records.

Above a block may stand a mark. `<!-- block: NAME -->`: a test takes the block by this name, and runs it. `<!-- not run:
REASON -->`: nobody runs it. Without a mark, Python is run here, and what is shown next is what it prints; indented
`rda` commands are run here; TOML is read as hardware; "text" is no code. Pages written from the code are compared
as a whole, by other tests.
"""

import ast
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import get_args, get_type_hints

import api
import pytest
from helpers import ROOT
from pages import PAGES, Block, blocks, text_of

from ring_dilated_attention import ContextParallel
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


def name_of(found: Block) -> str:
    return f"{found.page}: {found.text.splitlines()[0].strip()[:40]}"


def fault_of(found: Block, taken: set[tuple[str, str]]) -> str | None:
    """Why nobody can tell that the block is right, or None."""
    kind, _, said = found.mark.partition(": ")
    if kind == "block":
        return None if (found.page, said) in taken else f"no test takes the block {said!r}"
    if kind == "not run":
        return None if len(said.split()) > 3 else "the reason is too short"
    if found.mark:
        return f"unknown mark {found.mark!r}"
    if found.language == "shell" and not all(line.startswith("rda ") for line in commands(found)):
        return "only `rda` commands are run here: mark it as not run, with the reason"
    return (
        None
        if found.language in ("python", "shell", "toml", "text", "")
        else f"{found.language!r} is not run here"
    )


def commands(found: Block) -> list[str]:
    return found.text.replace("\\\n", " ").splitlines()


@cache
def taken_by_tests() -> set[tuple[str, str]]:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "pages.py"]
    return {
        found
        for path in files
        for found in re.findall(r'\bblock\("([^"]+)", "([^"]+)"\)', path.read_text())
    }


@pytest.mark.parametrize("found", EVERY, ids=name_of)
def test_a_block_is_run_or_says_why_not(found):
    assert fault_of(found, taken_by_tests()) is None


@pytest.mark.parametrize(
    ("language", "mark", "fault"),
    [
        ("python", "block: nobody's", "no test takes the block"),
        ("python", "not run: slow", "the reason is too short"),
        ("python", "not ran: for a very good reason", "unknown mark"),
        ("shell", "", "only `rda` commands are run here"),
        ("rust", "", "'rust' is not run here"),
    ],
)
def test_a_block_without_a_run_or_a_reason_is_noticed(language, mark, fault):
    assert fault in fault_of(
        Block("README.md", language, "make everything\n", mark), taken_by_tests()
    )


@pytest.mark.parametrize("found", [x for x in UNMARKED if x.language == "python"], ids=name_of)
def test_python_prints_what_the_page_shows(found, capsys):
    exec(compile(found.text, found.page, "exec"), {})
    every = blocks(found.page)
    shown = [x.text for x in every[every.index(found) + 1 :][:1] if x.language == "" and not x.mark]
    assert capsys.readouterr().out == "".join(shown)


def test_what_a_page_shows_follows_what_prints_it():
    """Catches an output that no test compares."""
    for page in {found.page for found in EVERY}:
        for before, found in zip((None, *blocks(page)), blocks(page), strict=False):
            if found in UNMARKED and found.language == "":
                assert before in UNMARKED
                assert before.language == "python"


@pytest.mark.parametrize("found", [x for x in UNMARKED if x.language == "shell"], ids=name_of)
def test_commands_run(found, capsys):
    for line in commands(found):
        assert main(shlex.split(line)[1:]) == 0
        assert capsys.readouterr().out


def test_commands_that_are_not_run_exist():
    """Make targets, subcommands of rda, benchmarks and files that commands name."""
    makefile = (ROOT / "Makefile").read_text()
    for found in EVERY:
        # what the page tells to save as files
        saved = {x.mark.removeprefix("block: ") for x in blocks(found.page)}
        for line in commands(found) if found.language == "shell" else []:
            program, *words = shlex.split(line, comments=True) if "$'" not in line else [""]
            assert program != "make" or f"\n{words[0]}:" in makefile
            assert program != "rda" or words[0] in SUBCOMMANDS
            for word in words:
                assert not word.endswith(".py") or word in saved or (ROOT / word).is_file()
            if words[:2] == ["-m", "benchmarks"]:
                assert (ROOT / "benchmarks" / f"{words[2]}.py").is_file()


@pytest.mark.parametrize("found", [x for x in UNMARKED if x.language == "toml"], ids=name_of)
def test_toml_is_a_file_of_hardware(found, tmp_path):
    file = tmp_path / "here.toml"
    file.write_text(found.text)
    machine = machine_of(str(file))
    assert (
        machine.hardware.flops_per_second
        == tomllib.loads(found.text)["hardware"]["flops_per_second"]
    )


def too_wide(found: Block) -> list[str]:
    """Its lines that are wider than the site's column. A block without a language is what a program prints, and how
    wide that is the program says: docs/how_it_works.md shows rounds as `print(program)` gives them, one to a line."""
    return [line for line in found.text.splitlines() if found.language and len(line) > 100]


@pytest.mark.parametrize(
    "page", ["README.md", *(page for page in PAGES if page.startswith("docs/"))]
)
def test_code_fits_its_column(page):
    """Catches code that a reader of the site must scroll to see."""
    assert [line for found in blocks(page) for line in too_wide(found)] == []


def test_wide_code_is_noticed():
    wide = f"x = 1  # {'x' * 92}\n"
    assert too_wide(Block("README.md", "python", wide, ""))
    assert not too_wide(Block("README.md", "python", wide.replace("xx", "x", 1), ""))


# Links and navigation.


def anchors(page: str) -> set[str]:
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


def test_every_page_is_in_the_navigation():
    listed = re.findall(
        r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE
    )
    [table] = re.findall(
        r"^PAGES = \{\n(.*?)^\}",
        (ROOT / "docs/site/hooks.py").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    elsewhere = dict(re.findall(r'"(.+)": "(.+)"', table))
    assert sorted(listed) == sorted(
        elsewhere.get(page, page.removeprefix("docs/")) for page in PAGES
    )


# The recipes and the words of CONTRIBUTING.


def missing_names(text: str) -> list[str]:
    """Tests, and files of the repository or the package, that a text names and that are not there."""
    names = set(re.findall(r"`(test_\w+)`", text))
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    missing = [name for name in names if f"def {name}(" not in sources]
    paths = set(re.findall(r"[\w/]+\.py\b|\btests/[\w/]+", text))
    missing += [path for path in paths if not ((ROOT / path).exists() or (PACKAGE / path).exists())]
    return sorted(missing)


def test_contributing_names_tests_and_files_that_exist():
    text = text_of("CONTRIBUTING.md")
    rooms = text.partition("\n## One room at a time\n")[2].partition("\n## With a GPU\n")[0]
    assert "tests/plan" in rooms
    assert missing_names(rooms) == []
    assert missing_names("`test_nothing_of_the_kind`, `tests/nowhere`, `plan/nothing.py`") == [
        "plan/nothing.py",
        "test_nothing_of_the_kind",
        "tests/nowhere",
    ]


def names_given(source: str) -> set[str]:
    """What the source itself names: classes, functions, parameters and variables, cut at underscores and capitals."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {
        word.lower().removesuffix("s")
        for name in found
        for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    }


UNNAMED = {"part", "stretch"}  # ordinary words, of which several things could be called so


def test_ordinary_words_name_nothing():
    """Catches a second meaning that comes back as an identifier."""
    assert names_given("class StepParts: ...\ndef f(num_parts): first.stretch = 1") >= UNNAMED
    assert {
        path.name: words
        for path in PACKAGE.rglob("*.py")
        if (words := names_given(path.read_text()) & UNNAMED)
    } == {}


def test_only_tensors_have_a_layout():
    """Plans and forecasts know no tensors. Catches the word for how rows lie in a chunk, in comments too."""
    for room in ("plan", "forecast"):
        assert not [
            path for path in (PACKAGE / room).glob("*.py") if "layout" in path.read_text().lower()
        ]
    for page in ("decisions", "planning", "how_it_works", "idea"):
        assert "layout" not in text_of(f"docs/{page}.md").lower()


# The API.


def public_names() -> set[tuple[str, str]]:
    """What modules but kernels list in `__all__`, and what pages and examples import: (module, name)."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        text, (*parents, name) = file.read_text(), file.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(
            ("ring_dilated_attention", *parents, *([] if name == "__init__" else [name]))
        )
        if "kernels" in parents:
            continue
        if listed := re.search(r"^__all__ = (\[.*\])$", text, flags=re.MULTILINE):
            found |= {(module, name) for name in ast.literal_eval(listed[1])}
        elif re.search(r"^__all__\b", text, flags=re.MULTILINE):
            found |= {(module, name) for name in import_module(module).__all__}
    sources = [found.text for found in EVERY if found.language == "python"]
    sources += [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    return found.union(*map(imported_by, sources))


def imported_by(source: str) -> set[tuple[str, str]]:
    """By its text: a page may show a call that is no Python, such as f(x, dtype=)."""
    found = re.findall(
        r"^\s*from (ring_dilated_attention\S*) import (\([^)]*\)|[^\n(]+)$",
        source,
        flags=re.MULTILINE,
    )
    return {
        (module, name)
        for module, names in found
        for name in re.findall(r"(\w+)(?: as \w+)?", names)
    }


def lacking(page: str) -> set[tuple[str, str]]:
    """What is public and not on the page. A function may have a module of its own name; a module is a heading."""
    shown = {*api.ROW.findall(page), *re.findall(r"^## .*`(.+)`$", page, re.MULTILINE)}
    ways = {
        (module, name): {f"{module}.{name}", f"{module}.{name}.{name}"}
        for module, name in public_names()
    }
    return {
        public
        for public, names in ways.items()
        if not names & shown and public[1] not in TWICE.get(public[0], ())
    }


# stand elsewhere on the page
TWICE = {"ring_dilated_attention.layers": ("MultiheadDilatedAttention",)}


def test_whatever_is_public_is_on_the_page():
    assert ("ring_dilated_attention", "explain") in public_names()
    assert ("ring_dilated_attention.integrations.torch", "ShardHeads") in public_names()
    assert imported_by(
        "from ring_dilated_attention.models import (\n    A,\n    B as C,\n)\nimport d\n"
    ) == {
        ("ring_dilated_attention.models", "A"),
        ("ring_dilated_attention.models", "B"),
    }
    assert lacking(API) == set()
    assert lacking(API.replace("`ring_dilated_attention.explain`", "")) == {
        ("ring_dilated_attention", "explain")
    }


def test_the_page_in_a_clone_says_what_the_code_says():
    """Catches a row that a signature or docstring has made untrue. `python docs/site/api.py` writes the rows anew."""
    names = [name.rpartition(".")[2] for name in SHOWN]
    for row in api.ROW.finditer(API):
        if ".transformers." not in row[1] or find_spec("transformers") is not None:
            assert row[0] == api.row_of(row[1], names)
    assert len(SHOWN) > 40
    assert (
        "  - `positions(seq_len, cu_seqlens=None)`: The positions, within their documents, of the rows"
        in API
    )


def functions_of(public: object) -> list[Callable]:
    """A function itself; of a class its public methods and properties."""
    if not inspect.isclass(public):
        return [public] if inspect.isfunction(public) else []
    members = [getattr(public, name) for name in vars(public) if not name.startswith("_")]
    found = [member.fget if isinstance(member, property) else member for member in members]
    return [member for member in found if inspect.isfunction(member)]


def test_what_public_functions_return_is_on_the_page():
    """A class of ours that a user gets, and never imports."""
    returned = set()
    for module, name in public_names():
        if "transformers" in module and find_spec("transformers") is None:
            continue  # its package is not there; make test-integrations runs this file too
        public = getattr(import_module(module), name, None)  # or a module
        # a call on one device does not import this class, which its signature names
        names = {"ContextParallel": ContextParallel}
        hints = [get_type_hints(f, localns=names).get("return") for f in functions_of(public)]
        while hints:
            hint = hints.pop()
            hints += get_args(hint)
            if isinstance(hint, type) and hint.__module__.startswith("ring_dilated_attention"):
                returned.add(f"{hint.__module__}.{hint.__qualname__}")
    assert "ring_dilated_attention.attention.explain.Explanation" in returned
    assert {name.rpartition(".")[2] for name in returned} <= {
        name.rpartition(".")[2] for name in SHOWN
    }


def wrong_parameters(text: str) -> list[str]:
    """What docstrings name under "Args:" that the signature, or a field, does not have. (Or one that is inherited.)"""
    wrong = []
    for node in ast.walk(ast.parse(text)):
        is_function = isinstance(node, ast.FunctionDef)
        if not (is_function or isinstance(node, ast.ClassDef)):
            continue
        section = re.search(
            r"^Args:\n((?: +.*\n|\n)*)", (ast.get_docstring(node) or "") + "\n", re.MULTILINE
        )
        listed = re.findall(r"^    (\w[\w, ]*):", section[1], re.MULTILINE) if section else []
        takers = (
            [node]
            if is_function
            else [x for x in node.body if getattr(x, "name", "") == "__init__"]
        )
        given = {x.arg for taker in takers for x in (*taker.args.args, *taker.args.kwonlyargs)}
        given |= {
            x.target.id
            for x in node.body
            if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
        }
        if is_function or given:
            wrong += [
                f"{node.name}: {name}"
                for line in listed
                for name in line.split(", ")
                if name not in given
            ]
    return wrong


def test_docstrings_name_parameters_that_exist():
    assert [
        x
        for path in PACKAGE.rglob("*.py")
        if "Args:" in (text := path.read_text())
        for x in wrong_parameters(text)
    ] == []
    assert wrong_parameters(
        'def f(x):\n    """A.\n\n    Args:\n        x, y: numbers.\n    """\n'
    ) == ["f: y"]


# Figures and versions.


def record(case: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{case}.json").read_text())


def test_the_crossover_is_that_of_the_record():
    rows = {(x["seq_len"], x["is_causal"]): x for x in record("crossover")["rows"]}
    lengths = sorted({length for length, _ in rows})
    for length in lengths:
        every = [rows[length, is_causal] for is_causal in (False, True)]
        cells = [
            f"{x['dense_seconds']['median']:.3f} | {x['seconds']['median']:.3f} | {x['speed_up']:.1f}"
            for x in every
        ]
        assert f"| {length:,} | {' | '.join(cells)} |\n" in text_of("docs/is_it_for_me.md")
    faster = min(
        n for n in lengths if all(rows[n, is_causal]["speed_up"] > 1 for is_causal in (False, True))
    )
    assert f"fewer than about {faster:,} positions" in text_of("docs/is_it_for_me.md")


def test_what_patterns_learn_is_that_of_the_record():
    right: dict[str, list[float]] = {}
    for row in record("learn_recall")["rows"]:
        if row["settings"]["lengths"][-1] == 2048:
            right.setdefault(row["settings"]["rules"], []).append(row["accuracy"])
    spans = {
        rule: dict.fromkeys(f"{x:.0%}".strip("%") for x in (min(seen), max(seen)))
        for rule, seen in right.items()
    }
    table = (
        text_of("docs/is_it_for_me.md")
        .partition("| pattern | answered right |\n")[2]
        .partition("\n\n")[0]
    )
    rules = ("dense", "wide 4", "LongNet", "local")  # in the page's order
    assert re.findall(r"\| ([\w ]+) % \|", table) == [" to ".join(spans[rule]) for rule in rules]


def test_the_trials_are_those_of_the_record():
    rows, page = {x["kind"]: x for x in record("restarts")["rows"]}, text_of("docs/reliability.md")
    assert f"All {sum(x['number'] for x in rows.values())} came to the right result" in page
    assert not any(x["failed"] for x in rows.values())
    table = page.partition("| fault | runs | by itself |\n|---|---|---|\n")[2].partition("\n\n")[0]
    told = set()
    for line in table.splitlines():
        what, number, by_itself = line.strip("| ").split(" | ")
        kinds = re.findall(r"`([^`]+)`", what.partition(":")[0])
        assert int(number) == sum(rows[kind]["number"] for kind in kinds)
        assert int(by_itself.partition(",")[0]) == sum(rows[kind]["went_on"] for kind in kinds)
        told |= set(kinds)
    assert told == set(rows)
    longest = max(x["most_seconds_of_orphans"] or 0 for x in rows.values())
    assert f"The longest life of a rank without its launcher was {longest:.1f} seconds" in page


def test_platforms_are_those_of_the_records():
    page = text_of("docs/platforms.md")
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        kept = json.loads(path.read_text())
        assert re.sub(r"\(R\)| Processor.*", "", kept["hardware"]["processor"]) in page
        assert kept["versions"]["python"] in page
        assert kept["versions"]["torch"].partition("+")[0] in page
    for pin in (ROOT / "tests" / "integrations" / "versions.txt").read_text().splitlines():
        if "==" in pin:
            assert pin.replace("==", " ").lower() in page.lower()


def test_versions_are_those_of_the_package():
    import ring_dilated_attention

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert f"\nversion: {ring_dilated_attention.__version__}\n" in text_of_file("CITATION.cff")
    assert f"\n## {ring_dilated_attention.__version__}" in text_of("CHANGELOG.md")
    python, [torch] = project["requires-python"].removeprefix(">="), project["dependencies"]
    start, workflow = text_of("docs/start.md"), text_of_file(".github/workflows/tests.yml")
    for page in (start, text_of_file("docs/site/package_index.md")):
        assert (
            f"Python {python} or newer, and PyTorch {torch.removeprefix('torch>=')} or newer"
            in page
        )
    assert f'python: "{python}"' in workflow
    assert f"torch=={torch.removeprefix('torch>=')}" in workflow
    for extra in project["optional-dependencies"]:
        assert extra == "test" or f"`{extra}`" in start


def test_the_workflow_runs_the_makefile():
    """Catches a step that the Makefile does not have, and a target of CI's that the workflow leaves out."""
    steps = set(re.findall(r"make ([\w-]+)", text_of_file(".github/workflows/tests.yml")))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert steps <= targets
    assert {"test", "test-integrations", "examples", "docs", "dist"} <= steps
    newest = (
        text_of_file(".github/workflows/tests.yml")
        .partition("\n  newest:")[2]
        .partition("\n  docs:")[0]
    )
    commands = re.findall(r"make ([\w-]+) TORCH=torch VERSIONS=/dev/null", newest)
    assert commands == ["test", "test-integrations"]


def text_of_file(path: str) -> str:
    return (ROOT / path).read_text()
