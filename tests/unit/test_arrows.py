"""Which package may import which: the planner, its host on megatron-core, the trainer, the adaptor to Megatron-LM."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
IN_ORDER = ("dynamic_cp", "megatron/dynamic_cp", "megatron/trainer", "megatron/lm_adaptor")
"""Each imports those before it, none those after."""
COMMANDS = {
    "megatron/dynamic_cp/run.py": "the documented command python -m megatron.dynamic_cp.run",
    "megatron/dynamic_cp/megatron_lm.py": "the documented import megatron.dynamic_cp.megatron_lm",
}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere, as paths."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.replace(".", "/") for name in names}


def test_every_arrow_between_packages_goes_one_way() -> None:
    arrows: defaultdict[tuple[str, str], int] = defaultdict(int)
    backwards = set()
    for number, package in enumerate(IN_ORDER):
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in imported(path):
                for target_number, target in enumerate(IN_ORDER):
                    if not name.startswith(f"{target}/"):
                        continue
                    arrows[package, target] += 1
                    if target_number > number:
                        backwards.add(path.relative_to(ROOT).as_posix())
    assert backwards == set(COMMANDS)
    for package, target in zip(IN_ORDER[1:], IN_ORDER, strict=False):
        assert arrows[package, target] > 3, f"{package} imports nothing of {target}: nothing was looked at"
