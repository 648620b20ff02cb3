"""Draws mutants by cosmic-ray, which must be installed: pip install cosmic-ray

    python tests/mutants/draw.py 7 plan:12 run:6          twelve of plan/, six of run/, with seed 7

It prints rows for `drawn.py`, where each gets the idea that it breaks and its tests by hand. Drawn are small changes of
one line: a number, a comparison, an operator, a truth value, a negation, a loop that ends too early or too late.
"""

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

try:
    from cosmic_ray.ast import ast_nodes
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names
    from parso import parse
except ImportError as error:
    sys.exit(f"{error}: drawing mutants needs cosmic-ray. pip install cosmic-ray")

PACKAGE = Path(__file__).resolve().parents[2] / "src/ring_dilated_attention"
LEAST_BYTES = 200  # of a file: smaller ones have a docstring and no more
KINDS = (
    "NumberReplacer",
    "ReplaceComparisonOperator",
    "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_Sub_Add",
    "ReplaceBinaryOperator_Mul_Add",
    "ReplaceBinaryOperator_FloorDiv_Mul",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "AddNot",
    "ZeroIterationForLoop",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ReplaceUnaryOperator_Delete_Not",
)
# `is None` and `in` have mutants that no code could mean.
OTHER_KINDS = ("Is", "NotIn")


class Change(NamedTuple):
    """One line of a file, changed, with as many lines before it as make the old text unique in the file."""

    line: int
    old: str
    new: str


def operators() -> list[str]:
    names = []
    for name in operator_names():
        is_wanted = any(kind in name for kind in KINDS)
        if is_wanted and not any(kind in name for kind in OTHER_KINDS):
            names.append(name)
    return names


def places(code: str) -> Iterator[tuple[str, int]]:
    """Each operator with the number of a place in the code that it can change."""
    module = parse(code)
    for name in operators():
        operator = get_operator(name)()
        number = 0
        for node in ast_nodes(module):
            for _ in operator.mutation_positions(node):
                yield name, number
                number += 1


def change_between(code: str, mutated: str) -> Change | None:
    """The change, if it is one of a single line."""
    before, after = code.split("\n"), mutated.split("\n")
    if len(before) != len(after):
        return None
    changed = [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    if len(changed) != 1:
        return None
    first = last = changed[0]
    while code.count("\n".join(before[first : last + 1])) != 1:
        if first > 0:
            first -= 1
        else:
            last += 1
    old, new = ("\n".join(lines[first : last + 1]) for lines in (before, after))
    return Change(changed[0] + 1, old, new)


def lines_of_docstrings(code: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def is_text(line: str) -> bool:
    """Whether a line is of a message: it raises an error, or formats a text."""
    return "raise" in line or 'f"' in line


def drawn(room: str, number: int, rng: random.Random) -> Iterator[tuple[str, Change]]:
    """So many changes of a room, at most one of a line, each with its file."""
    candidates = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        if path.stat().st_size > LEAST_BYTES:
            code = path.read_text()
            candidates += [(path, code, *place) for place in places(code)]
    rng.shuffle(candidates)
    used: set[tuple[Path, int]] = set()
    for path, code, name, place in candidates:
        if len(used) == number:
            return
        mutated = mutate_code(code, get_operator(name)(), place)
        change = change_between(code, mutated) if mutated is not None else None
        if change is None or (path, change.line) in used:
            continue
        if change.line in lines_of_docstrings(code) or is_text(code.split("\n")[change.line - 1]):
            continue
        used.add((path, change.line))
        yield str(path.relative_to(PACKAGE)), change


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    rng = random.Random(int(sys.argv[1]))
    for argument in sys.argv[2:]:
        room, number = argument.split(":")
        for file, change in drawn(room, int(number), rng):
            print(f"    # {file}, line {change.line}")
            print(f"    Mutant({'IDEA'!r}, {file!r}, {change.old!r}, {change.new!r}, TESTS),")


main()
