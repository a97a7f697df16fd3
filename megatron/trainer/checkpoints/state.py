"""What a checkpoint holds: weights, optimizer state, random states, and the position in the run.

The optimizer's part is the same with and without the distributed optimizer. megatron-core stores each state tensor in
the shape of its parameter, under

    optimizer.state.exp_avg.<parameter>   optimizer.state.exp_avg_sq.<parameter>
    optimizer.state.param.<parameter>        float32 weights, distributed optimizer
    optimizer.state.fp32_param.<parameter>   float32 weights, plain optimizer with --bf16
    (none)                                   plain optimizer in fp32: the weights are the model's

Only these tensors are loaded; step and learning rate follow from the position.

TransformerEngine's layers differ in two ways. A norm fused with a projection has another name, which megatron-core maps
in dense layers only; here both names are found. Their `_extra_state` for quantization, empty in fp32 and bf16, is saved
as megatron-core does but never loaded, so that local layers load such checkpoints, and the reverse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from dynamic_cp.errors import CheckpointError
from megatron.dynamic_cp.model.adapters import INNER, OUTER

# megatron-core's default layout cannot be loaded with another TP or PP size, nor its flattened tensors by torch's
# optimizers. The optimizers of experts and of the other weights name tensors by parameter, not by optimizer number.
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_WEIGHT_KEYS = {"distributed": "param", "plain_16bit": "fp32_param", "plain_fp32": None}
_ALONE_AND_FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)
"""Names of norms before projections: local, and fused by TransformerEngine."""
_EXTRA = re.compile(r"_extra_state\d*$")
"""It ends with a number if it belongs to one of the experts of a module."""


@dataclass(kw_only=True)
class Position:
    """Where in the run we are; `coefficients` is the cost model's `Coefficients.to_dict`, None if it is not refined."""

    iteration: int = 0
    consumed_samples: int = 0
    coefficients: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """The parts of a run that a checkpoint saves and loads.

    Attributes:
        chunks: unwrapped model chunks of this pipeline stage.
        wrapped: the same, wrapped for data parallelism.
        identity: JSON values that must be equal for a run to go on: model, data, seed.
        arguments: flags of the run under Megatron-LM's names, for Megatron-LM to load the checkpoint.
        layout: JSON values that decide whether random states fit: TP, PP, lanes.
        has_dropout: whether random states matter.
        gathers_params: the next forward pass gathers the weights, which are stale until then.
    """

    chunks: Sequence[nn.Module]
    wrapped: Sequence[Any]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    identity: Mapping[str, Any]
    arguments: Mapping[str, Any]
    layout: Mapping[str, int]
    has_dropout: bool
    gathers_params: bool


def sharded_model(trainable: Trainable) -> dict[str, Any]:
    chunks = trainable.chunks
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    return {name: chunk.sharded_state_dict(metadata=SHARDING) for name, chunk in zip(names, chunks, strict=True)}


def found_as(name: str, there: Container[str]) -> str:
    """Return the name that the tensor `name` has in `there`; `name` itself if it has none."""
    if name in there:
        return name
    for pair in _ALONE_AND_FUSED:
        for one, other in (pair, pair[::-1]):
            if one in name and (renamed := name.replace(one, other)) in there:
                return renamed
    return name


def ask_as_found(sharded: Any, there: Container[str]) -> None:
    """Rename the tensors of a (nested) sharded state dict to the names that they have in `there`, in place."""
    if isinstance(sharded, dict | list | tuple):
        for part in sharded.values() if isinstance(sharded, dict) else sharded:
            ask_as_found(part, there)
    elif isinstance(getattr(sharded, "key", None), str):
        sharded.key = found_as(sharded.key, there)


def without_extra_states(sharded: Any) -> Any:
    """Return a (nested) sharded state dict without TransformerEngine's extra states."""
    return _without(sharded, lambda key: _EXTRA.search(key.split("/")[0]) is not None)


def without_adapters(sharded: Any) -> Any:
    """Return a (nested) sharded state dict without the weights of adapters."""
    return _without(sharded, _is_of_adapter)


def _without(sharded: Any, is_left_out: Callable[[str], bool]) -> Any:
    if not isinstance(sharded, dict):
        return sharded
    return {key: _without(value, is_left_out) for key, value in sharded.items() if not is_left_out(str(key))}


def _is_of_adapter(key: str) -> bool:
    return key.endswith((INNER, OUTER))


