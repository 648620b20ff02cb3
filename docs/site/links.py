"""What is wrong with the pages of a built site: links, anchors, what is loaded from elsewhere. Needs no mkdocs."""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Document(HTMLParser):
    """What a page of the site refers to, what it loads, and what can be referred to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and "href" in given:
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])


def faults_of(site: Path) -> Iterator[str]:
    """Links that lead nowhere, and files that are loaded from elsewhere."""
    pages = {path: Document(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        if path.name == "404.html":  # its links are those of a site at the root of a host
            continue
        where = path.relative_to(site)
        yield from (
            f"{where} loads {target} from elsewhere"
            for target in page.loaded
            if urlsplit(target).netloc
        )
        for target in page.links + page.loaded:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.is_file():
                yield f"{where} refers to {target}: no such file"
            elif (
                parts.fragment
                and file in pages
                and unquote(parts.fragment) not in pages[file].anchors
            ):
                yield f"{where} refers to {target}: no such anchor"
