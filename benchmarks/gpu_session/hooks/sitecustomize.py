"""Loaded by each process of a part that asks for it (`Part.hooks`), never by a run.

SESSION_ONE_CONFIG=1   Triton's autotuners time one configuration of a program: compiling them is what takes minutes.
SESSION_FLA_ANYWAY=1   flash-linear-attention computes its gated backward with a Triton for which it refuses that on
                       Hopper, to see by how much and how long.
SESSION_PORTABLE=1     layers of linear attention compute by torch's products on the GPU, so that exchanges, layout and
                       memory run there without flash-linear-attention.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

KERNELS = "megatron.dynamic_cp.attention.linear.kernels"


def _one_config(module: Any) -> None:
    init = module.Autotuner.__init__

    def fewer(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        init(self, fn, arg_names, configs[:1], *args, **kwargs)

    module.Autotuner.__init__ = fewer


def _anyway(module: Any) -> None:
    module.TRITON_ABOVE_3_7_1 = True


def _kernels(module: Any) -> None:
    if os.environ.get("SESSION_FLA_ANYWAY"):
        module.why_not_triton = lambda *_: None
    if os.environ.get("SESSION_PORTABLE"):
        module.why_not = lambda *_: None
        module.choose_linear_kernel = lambda *_: module.PORTABLE


WANTED: dict[str, Callable[[Any], None]] = {KERNELS: _kernels}
if os.environ.get("SESSION_ONE_CONFIG"):
    WANTED["triton.runtime.autotuner"] = _one_config
if os.environ.get("SESSION_FLA_ANYWAY"):
    WANTED["fla.ops.common.chunk_o"] = _anyway


class _After(importlib.abc.MetaPathFinder):
    """Changes a module once it is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = WANTED.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            change(module)

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _After())
