"""Imports that moved: under the old name for this release, with a line that says the new one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

_DECIDE = ("bounds", "calibration", "cli", "comparison", "doctor", "first_day", "report", "sweep")
_INTEGRATIONS = ("foreign", "outside", "post_training", "scheduler")
MOVED = {
    **{f"dynamic_cp.{name}": f"dynamic_cp.decide.{name}" for name in _DECIDE},
    **{f"megatron.dynamic_cp.{name}": f"megatron.integrations.{name}" for name in _INTEGRATIONS},
    "megatron.dynamic_cp.calibration": "megatron.decide.calibration",
    "megatron.dynamic_cp.doctor": "megatron.decide.doctor",
    "megatron.trainer.weights": "megatron.integrations.weights",
    "megatron.trainer.data.preferences": "megatron.integrations.preferences",
}
"""Old name -> new name, of a module and of all below it."""


class _Finder:
    """Finds what no other finder does: a name in MOVED, or one below it."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        for old, new in MOVED.items():
            if f"{name}.".startswith(f"{old}."):
                return ModuleSpec(name, _Loader(new + name.removeprefix(old)))
        return None


class _Loader:
    """Gives a module its old name beside its own."""

    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} is now {self._new}: the old name goes with the next release", FutureWarning, 2)
        module = import_module(self._new)
        self._own = module.__spec__  # the import system puts the other one in its place
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own


def install() -> None:
    """Have old names found, after all that other finders know."""
    if not any(isinstance(finder, type) and finder is _Finder for finder in sys.meta_path):
        sys.meta_path.append(_Finder)  # type: ignore[arg-type]
