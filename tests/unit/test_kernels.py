"""Large compiled kernels explain themselves by an example, and the examples are true."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest

from dynamic_cp.pipeline.graph import pipeline_graph

ROOT = Path(__file__).parents[2]
LARGE = 40
"""Lines of a kernel, its docstring among them; what is shorter is read at once."""
NAMES = {"np": np, "pipeline_graph": pipeline_graph}
"""What examples need besides the names of their file."""


def kernels() -> list[tuple[str, ast.FunctionDef]]:
    """Return (module, function) of everything that numba compiles."""
    return [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), node)
        for path in sorted((ROOT / "dynamic_cp").rglob("*.py"))
        if "@compiled" in (text := path.read_text(encoding="utf-8")) or "@inlined" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and {"compiled", "inlined"} & {one.id for one in node.decorator_list if isinstance(one, ast.Name)}
    ]


def lines_of(function: ast.FunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def text_of(function: ast.FunctionDef) -> str:
    return ast.get_docstring(function) or ""


KERNELS = kernels()
SHOWN = [(module, function) for module, function in KERNELS if ">>>" in text_of(function)]


def test_large_kernels_have_an_example() -> None:
    large = [(module, function) for module, function in KERNELS if lines_of(function) > LARGE]
    assert len(KERNELS) > 180
    assert large
    without = [f"{module}.{function.name}" for module, function in large if "Example:" not in text_of(function)]
    assert not without, f"show it with small numbers, or cut it into parts of up to {LARGE} lines: {without}"


@pytest.mark.parametrize(("module", "function"), SHOWN, ids=[function.name for _, function in SHOWN])
def test_examples_are_true(module: str, function: ast.FunctionDef) -> None:
    names = vars(importlib.import_module(module)) | NAMES
    example = doctest.DocTestParser().get_doctest(text_of(function), names, function.name, module, 0)
    assert doctest.DocTestRunner().run(example).failed == 0
