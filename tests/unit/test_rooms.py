"""Packages and rooms: every folder says in which order to read it, arrows go one way, what pages import is there."""

import ast
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.sources import ROOT, files_of, module_of, nodes_of

ROOMS = {
    "dynamic_cp": (
        *("types", "placement", "mechanisms", "plans", "pricing", "pipeline", "packing", "models", "memory", "search"),
        *("lengths", "learning", "pool", "decide"),
    ),
    "dynamic_cp.decide": ("bounds", "config_json", "comparison", "report", "sweep", "cli", "calibration", "first_day"),
    "megatron.dynamic_cp": (
        *("agreement", "repairs", "flags", "attention", "groups", "plans", "data", "model", "step", "pool"),
    ),
    "megatron.trainer": ("data", "flags", "ending", "checkpoints", "reporting", "setup", "loop"),
    "megatron.decide": ("calibration",),
    "megatron.integrations": ("foreign", "outside", "scheduler", "post_training", "weights", "lm_adaptor"),
}
"""Package -> its rooms; each imports those before it, none those after."""
PACKAGES = ("dynamic_cp", "megatron.dynamic_cp", "megatron.trainer", "megatron.decide", "megatron.integrations")
"""The planner, its host on megatron-core, the trainer, two leaves: each imports those before it, none those after."""
LEAVES = (
    "dynamic_cp.decide", "dynamic_cp.pool", "megatron.decide", "megatron.dynamic_cp.pool", "megatron.integrations",
)  # fmt: skip
"""Features beside the core, each in a folder of its own: nothing of the core imports one."""
DOORS = {"dynamic_cp": "lower_bound and plan_lengths, at their first use, for type checkers"}
"""Module of the core -> why it names a leaf."""
COMMANDS = {
    "megatron.dynamic_cp.run": "the documented command python -m megatron.dynamic_cp.run",
    "megatron.dynamic_cp.megatron_lm": "the documented import megatron.dynamic_cp.megatron_lm",
}
BELOW_ALL = ("dynamic_cp", "types")
"""The room that also modules in no room may use."""
READ_IN_ORDER = (
    *sorted({f"{package}.{room}" for package, rooms in ROOMS.items() for room in rooms}),
    *("megatron.decide", "megatron.integrations"),
    *(f"megatron.dynamic_cp.attention.{room}" for room in ("kernels", "mechanisms", "te", "linear")),
)


DOCS = "".join(
    path.read_text(encoding="utf-8")
    for path in sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")])
    if path.name != "LOG.md"
)


