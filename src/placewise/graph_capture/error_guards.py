"""Conditions that only decide whether an error is raised: `assert`, and `if ...: raise`.

Their value is not needed to record a step: it is recorded as one that raises nothing, and every step checks the condition.
Python tells which expression of the source is being decided by, and its statement which value raises nothing.
"""

import ast
import linecache
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from placewise.core.errors import one_line

Position = tuple[int | None, ...]  # first and last line, first and last column

LONGEST_TEXT = 60  # characters

CHECKS = ("_check", "_check_with")  # functions of torch that raise an error if their argument is false

TORCH = Path(torch.__file__).parent

BETWEEN = (  # code between the step's own and the reader of a value
    str(Path(__file__).parent), *(str(TORCH / name) for name in ("_compile.py", "_dynamo", "_ops.py", "overrides.py")),
    str(TORCH / "utils" / "_python_dispatch.py"),
)  # fmt: skip


class ErrorGuard(NamedTuple):
    """A condition with which the code goes on if it has this outcome."""

    outcome: bool
    text: str  # the statement, and its line


def find_error_guard() -> ErrorGuard | None:
    """Returns the guard for which the step's code reads a tensor just now; None if more depends on it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(BETWEEN):
        frame = frame.f_back
    if frame is None:
        return None
    guards = _guards_of(frame.f_code.co_filename)
    positions = list(frame.f_code.co_positions())
    present = frame.f_lasti // 2
    for position in (positions[present], positions[present - 1]):  # a jump has its statement's, what it reads comes before
        if position in guards:
            return guards[position]
    return None


@cache
def _guards_of(file: str) -> dict[Position, ErrorGuard]:
    """Returns the conditions of a file that only decide whether an error is raised, by their place in it."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[Position, ErrorGuard] = {}
    for statement in ast.walk(tree):
        for test, outcome in _tests(statement):
            short = one_line(ValueError(ast.unparse(test)))
            short = short if len(short) <= LONGEST_TEXT else f"{short[:LONGEST_TEXT]}..."
            words = f"assert {short}" if outcome else f"if {short}: raise"
            text = f"{words} ({Path(file).name}:{test.lineno})"
            for node, value in _deciding(test, outcome):
                place = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
                found[place] = ErrorGuard(value, text)
    return found


def _tests(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Yields the condition of a statement that does nothing but raise an error by it, with the value that raises none."""
    if isinstance(node, ast.Assert):
        yield node.test, True
    elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
        ways_out = (ast.Return, ast.Break, ast.Continue, ast.Yield)
        if not any(isinstance(inner, ways_out) for part in node.body for inner in ast.walk(part)):
            yield node.test, False
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CHECKS:
        yield from ((argument, True) for argument in node.args)


def _deciding(test: ast.expr, outcome: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yields the parts of a condition by which it is decided, with the value that each must have for this outcome."""
    yield test, outcome
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _deciding(test.operand, not outcome)
    elif isinstance(test, ast.BoolOp):
        is_each = isinstance(test.op, ast.And) == outcome  # all of them must have it, otherwise the last that is read
        for part in test.values if is_each else test.values[-1:]:
            yield from _deciding(part, outcome)
    elif isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "bool" and test.args:
        yield from _deciding(test.args[0], outcome)
