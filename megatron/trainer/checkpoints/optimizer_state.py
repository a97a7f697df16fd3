"""The optimizer's part of a checkpoint, the same on disk with and without the distributed optimizer.

megatron-core stores each state tensor in the shape of its parameter, under

    optimizer.state.exp_avg.<parameter>   optimizer.state.exp_avg_sq.<parameter>
    optimizer.state.param.<parameter>        float32 weights, distributed optimizer
    optimizer.state.fp32_param.<parameter>   float32 weights, plain optimizer with --bf16
    (none)                                   plain optimizer in fp32: the weights are the model's

Only the tensors are loaded, whoever wrote them; step and learning rate are functions of the position in the run. The
step goes where the optimizer of this run has it: torch's Adam keeps one per parameter, fused ones one per group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

# megatron-core's default layout cannot be loaded on another TP or PP size, and its flattened tensors not by torch's.
# The optimizers of experts and of all else name their tensors by parameters, not by their own number.
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_WEIGHT_KEYS = {"distributed": "param", "plain_16bit": "fp32_param", "plain_fp32": None}


def kind(optimizer: MegatronOptimizer) -> str:
    """Return how `optimizer` stores its float32 weights: a key of the table above."""
    inner = _all_of(optimizer)[0]
    if isinstance(inner, DistributedOptimizer):
        return "distributed"
    return "plain_16bit" if hasattr(inner, "fp32_from_float16_groups") else "plain_fp32"


def sharded_for_save(optimizer: MegatronOptimizer, sharded_model: dict[str, Any]) -> Any:
    """Return megatron-core's sharded state of `optimizer`."""
    return optimizer.sharded_state_dict(sharded_model, is_loading=False, metadata=SHARDING)


class LoadRequest:
    """The tensors that an optimizer needs from a checkpoint of either kind, and how it takes them.

    A model with experts has two: theirs and that of all else.

    Args:
        saved_kind: `kind` of the optimizer that was saved.
    """

    def __init__(self, optimizer: MegatronOptimizer, sharded_model: dict[str, Any], saved_kind: str) -> None:
        self._requests = [_OneRequest(one, sharded_model, saved_kind) for one in _all_of(optimizer)]
        self.tensors = {index: request.tensors for index, request in enumerate(self._requests)}

    def apply(self, loaded: dict[int, Any], step: int) -> None:
        """Hand the loaded tensors and the number of past steps to the optimizer. The model's weights are loaded."""
        for index, request in enumerate(self._requests):
            if request.tensors:  # a stage of dense layers has an optimizer of experts, which has nothing
                request.apply(loaded[index], step)


class _OneRequest:
    """As `LoadRequest`, of one optimizer."""

    def __init__(self, optimizer: Any, sharded_model: dict[str, Any], saved_kind: str) -> None:
        self._optimizer = optimizer
        self._kind = kind(optimizer)
        self._saved_weights = _WEIGHT_KEYS[saved_kind]
        state = self._optimizer.sharded_state_dict(sharded_model, is_loading=True, metadata=SHARDING)
        if self._kind == "distributed":
            self.tensors: dict[str, Any] = {"states": dict(state["param_state"])}
        else:
            inner = state["optimizer"] if self._kind == "plain_16bit" else state
            self.tensors = {"states": {k: v for k, v in inner["state"].items() if k != "common_step"}}
            if self._kind == "plain_16bit":
                self.tensors["weights"] = state["fp32_from_fp16_params"]
        self.tensors = _without_none(_map_sharded(self.tensors, self._as_saved))

    def _as_saved(self, sharded: Any) -> Any:
        """Return `sharded` under the key that the checkpoint has, None when it has no such tensor."""
        own = f"optimizer.state.{_WEIGHT_KEYS[self._kind]}."
        if not sharded.key.startswith(own):
            return sharded
        if self._saved_weights is None:
            return None
        return replace(sharded, key=f"optimizer.state.{self._saved_weights}.{sharded.key.removeprefix(own)}")

    @torch.no_grad()  # float32 shards of the distributed optimizer are views of leaves
    def apply(self, loaded: dict[str, Any], step: int) -> None:
        if self._kind == "distributed":
            self._apply_distributed(loaded, step)
            return
        state_dict = self._optimizer.state_dict()
        inner = state_dict["optimizer"] if self._kind == "plain_16bit" else state_dict
        inner["state"] = dict(loaded["states"])
        if isinstance(self._optimizer.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            inner["state"]["common_step"] = torch.tensor(float(step))  # megatron-core hands it to each parameter
        else:
            # Fused Adams count by group; TransformerEngine's refuses other names than its own in a parameter's state.
            for group in inner["param_groups"]:
                group["step"] = step
        if self._kind == "plain_16bit" and "weights" in loaded:
            state_dict["fp32_from_fp16_params"] = loaded["weights"]
        self._optimizer.load_state_dict(state_dict)
        if self._kind == "plain_16bit" and "weights" not in loaded:
            self._optimizer.reload_model_params()

    def _apply_distributed(self, loaded: dict[str, Any], step: int) -> None:
        # Parameters are numbered in the order of the gradient buffers.
        params = [param for buffer in self._optimizer.buffers for param in buffer.param_index_map]
        for index, tensors in loaded["states"].items():
            tensors.setdefault("param", params[index].detach().float())
        state_dict = self._optimizer.state_dict()
        for group in state_dict["optimizer"]["param_groups"]:
            group["step"] = step
        state_dict |= {"param_state": loaded["states"], "param_state_sharding_type": "fully_reshardable"}
        self._optimizer.load_state_dict(state_dict)


def _all_of(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers that `optimizer` is made of: one of a dense model, two with experts."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _map_sharded(value: Any, change: Any) -> Any:
    """Return `value` (nested dicts and lists) with `change` applied to its leaves."""
    if isinstance(value, Mapping):
        return {key: _map_sharded(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_sharded(item, change) for item in value]
    return change(value)


def _without_none(value: Any) -> Any:
    """Return `value` without its None leaves and without what became empty."""
    if isinstance(value, Mapping):
        kept = {key: _without_none(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in (None, {}, [])}
    if isinstance(value, list):
        return [item for item in map(_without_none, value) if item not in (None, {}, [])]
    return value
