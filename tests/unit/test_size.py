"""The budget of lines, room by room: mass is what makes a reader lose the way. A number changes only with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("dynamic_cp", "megatron/dynamic_cp", "megatron/trainer", "megatron/lm_adaptor")
MOST_LINES: dict[str, int] = {}
"""Room -> lines of its Python files, rounded up to tens; files outside rooms count for their package."""
MOST_LONG_FUNCTIONS = 17
"""Functions of more than LONG lines, and of more than MANY parameters: fewer is the aim."""
MOST_WIDE_FUNCTIONS = 25
LONG, MANY = 60, 8


def lines_of_rooms() -> dict[str, int]:
    found: dict[str, int] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT / package).parts
            room = package if len(parts) == 1 else f"{package}/{parts[0]}"
            found[room] = found.get(room, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return found


def functions() -> Iterator[ast.FunctionDef]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    yield node


def test_no_room_is_larger_than_its_budget() -> None:
    found = lines_of_rooms()
    assert set(found) == set(MOST_LINES), "a room has no budget"
    over = {room: (lines, MOST_LINES[room]) for room, lines in found.items() if lines > MOST_LINES[room]}
    assert not over, f"make room, or raise the budget in this file and say why in the commit: {over}"
    loose = {room: (lines, MOST_LINES[room]) for room, lines in found.items() if lines < 0.9 * MOST_LINES[room] - 20}
    assert not loose, f"lower the budget of what got smaller: {loose}"


def test_long_and_wide_functions_get_no_more() -> None:
    every = list(functions())
    assert len(every) > 3000
    long = [one.name for one in every if one.end_lineno is not None and one.end_lineno - one.lineno + 1 > LONG]
    wide = [one.name for one in every if num_parameters(one) > MANY]
    assert len(long) <= MOST_LONG_FUNCTIONS, long
    assert len(wide) <= MOST_WIDE_FUNCTIONS, wide


def num_parameters(function: ast.FunctionDef) -> int:
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))
