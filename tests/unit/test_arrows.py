"""Which package may import which: the planner, its host on megatron-core, the trainer, the adaptor to Megatron-LM."""

from __future__ import annotations

from collections import defaultdict

from tests.unit.test_rooms import ROOT, imported_by

IN_ORDER = ("dynamic_cp", "megatron/dynamic_cp", "megatron/trainer", "megatron/lm_adaptor")
"""Each imports those before it, none those after."""
COMMANDS = {
    "megatron/dynamic_cp/run.py": "the documented command python -m megatron.dynamic_cp.run",
    "megatron/dynamic_cp/megatron_lm.py": "the documented import megatron.dynamic_cp.megatron_lm",
}


def test_every_arrow_between_packages_goes_one_way() -> None:
    arrows: defaultdict[tuple[str, str], int] = defaultdict(int)
    backwards = set()
    for number, package in enumerate(IN_ORDER):
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in (module.replace(".", "/") for module in imported_by(path)):
                for target_number, target in enumerate(IN_ORDER):
                    if not name.startswith(f"{target}/"):
                        continue
                    arrows[package, target] += 1
                    if target_number > number:
                        backwards.add(path.relative_to(ROOT).as_posix())
    assert backwards == set(COMMANDS)
    for package, target in zip(IN_ORDER[1:], IN_ORDER, strict=False):
        assert arrows[package, target] > 3, f"{package} imports nothing of {target}: nothing was looked at"