def imported_by(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, and names in them as if they were modules."""
    nodes = nodes_of(path)
    yield from (alias.name for node in nodes[ast.Import] for alias in node.names)
    for node in nodes[ast.ImportFrom]:
        assert node.level == 0, f"{path}: a relative import"
        yield str(node.module)
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports() -> dict[str, set[str]]:
    """Return module -> the modules that it imports: read once one is asked for, in one process of the tests."""
    files = files_of("dynamic_cp", "megatron", "tools", "benchmarks")
    return {module_of(path): set(imported_by(path)) for path in files}


def is_below(module: str, folder: str) -> bool:
    return f"{module}.".startswith(f"{folder}.")


def imported_below(module: str) -> set[str]:
    """Return what a module imports; of a folder, what any file in it does."""
    return set().union(*(names for other, names in imports().items() if is_below(other, module)))


def room_of(module: str, package: str) -> str | None:
    """Return the room of a package that a module lies in; None for one that lies in none."""
    room = module.removeprefix(f"{package}.").split(".")[0]
    return room if module.startswith(f"{package}.") and room in ROOMS[package] else None


def leaf_of(module: str) -> str | None:
    """Return the leaf that a module lies in; None: it is of the core."""
    return next((leaf for leaf in LEAVES if is_below(module, leaf)), None)


def test_every_arrow_between_packages_goes_one_way() -> None:
    arrows: Counter[tuple[str, str]] = Counter()
    backwards = set()
    for number, package in enumerate(PACKAGES):
        for module in (one for one in imports() if is_below(one, package)):
            for other, target in enumerate(PACKAGES):
                found = sum(name.startswith(f"{target}.") for name in imports()[module])
                arrows[package, target] += found
                backwards |= {module} if found and other > number else set()
    assert backwards == set(COMMANDS)
    for package in PACKAGES[1:]:
        assert arrows[package, PACKAGES[0]] > 3, f"{package} imports nothing of the planner: nothing was looked at"


def test_the_core_imports_no_leaf() -> None:
    """Not even late: what it needs of one it asks for by name, as of a plug-in (`import_module`)."""
    core = {module for module in imports() if is_below(module, "dynamic_cp") or is_below(module, "megatron")}
    core = {module for module in core if leaf_of(module) is None}
    into_leaves = {module: {leaf_of(name) for name in imports()[module]} - {None} for module in core}
    assert {module for module, leaves in into_leaves.items() if leaves} == DOORS.keys() | COMMANDS.keys()
    assert {leaf_of(module) for module in imports()} == {None, *LEAVES}


@pytest.mark.parametrize("package", ROOMS)
def test_every_arrow_between_rooms_goes_one_way(package: str) -> None:
    rooms = ROOMS[package]
    folder = ROOT / package.replace(".", "/")
    assert {path.parent.name for path in folder.glob("*/*.py")} == set(rooms), "a folder is in no order"
    arrows = {
        (here, there): (module, name)
        for module, names in imports().items()
        if (here := room_of(module, package))
        for name in names
        if (there := room_of(name, package)) and there != here
    }
    few = {"megatron.decide": 0, "megatron.integrations": 3}
    assert len(arrows) >= few.get(package, 1.5 * len(rooms)), "nothing was looked at"
    backwards = {one: where for one, where in arrows.items() if rooms.index(one[0]) < rooms.index(one[1])}
    assert not backwards


@pytest.mark.parametrize("package", ROOMS)
def test_what_lies_in_no_room_is_below_all_rooms_or_above_them(package: str) -> None:
    flat = {module_of(path) for path in (ROOT / package.replace(".", "/")).glob("*.py")} - {package}
    below = {None, BELOW_ALL[1] if package == BELOW_ALL[0] else None}
    into_rooms = {module for module in flat if {room_of(name, package) for name in imports()[module]} - below}
    of_rooms = {name for module, names in imports().items() if room_of(module, package) for name in names}
    assert flat, "nothing was looked at"
    assert not into_rooms & of_rooms


def order_of(room: str) -> str:
    """Return where a room names its files: in its docstring, or in a paragraph of that of its package."""
    around = max((one for one in ROOMS if is_below(room, one)), key=len)
    package = room if (path_of(room) / "__init__.py").exists() else around
    says = ast.get_docstring(ast.parse((path_of(package) / "__init__.py").read_text("utf-8"))) or ""
    own, *others = re.split(r"\n\n(?=[\w/]+: )", says)
    if package == room:
        return own.partition("ead in this order")[2] or own
    name = room.removeprefix(f"{package}.").replace(".", "/")
    return next(one for one in others if one.startswith(f"{name}: ")).partition("Files:")[2]


def path_of(module: str) -> Path:
    return ROOT / module.replace(".", "/")


@pytest.mark.parametrize("room", READ_IN_ORDER)
def test_a_room_reads_in_the_order_that_it_names(room: str) -> None:
    order = [f"{room}.{name}" for name in re.findall(r"`(\w+)`", order_of(room))]
    files = {path.stem for path in path_of(room).iterdir() if not path.name.startswith(("__", "py."))}
    assert sorted(order) == sorted(f"{room}.{name}" for name in files)
    for index, module in enumerate(order):
        later = {name for name in imported_below(module) for other in order[index + 1 :] if is_below(name, other)}
        assert not later, f"{module} imports what is read after it"


def test_folders_of_names_on_the_site_are_packages() -> None:
    """What reads them for the site looks into no other folder inside of a package."""
    names = re.findall(r"^::: (megatron(?:\.\w+)+)$", DOCS, re.MULTILINE)
    assert len(names) >= 10
    folders = {folder for name in names for folder in path_of(name).parents if (folder.parent / "__init__.py").exists()}
    assert folders
    assert not [folder for folder in folders if folder.is_dir() and not (folder / "__init__.py").exists()]


def test_what_pages_and_examples_name_is_where_they_say() -> None:
    package = r"(?:dynamic_cp|megatron\.(?:dynamic_cp|trainer|decide|integrations))"
    named = set(re.findall(rf"(?:^::: |`)({package}(?:\.\w+)+)(?:$|`|\()", DOCS, re.MULTILINE))
    for module, names in re.findall(rf"^from ({package}[\w.]*) import ([\w, ]+)$", DOCS, re.MULTILINE):
        named.update(f"{module}.{name}" for name in names.split(", "))
    named -= set(re.findall(r'"(dynamic_cp\.\w+)": \[', (ROOT / "setup.py").read_text("utf-8")))  # entry point groups
    assert len(named) > 100, "nothing was looked at"
    missing = []
    for name in sorted(named):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    assert not missing


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
