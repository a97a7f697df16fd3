"""The rooms `mechanisms` and `pricing`: every arrow one way, modules in the order that the room names."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from dynamic_cp import CostModel, cost_model

PACKAGE = Path(cost_model.__file__).parent
MAY_IMPORT = {
    "mechanisms": {"arrays", "convex", "errors", "types"},
    "pricing": {"_jit", "arrays", "convex", "errors", "mechanisms", "padding", "types"},
}
"""Room -> what of dynamic_cp it may import besides itself."""


def imported_by(path: Path) -> set[str]:
    """Return the modules of dynamic_cp that a file imports anywhere, without the name of the package."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {module.removeprefix("dynamic_cp.") for module in modules if module.startswith("dynamic_cp.")}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    files = {path.stem: imported_by(path) for path in (PACKAGE / room).glob("*.py") if path.stem != "__init__"}
    assert len(files) > 5
    for name, imported in files.items():
        outside = {module.partition(".")[0] for module in imported if not module.startswith(f"{room}.")}
        assert outside <= MAY_IMPORT[room], name
    # Inside, too: what a module needs can be read before it.
    read: set[str] = set()
    inside = {name: {one.partition(".")[2] for one in files[name] if one.startswith(room)} for name in files}
    while ready := {name for name in inside if name not in read and inside[name] <= read}:
        read |= ready
    assert read == set(files), "a circle"
    named = re.findall(r"\b[a-z_]+\b", importlib.import_module(f"dynamic_cp.{room}").__doc__ or "")
    assert set(files) <= set(named), "the docstring of the room names every module"


def test_nobody_inside_takes_the_public_path() -> None:
    assert cost_model.CostModel is CostModel
    users = [path for path in PACKAGE.rglob("*.py") if "cost_model" in imported_by(path)]
    assert users == []
