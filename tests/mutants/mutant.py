"""The type of a mutant."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A change of one place in a file of the package, the idea that it breaks, and the tests that should notice."""

    idea: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
