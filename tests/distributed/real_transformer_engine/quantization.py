"""Products in FP8: contexts, recipes and checks are TransformerEngine's, cuBLAS's check is here, numbers stay exact."""

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
        rows = x.reshape(-1, x.shape[-1])
        rules.assert_dim_for_fp8_exec(rows, self.weight)
        is_gathered = self.sequence_parallel and self.parallel_mode == "column" and self.tp_size > 1
        _check(manager.get_fp8_recipe(), rows, is_gathered=is_gathered)
        with autocast(enabled=False):
            return forward(self, x, *args, **kwargs)

    kind.forward = checked  # type: ignore[method-assign]


def _check(recipe: Any, x: Tensor, *, is_gathered: bool) -> None:
    """Assert what a product needs of a rank's share [rows, channels] of its input. Blocks are gathered whole; until
    2.13 anything else was an assertion, now it is gathered in bfloat16, which takes twice the bytes."""
    name, (rows, channels) = type(recipe).__name__, x.shape
    if name == "MXFP8BlockScaling" or (is_gathered and name == "Float8BlockScaling"):
        states = importlib.import_module("transformer_engine.pytorch.quantization").RecipeState
        quantizer, *_ = states.create(recipe, mode="forward", num_quantizers=3).make_quantizers()
        how = "gathered in FP8" if is_gathered else "quantized"
        assert quantizer.is_quantizable(x), f"TE: {rows} rows of {channels} channels cannot be {how} ({name})"
    assert rows % 16 == 0, f"cuBLAS: {rows} rows in FP8 ({name}), a multiple of 16 is needed"
    products.append((name, rows))
