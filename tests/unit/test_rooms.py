"""Rooms: every folder says in which order to read it, every arrow goes one way, documented paths only lead inside."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROOMS = (
    "agreement",
    "flags",
    "measuring",
    "step",
    "layout",
    "attention",
    "groups",
    "plans",
    "data",
    "model",
    "repairs",
    "foreign",
    "calibration",
    "outside",
)
"""Rooms of megatron/dynamic_cp; each imports those before it, none those after."""
READ_IN_ORDER = tuple(room for room in ROOMS if room not in ("attention", "calibration", "outside"))
"""Rooms whose docstring names all their files, each after those that it imports."""
DOCUMENTED = {
    "megatron.dynamic_cp.foreign_iterator": ("ForeignIteratorWrapper", "wrap_data_iterator"),
    "megatron.dynamic_cp.layer_specs": ("gpt_block_spec",),
    "megatron.dynamic_cp.loss": ("forward_step",),
    "megatron.dynamic_cp.planner": ("Planner",),
    "megatron.dynamic_cp.planning": ("PlanSource",),
    "megatron.dynamic_cp.probing": ("ProbedSamples", "probe_lengths"),
    "megatron.dynamic_cp.process_groups": ("DynamicCPGroups",),
    "megatron.dynamic_cp.rotary": ("use_one_rotary_table",),
    "megatron.dynamic_cp.sharding": ("packed_shard_positions",),
}
"""Module in no room -> what docs and examples import from it."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_by(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, and names in them as if they were modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = sorted(path for folder in ("dynamic_cp", "megatron") for path in (ROOT / folder).rglob("*.py"))
IMPORTS = {name_of(path): set(imported_by(path)) for path in FILES}


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["megatron", "dynamic_cp"] and len(parts) > 2 and parts[2] in ROOMS else None


def test_every_arrow_between_rooms_goes_one_way() -> None:
    found = {room for module in IMPORTS if (room := room_of(module))}
    assert found == set(ROOMS), "a folder is in no order"
    arrows = {
        (room, target): (module, name)
        for module, names in IMPORTS.items()
        if (room := room_of(module))
        for name in names
        if (target := room_of(name)) and target != room
    }
    assert len(arrows) > 20
    backwards = {one: where for one, where in arrows.items() if ROOMS.index(one[0]) < ROOMS.index(one[1])}
    assert not backwards


@pytest.mark.parametrize("room", READ_IN_ORDER)
def test_a_room_reads_in_the_order_that_it_names(room: str) -> None:
    package = f"megatron.dynamic_cp.{room}"
    says = ast.get_docstring(ast.parse((ROOT / "megatron" / "dynamic_cp" / room / "__init__.py").read_text())) or ""
    order = [f"{package}.{name}" for name in re.findall(r"`(\w+)`", says)]
    assert sorted(order) == sorted(module for module in IMPORTS if module.startswith(f"{package}."))
    for index, module in enumerate(order):
        assert not IMPORTS[module] & set(order[index + 1 :]), f"{module} imports what is read after it"


@pytest.mark.parametrize("module", DOCUMENTED)
def test_a_documented_path_leads_into_a_room_and_nobody_goes_through_it(module: str) -> None:
    names = DOCUMENTED[module]
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(names)
    assert all(room_of(getattr(found, name).__module__) for name in names)
    through = {other for other, names in IMPORTS.items() if module in names}
    assert not through, "import from the room"


def test_the_walk_of_one_sample_names_at_most_eight_files_and_what_is_in_them() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## One sample, from loader to loss")[1]
    walk = re.findall(r"\| (\d) \| `([\w/]+\.py)` \| (.*) \|\n", page)
    assert [number for number, _, _ in walk] == [str(number) for number in range(1, len(walk) + 1)]
    assert 5 <= len({path for _, path, _ in walk}) <= 8
    for _, path, says in walk:
        names = re.findall(r"`(\w+)`", says)
        assert names, path
        others = "".join((ROOT / other).read_text(encoding="utf-8") for _, other, _ in walk)
        defined = set(re.findall(r"(?:def|class) (\w+)", (ROOT / path).read_text(encoding="utf-8")))
        assert names[0] in defined, path
        assert all(f" {name}(" in others or f" {name}:" in others for name in names), names
