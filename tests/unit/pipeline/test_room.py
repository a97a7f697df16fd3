"""The room `dynamic_cp/pipeline`: read in order, no circle, and the documented paths that lead into it."""

from __future__ import annotations

import ast
import importlib
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from dynamic_cp import pipeline

ROOT = Path(__file__).parents[3]
ROOM = "dynamic_cp.pipeline"
DOCUMENTED = {"dynamic_cp.simulator": "simulate", "dynamic_cp.timeline": "Timeline"}
"""Old module -> the name that docs/api.md documents there."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_by(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere, also inside functions; a package for what stands in it."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


ARROWS = {name_of(path): imported_by(path) for path in sorted((ROOT / "dynamic_cp").rglob("*.py"))}
ARROWS = {module: (imported & ARROWS.keys()) - {module} for module, imported in ARROWS.items()}


def test_the_room_reads_in_the_order_that_it_names() -> None:
    order = [f"{ROOM}.{name}" for name in re.findall(r"`(\w+)`", pipeline.__doc__ or "")]
    assert sorted(order) == sorted(module for module in ARROWS if module.startswith(f"{ROOM}."))
    for index, module in enumerate(order):
        assert {other for other in ARROWS[module] if other.startswith(f"{ROOM}.")} <= set(order[:index]), module


def test_what_the_room_imports_does_not_import_it() -> None:
    room = {module for module in ARROWS if module.startswith(ROOM)}
    below: set[str] = set()
    pending = list(room)
    while pending:
        new = ARROWS[pending.pop()] - room - below - {"dynamic_cp"}
        below |= new
        pending += new
    assert {"dynamic_cp.pricing.cost_model", "dynamic_cp.types"} <= below
    assert not {module: ARROWS[module] & room for module in below if ARROWS[module] & room}
    [*TopologicalSorter({module: ARROWS[module] & room for module in room}).static_order()]  # raises for a circle


@pytest.mark.parametrize(("old", "name"), DOCUMENTED.items())
def test_documented_paths_lead_into_the_room(old: str, name: str) -> None:
    assert f"::: {old}.{name}\n" in (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    found = getattr(importlib.import_module(old), name)
    assert found.__module__ == old.replace("dynamic_cp", ROOM)


def test_only_users_take_the_documented_paths() -> None:
    files = [path for top in ("dynamic_cp", "megatron", "tools", "benchmarks") for path in (ROOT / top).rglob("*.py")]
    assert len(files) > 200
    assert not {name_of(path): old for path in files for old in imported_by(path) & DOCUMENTED.keys()}
