"""Load checkpoints into the distributed optimizer: of torch's AdamW, and of halves of weights.

With torch's AdamW (no TransformerEngine, no apex) megatron-core 0.16.1 can save that combination but not load it, and
neither where a rank has no parameter of an optimizer, as of experts on a stage of dense layers. Four repairs:

| where | what goes wrong | repair |
|---|---|---|
| `sharded_state_dict(is_loading=True)` | asserts on an optimizer that has not stepped | give it zero state first |
| `_set_main_param_and_optimizer_states` | writes to leaves under autograd, wants "step" | no_grad, leave "step" |
| `load_state_dict` | every parameter gets the *same* step tensor, so one step counts many times | one tensor each |
| `state_dict` | looks for the step in the state of parameters, of which there must be some | none: no step |

TransformerEngine's precision-aware optimizer keeps of a weight in float32 the lower half, an int16, beside the bf16
weight. megatron-core 0.16.1 saves that half as if it were the weight, in float32: loading asserts an int16, and
another optimizer would train from noise. Here whole weights are saved, and halved when they are loaded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer

from dynamic_cp.errors import UnsupportedFeatureError


def install() -> None:
    """Repair `DistributedOptimizer` in this process; does nothing when called again."""
    get = DistributedOptimizer._get_main_param_and_optimizer_states
    if hasattr(get, "__wrapped__"):
        return
    DistributedOptimizer._get_main_param_and_optimizer_states = _with_whole_weights(get)
    if HAVE_APEX_OR_TE:
        halve = _with_halves_of_weights(DistributedOptimizer._set_main_param_and_optimizer_states)
        DistributedOptimizer._set_main_param_and_optimizer_states = halve
        return
    DistributedOptimizer.state_dict = _also_of_nothing(DistributedOptimizer.state_dict)
    DistributedOptimizer.sharded_state_dict = _with_state(DistributedOptimizer.sharded_state_dict)
    DistributedOptimizer.load_state_dict = _with_own_steps(DistributedOptimizer.load_state_dict)
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_main_param_and_optimizer_states


def _also_of_nothing(state_dict: Any) -> Any:
    @functools.wraps(state_dict)
    def also_of_nothing(self: Any) -> Any:
        groups = self.optimizer.param_groups
        if any(group["params"] for group in groups):
            return state_dict(self)
        without = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        return {"optimizer": {"param_groups": [{**group, "step": 0.0} for group in without]}}

    return also_of_nothing


def _with_state(sharded_state_dict: Any) -> Any:
    @functools.wraps(sharded_state_dict)
    def with_state(self: Any, model_state: Any, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
        adam = self.optimizer
        if is_loading and not adam.state:
            for group in adam.param_groups:
                for param in group["params"]:
                    zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                    adam.state[param] = {"step": torch.tensor(0.0), **zeros}
        return sharded_state_dict(self, model_state, is_loading, *args, **kwargs)

    return with_state


def _with_own_steps(load_state_dict: Any) -> Any:
    @functools.wraps(load_state_dict)
    def with_own_steps(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return with_own_steps


@torch.no_grad()
def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
    group_index, group_order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group_index]["params"][group_order]
    main_param.copy_(tensors["param"])
    for name, value in self.optimizer.state[main_param].items():
        if name != "step":
            value.copy_(tensors[name])


def _with_whole_weights(get: Any) -> Any:
    @functools.wraps(get)
    def with_whole_weights(self: Any, model_param: Any) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = get(self, model_param)
        lower = tensors["param"]
        if lower.dtype == torch.int16:
            # The weight was rounded to nearest: where the lower half is negative, away from the number.
            upper = _shard_of(self, model_param).view(torch.int16).int() - (lower < 0).int()
            tensors["param"] = ((upper << 16) | (lower.int() & 0xFFFF)).view(torch.float32)
        return tensors

    return with_whole_weights


def _with_halves_of_weights(put: Any) -> Any:
    @functools.wraps(put)
    def with_halves_of_weights(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        shard = _shard_of(self, model_param)
        if getattr(self.optimizer, "store_param_remainders", False) and shard.dtype == torch.bfloat16:
            _check_are_weights(tensors["param"])
            bits = tensors["param"].contiguous().view(torch.int32)
            lower = bits.to(torch.int16)
            shard.view(torch.int16).copy_((bits >> 16) + (lower < 0).int())
            tensors = {**tensors, "param": lower}
        put(self, model_param, tensors)

    return with_halves_of_weights


def _check_are_weights(saved: torch.Tensor) -> None:
    """Refuse halves in the place of weights: integers, of which weights have none above 1.

    Raises:
        UnsupportedFeatureError: they are; on all ranks, as one job saved them.
    """
    if saved.numel() and float(saved.abs().max()) > 1 and bool((saved == saved.round()).all()):
        raise UnsupportedFeatureError(
            "the checkpoint has lower halves of the optimizer's weights, as megatron-core's precision-aware optimizer "
            "saves them, and not the weights: load it with --no-load-optim, or save it anew with this project"
        )


def _shard_of(optimizer: Any, model_param: Any) -> torch.Tensor:
    """Return this rank's part of a weight, which the optimizer steps."""
    group_index, group_order = optimizer.model_param_group_index_map[model_param]
    shard: torch.Tensor = optimizer.optimizer.param_groups[group_index]["params"][group_order]
    return shard
