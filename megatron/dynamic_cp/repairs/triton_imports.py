"""Imports of megatron-core that fail without triton, which torch for CPUs does not bring.

Some modules (batch-invariant mode, MoE) import triton although nothing of theirs has to run, and are always imported.
Only they see a stand-in for it; everybody else finds that triton is not there.
"""

from __future__ import annotations

import builtins
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType, SimpleNamespace
from typing import Any

_MODULES = frozenset(
    {
        "megatron.core.transformer.custom_layers.batch_invariant_kernels",
        "megatron.core.transformer.moe.paged_stash",
        "megatron.core.transformer.moe.ops.paged_stash",
    }
)
_ASKS_NOT = re.compile(r"^import triton\b", re.MULTILINE)
_STAND_IN = SimpleNamespace(
    jit=lambda kernel=None, **_: kernel or (lambda later: later),
    language=SimpleNamespace(constexpr=int),  # an annotation
)


def install() -> None:
    """Make megatron-core importable where triton is not installed; a second call does nothing."""
    if importlib.util.find_spec("triton") is None and not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds those of `_MODULES` that import triton without asking, in the installed release."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname not in _MODULES:
            return None
        spec: ModuleSpec | None = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return spec
        if _ASKS_NOT.search(spec.loader.get_source(fullname) or ""):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Loads a module whose imports of triton are answered by the stand-in."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] = (),
    level: int = 0,
) -> Any:
    if name.partition(".")[0] == "triton":
        return _STAND_IN
    return builtins.__import__(name, globals, locals, fromlist, level)
