"""For mkdocstrings: of a class the API shows methods, properties, and attributes that have a docstring.

The fields of a dataclass stand in its signature and its parameters. What `__init__` leaves in `self` is no promise.
"""

from typing import Any

from griffe import Extension, Module, Object


class Members(Extension):
    def on_package(self, *, pkg: Module, **_: Any) -> None:
        _prune(pkg)


def _prune(parent: Object) -> None:
    for name, member in list(parent.members.items()):
        if member.is_alias:
            continue
        if (
            parent.is_class
            and member.is_attribute
            and "property" not in member.labels
            and not member.has_docstring
        ):
            del parent.members[name]
        elif member.is_module or member.is_class:
            _prune(member)