def load_weights(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load all weights of `module`; CheckpointError if one is missing or there is one too many. Extra states stay as
    they are, as do adapters if `state_dict` has none."""
    keys = module.load_state_dict(state_dict, strict=False)
    asked = any(map(_is_of_adapter, state_dict))
    missing = [key for key in keys.missing_keys if not _EXTRA.search(key) and (asked or not _is_of_adapter(key))]
    unexpected = [key for key in keys.unexpected_keys if not _EXTRA.search(key)]
    if missing or unexpected:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} weights of the model ({', '.join(missing[:3]) or 'none'}) and has "
            f"{len(unexpected)} that it has not ({', '.join(unexpected[:3]) or 'none'}): use the same model"
        )


def rng_state() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def sharded_rng(state: dict[str, Any] | None) -> ShardedObject:
    """Return `rng_state` as megatron-core saves it; None asks for the saved one."""
    return ShardedObject("rng_state", state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def optimizer_kind(optimizer: MegatronOptimizer) -> str:
    """Return how `optimizer` stores float32 weights: "distributed", "plain_16bit" or "plain_fp32"."""
    inner = _all_of(optimizer)[0]
    if isinstance(inner, DistributedOptimizer):
        return "distributed"
    return "plain_16bit" if hasattr(inner, "fp32_from_float16_groups") else "plain_fp32"


def sharded_optimizer(optimizer: MegatronOptimizer, sharded_model: dict[str, Any]) -> Any:
    return optimizer.sharded_state_dict(sharded_model, is_loading=False, metadata=SHARDING)


class LoadRequest:
    """The tensors that an optimizer (with experts, two) needs from a checkpoint of `optimizer_kind` `saved_kind`."""

    def __init__(self, optimizer: MegatronOptimizer, sharded_model: dict[str, Any], saved_kind: str) -> None:
        self._requests = [_OneRequest(one, sharded_model, saved_kind) for one in _all_of(optimizer)]
        self.tensors = {index: request.tensors for index, request in enumerate(self._requests)}

    def apply(self, loaded: dict[int, Any], step: int) -> None:
        """Give the optimizer the loaded tensors and the number of past steps, after the model's weights were loaded."""
        for index, request in enumerate(self._requests):
            if request.tensors:  # on a stage without experts, the experts' optimizer is empty
                request.apply(loaded[index], step)


class _OneRequest:
    """As `LoadRequest`, for one optimizer."""

    def __init__(self, optimizer: Any, sharded_model: dict[str, Any], saved_kind: str) -> None:
        self._optimizer = optimizer
        self._kind = optimizer_kind(optimizer)
        self._saved_weights = _WEIGHT_KEYS[saved_kind]
        state = self._optimizer.sharded_state_dict(sharded_model, is_loading=True, metadata=SHARDING)
        tensors: dict[str, Any]
        if self._kind == "distributed":
            tensors = {"states": dict(state["param_state"])}
        else:
            inner = state["optimizer"] if self._kind == "plain_16bit" else state
            tensors = {"states": {k: v for k, v in inner["state"].items() if k != "common_step"}}
            if self._kind == "plain_16bit":
                tensors["weights"] = state["fp32_from_fp16_params"]
        self.tensors: dict[str, Any] = _changed(tensors, self._as_saved)

    def _as_saved(self, sharded: Any) -> Any:
        """Return `sharded` with its key in the checkpoint; None if the checkpoint has no such tensor."""
        own = f"optimizer.state.{_WEIGHT_KEYS[self._kind]}."
        if not sharded.key.startswith(own):
            return sharded
        if self._saved_weights is None:
            return None
        return replace(sharded, key=f"optimizer.state.{self._saved_weights}.{sharded.key.removeprefix(own)}")

    @torch.no_grad()  # the distributed optimizer's float32 shards are views of leaves
    def apply(self, loaded: dict[str, Any], step: int) -> None:
        if self._kind == "distributed":
            self._apply_distributed(loaded, step)
            return
        state_dict = self._optimizer.state_dict()
        inner = state_dict["optimizer"] if self._kind == "plain_16bit" else state_dict
        inner["state"] = dict(loaded["states"])
        if isinstance(self._optimizer.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            inner["state"]["common_step"] = torch.tensor(float(step))  # megatron-core copies it to each parameter
        else:
            # Fused Adams count steps by group; TransformerEngine's refuses unknown names in a parameter's state.
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
    """Return the parts of `optimizer`: one for a dense model, two with experts."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested dicts and lists with changed leaves, without those that become None or empty."""
    if isinstance(value, Mapping):
        changed = {key: _changed(item, change) for key, item in value.items()}
        return {key: item for key, item in changed.items() if item not in (None, {}, [])}
    if isinstance(value, Sequence):
        return [item for item in (_changed(one, change) for one in value) if item not in (None, {}, [])]
    return change(value)
