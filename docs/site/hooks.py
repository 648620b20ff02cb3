"""What mkdocs does beside building docs/: pages and files from elsewhere in the repository, a check of what was built.

Pages link to each other and to any file of the repository by relative paths, as a forge shows them. On the site a link
that leaves docs/ leads to the site's copy of the file: `PAGES` are pages of the site, code becomes a page that shows
it, and what else is linked is copied as it is. So no link of the site leads out of it but those to other sites.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from api import ROW
from links import faults_of
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import Abort, PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Pages whose files are not in docs/: where a forge looks for them, by their names on the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
}
# files that get a page, and their languages
SHOWN = {".py": "python", ".toml": "toml", ".yml": "yaml", ".sh": "bash"}
LINK = re.compile(r"(?<=\]\()[^)\s]+")
FENCE = re.compile(r"^(```+).*?^\1$", flags=re.MULTILINE | re.DOTALL)
# What tests/test_documentation.py reads above a block. The reader of the page is told as well.
NOT_RUN = re.compile(
    r"^<!-- not run: (.+?) -->\n\n?(```.*?^```$|    .*?\n\n)", flags=re.MULTILINE | re.DOTALL
)


# Classes of which the API shows inherited methods too.
INHERITING = ("ring_dilated_attention.models.LongNetEncoder",)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    for file in list(files.documentation_pages()):
        repository_links(
            with_docstrings(file.content_string),
            path_of(file.src_uri),
            lambda path: _add(path, files, config),
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.inclusion is InclusionLevel.NOT_IN_NAV:
        return markdown  # a file that is shown
    markdown = with_docstrings(markdown)
    markdown = NOT_RUN.sub(
        r'\n\2\n\n<p class="not-run" markdown>No test of this page runs it: \1.</p>\n', markdown
    )
    # pages with links lie at the root
    return repository_links(markdown, path_of(page.file.src_uri), name_of)


def on_post_build(config: MkDocsConfig) -> None:
    faults = list(faults_of(Path(config.site_dir)))
    if faults:
        raise PluginError("the site has faults:\n" + "\n".join(faults))


def with_docstrings(markdown: str) -> str:
    """The page of the API with what mkdocstrings reads in place of its rows."""

    def directive(row: re.Match[str]) -> str:
        options = "    options: {inherited_members: true}\n" if row[1] in INHERITING else ""
        return f"\n::: {row[1]}\n{options}"

    return ROW.sub(directive, markdown)


def path_of(name: str) -> str:
    """The file in the repository of a page of the site."""
    return next((path for path, page in PAGES.items() if page == name), f"docs/{name}")


def name_of(path: str) -> str:
    """The page or file of the site that shows a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}.md" if Path(path).suffix in SHOWN else f"files/{path}"


def repository_links(markdown: str, path: str, renamed: Callable[[str], str]) -> str:
    """The text of the file `path` with each link to a file of the repository renamed. Code is left as it is."""

    def changed(found: re.Match[str]) -> str:
        target, hash_, anchor = found[0].partition("#")
        if not target or urlsplit(target).scheme:
            return found[0]
        return (
            renamed(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
            + hash_
            + anchor
        )

    made, end = [], 0
    for fence in [*FENCE.finditer(markdown), None]:
        start = fence.start() if fence else len(markdown)
        made.append(LINK.sub(changed, markdown[end:start]))
        if fence:
            made.append(fence[0])
            end = fence.end()
    return "".join(made)


def _add(path: str, files: Files, config: MkDocsConfig) -> str:
    """Put a file of the repository on the site if it is not there yet."""
    name, source = name_of(path), ROOT / path
    if files.get_file_from_path(name) is None and not path.startswith("docs/"):
        if not source.is_file():
            raise Abort(f"a page links to {path}, which is no file of the repository")
        content = source.read_text()
        if source.suffix in SHOWN:
            content = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n`````{SHOWN[source.suffix]}\n{content}`````\n"
        files.append(
            File.generated(config, name, content=content, inclusion=InclusionLevel.NOT_IN_NAV)
        )
    return path
