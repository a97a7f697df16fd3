"""Products in FP8: contexts and recipes are TransformerEngine's, shapes are checked, and numbers stay exact.

So that nothing but what is asked of shapes may have changed. Rules of TransformerEngine's Python are asked there; those
of cuBLAS and of its kernels are here.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.real_transformer_engine import device

BLACKWELL: device.Capability = (10, 0)
"""Has all recipes."""
Context = tuple[str, str, tuple[int, ...]]
"""Name of a recipe, format, ranks of the group that shares largest values."""

entered: list[Context] = []
products: list[tuple[str, int]] = []
"""(name of the recipe, rows of the input) of each product."""


def install() -> None:
    """Remember and check from now on what is in FP8, in a process that has loaded TransformerEngine."""
    device.pretend(BLACKWELL)
    torch.version.cuda = "12.9"
    pytorch = importlib.import_module("transformer_engine.pytorch")
    autocast = pytorch.fp8_autocast

    def remembered(*, enabled: bool, fp8_recipe: Any, fp8_group: dist.ProcessGroup) -> Any:
        assert enabled
        ranks = tuple(dist.get_process_group_ranks(fp8_group))
        entered.append((type(fp8_recipe).__name__, fp8_recipe.fp8_format.name, ranks))
        return autocast(enabled=True, fp8_recipe=fp8_recipe, fp8_group=fp8_group)

    pytorch.fp8_autocast = remembered
    # Delayed scaling shares largest values, of which there are none, and would make scales of them.
    extension = importlib.import_module("transformer_engine_torch")
    extension.fused_amax_and_scale_update_after_reduction = lambda *_args: None
    for kind in (pytorch.Linear, pytorch.LayerNormLinear):
        _check_products(kind, autocast)


def _check_products(kind: type[torch.nn.Module], autocast: Any) -> None:
    manager = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
    rules = importlib.import_module("transformer_engine.pytorch.utils")
    forward = kind.forward

    def checked(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not manager.is_fp8_enabled():
            return forward(self, x, *args, **kwargs)
        rules.assert_dim_for_fp8_exec(x.reshape(-1, x.shape[-1]), self.weight)
        is_gathered = self.sequence_parallel and self.parallel_mode == "column" and self.tp_size > 1
        _check(type(manager.get_fp8_recipe()).__name__, x, is_gathered=is_gathered)
        with autocast(enabled=False):
            return forward(self, x, *args, **kwargs)

    kind.forward = checked  # type: ignore[method-assign]


def _check(recipe: str, x: Tensor, *, is_gathered: bool) -> None:
    """Assert what a product needs of its input [rows, 1, channels], of a rank's own share, too.

    Args:
        is_gathered: by sequence parallelism. Blocks are gathered whole; until 2.13 anything else was an assertion, now
            it is gathered in bfloat16, which takes twice the bytes and no channels are asked of.
    """
    rows, channels = x.numel() // x.shape[-1], x.shape[-1]
    aligned = 32 if recipe == "MXFP8BlockScaling" else 16
    assert rows % aligned == 0, f"TE: {rows} rows in FP8 ({recipe}), a multiple of {aligned} is needed"
    assert channels % 16 == 0, f"TE: {channels} channels in FP8, a multiple of 16 is needed"
    if is_gathered and recipe == "Float8BlockScaling":
        assert rows % 128 == 0, f"TE: {rows} rows in blocks, a multiple of 128 is needed to gather them in FP8"
    products.append((recipe, rows))
