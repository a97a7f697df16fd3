"""Which mechanisms a job may use is decided in one file: names of mechanisms are compared and listed nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.pricing.resolution import allowed_exchanges, exchanges_of
from dynamic_cp.search.plan_arrays import _exchanges
from dynamic_cp.types import AUTO, CHOICES, RING_ALONE, TRAITS, UNPLACED, is_placed
from tests.unit.mechanisms.test_latent_ring import DEEPSEEK_V3
from tests.unit.support import TINY_MODEL

ROOT = Path(__file__).parents[2]
COMPARE = {"dynamic_cp/pricing/resolution.py": "decides"}
LIST = {
    **COMPARE,
    "dynamic_cp/types/attention.py": "the table of their traits",
    "megatron/dynamic_cp/attention/thd.py": "the table of executors",
    "megatron/dynamic_cp/attention/te/support.py": "since which release TransformerEngine has each",
}
HOMONYMS = {
    "dynamic_cp/report/trace.py": "sends between pipeline stages are p2p, too",
    "dynamic_cp/calibration/fit.py": "collectives that are measured",
    "dynamic_cp/calibration/measurements.py": "collectives that are measured",
    "megatron/dynamic_cp/calibration/links.py": "collectives that are measured",
    "megatron/trainer/weights/names.py": "widths of weights",
}
CLASSES = {type(mechanism).__name__ for mechanism in MECHANISMS.values()}
CONSTANTS = {"BY_PLACEMENT", "RING_ALONE", "CP_COMM_TYPES", "UNPLACED"}


def named_in(nodes: list[ast.expr | None], constants: set[str]) -> list[str]:
    """Return the mechanisms that these expressions, or what they hold, name."""
    names = []
    for node in nodes:
        if isinstance(node, ast.Constant) and node.value in TRAITS:
            names.append(str(node.value))
        elif isinstance(node, ast.Attribute) and node.attr == "name" and isinstance(node.value, ast.Name):
            names += [node.value.id] if node.value.id in CLASSES else []
        elif isinstance(node, ast.Name) and node.id in constants:
            names.append(node.id)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            names += named_in([*node.elts], constants)
    return names


def compared(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from named_in([node.left, *node.comparators], CONSTANTS)


def listed(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            yield from named_in([*node.elts], set())
        elif isinstance(node, ast.Dict):
            yield from named_in([*node.keys], set())


def test_names_of_mechanisms_are_compared_and_listed_where_that_is_decided() -> None:
    files = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("dynamic_cp", "megatron")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    assert len(files) > 300, "nothing was looked at"
    for kind, allowed in ((compared, COMPARE), (listed, LIST)):
        names = {file: list(kind(tree)) for file, tree in files.items() if file not in HOMONYMS}
        assert not {file: found for file, found in names.items() if found and file not in allowed}
        assert all(names[file] for file in allowed), "a file is allowed what it does not do"
    both = {file: [*compared(files[file]), *listed(files[file])] for file in HOMONYMS}
    assert all(both.values()), "a file is excused of what it does not do"


@pytest.mark.parametrize("source", ['x == "blocks"', 'x in ("p2p", y)', "x != Ring.name", "x in UNPLACED"])
def test_a_comparison_would_be_seen(source: str) -> None:
    assert list(compared(ast.parse(source)))


def test_auto_is_the_same_by_flags_and_by_model() -> None:
    windowed = replace(TINY_MODEL, window_tokens=48)
    assert windowed.window is not None
    assert DEEPSEEK_V3.has_latents
    for model in (TINY_MODEL, windowed, DEEPSEEK_V3):
        has = {"has_windows": model.window is not None, "has_latents": model.has_latents}
        for has_masks in (False, True):
            names = exchanges_of(AUTO, has_masks=has_masks, **has)
            assert allowed_exchanges(AUTO, model, has_masks=has_masks) == names
            assert any(map(is_placed, names)) == (has_masks or has["has_windows"])
            assert all(MECHANISMS[name].serves_windows for name in names) or not has["has_windows"]
        assert _exchanges(AUTO, model) == exchanges_of(AUTO, may_be_placed=False, **has)
        assert exchanges_of(AUTO, left_out=RING_ALONE) == tuple(name for name in exchanges_of(AUTO) if name != "p2p")
    assert CHOICES[0] == AUTO
    assert set(CHOICES[1:]) == set(TRAITS) == {*UNPLACED, *filter(is_placed, TRAITS)}
