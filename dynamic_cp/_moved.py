"""What importing the package does first: it refuses an older Python, and finds imports that moved and that pages named
under their old name for this release, with a warning that says the new one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

LEAST = (3, 10)

if sys.version_info < LEAST:
    found, needed = (".".join(map(str, version[:2])) for version in (sys.version_info, LEAST))
    raise ImportError(f"this is Python {found}, dynamic_cp needs {needed} or newer: install one, and use its pip")

_DECIDE = ("bounds", "calibration", "cli", "comparison", "doctor", "first_day", "report", "sweep")
_INTEGRATIONS = ("foreign", "outside", "post_training", "scheduler")
MOVED = {
    **{f"dynamic_cp.{name}": f"dynamic_cp.decide.{name}" for name in _DECIDE},
    **{f"megatron.dynamic_cp.{name}": f"megatron.integrations.{name}" for name in _INTEGRATIONS},
    "dynamic_cp.lengths.distribution": "dynamic_cp.decide.distribution",
    "dynamic_cp.lengths.workloads": "dynamic_cp.decide.workloads",
    "dynamic_cp.search.plan_arrays": "dynamic_cp.decide.plan_arrays",
    "dynamic_cp.search.plan_in_memory": "dynamic_cp.decide.plan_in_memory",
    "dynamic_cp.types.mask_rules": "dynamic_cp.decide.mask_rules",
    "megatron.dynamic_cp.calibration": "megatron.decide.calibration",
    "megatron.dynamic_cp.data.turns": "megatron.integrations.turns",
    "megatron.dynamic_cp.doctor": "megatron.decide.doctor",
    "megatron.dynamic_cp.data.shared_question": "megatron.dynamic_cp.data.sample_tokens",
    "megatron.dynamic_cp.layout.sharding": "megatron.dynamic_cp.packed_seq_params",
    "megatron.dynamic_cp.layout": "megatron.dynamic_cp",
    "megatron.dynamic_cp.step.loss": "megatron.dynamic_cp.step.schedule",
    "megatron.dynamic_cp.model.rotary": "megatron.dynamic_cp.model.self_attention",
    "megatron.integrations.post_training.heads": "megatron.integrations.post_training.megatron_passes",
    "megatron.trainer.weights": "megatron.integrations.weights",
    "megatron.trainer.data.preferences": "megatron.integrations.preferences",
    "megatron.trainer.data.token_lengths": "megatron.decide.token_lengths",
}
"""Old name -> new name, of a module and of all below it."""


class _Finder(MetaPathFinder):
    """Finds a name in MOVED, or one below it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for old, new in MOVED.items() if name.startswith(("dynamic_cp.", "megatron.")) else ():
            if f"{name}.".startswith(f"{old}."):
                spec = find_spec(new + name.removeprefix(old))
                if spec is None:
                    return None
                is_package = spec.submodule_search_locations is not None
                return ModuleSpec(name, _Loader(spec), origin=spec.origin, is_package=is_package)
        return None


class _Loader(Loader):
    """Gives a module its old name beside its own."""

    def __init__(self, new: ModuleSpec) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} is now {self._new.name}: the old name goes with the next release", FutureWarning, 2)
        return import_module(self._new.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._new  # the import system has put the old one in its place

    def get_code(self, name: str) -> CodeType:
        """Return what `python -m` runs."""
        code: CodeType = self._new.loader.get_code(self._new.name)  # type: ignore[union-attr]
        return code


def install() -> None:
    """Put the finder first: the path finder would otherwise load `old.part` as a second copy of `new.part`."""
    sys.meta_path.insert(0, _Finder())
