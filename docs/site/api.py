"""Writes the rows of docs/api.md anew, from signatures and docstrings: python docs/site/api.py

The page has the names, in its order, and what stands between them. In a clone a row is a link to the source, with the
parameters and the first sentence. On the site all of the docstring takes its place (`hooks.py`).
"""

import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
PACKAGE = "ring_dilated_attention"
# A link whose text is a name of the package, and the indented lines below it.
ROW = re.compile(rf"^- \[`({PACKAGE}[\w.]+)`\]\([^)]*\)\n(?:  .*\n)*", flags=re.MULTILINE)


def page(text: str) -> str:
    """The page with rows as the code has them today."""
    names = [name.rpartition(".")[2] for name in ROW.findall(text)]
    return ROW.sub(lambda row: row_of(row[1], names), text)


def row_of(name: str, names: Sequence[str]) -> str:
    """The row of one of the page's names. Methods of a parent that has a row of its own are not repeated."""
    value = object_of(name)
    source = Path(inspect.getsourcefile(inspect.unwrap(value)) or "").relative_to(ROOT)
    call = parameters_of(value)
    lines = [
        f"- [`{name}`](../{source})",
        *wrapped("  ", f"`{call}`: {sentence_of(value)}" if call else sentence_of(value)),
    ]
    for method, member in methods_of(value, names) if inspect.isclass(value) else ():
        lines += wrapped("  - ", f"`{method}{parameters_of(member)}`: {sentence_of(member)}")
    return "\n".join(lines) + "\n"


def object_of(name: str) -> Any:
    """What a dotted name leads to. A function may have a module of its own name: the path to it names both."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def methods_of(owner: type, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that have a docstring."""
    members: dict[str, Any] = {}
    for parent in reversed(owner.__mro__):
        if parent is owner or (
            parent.__module__.startswith(PACKAGE) and parent.__name__ not in names
        ):
            members |= vars(parent)
    for name, member in members.items():
        is_method = inspect.isroutine(member) or isinstance(member, property | cached_property)
        if is_method and not name.startswith("_") and member.__doc__:
            yield name, getattr(member, "__func__", member)


def parameters_of(value: Any) -> str:
    """The parameters with their defaults, in brackets; nothing for a property or an error."""
    if not callable(value) or (inspect.isclass(value) and issubclass(value, Exception)):
        return ""
    shown = []
    for parameter in inspect.signature(value).parameters.values():
        is_refused = parameter.kind is parameter.VAR_KEYWORD and parameter.name == "others"
        if parameter.name not in ("self", "cls") and not is_refused:
            shown.append(parameter.replace(annotation=parameter.empty))
    return str(inspect.Signature(shown))


def sentence_of(value: Any) -> str:
    """The first sentence of the docstring."""
    paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return (re.match(r".+?\.(?= [^a-z]|$)", paragraph) or [paragraph])[0]


def wrapped(indent: str, text: str) -> list[str]:
    rest = " " * len(indent)
    return textwrap.wrap(
        text, 120, initial_indent=indent, subsequent_indent=rest, break_on_hyphens=False
    )


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
