"""Faults of the released megatron-core, mended in its classes by one function each; a second call changes nothing."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from megatron.core.tensor_parallel import random, scatter_to_tensor_model_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.repairs import releases


def repair_expert_routing() -> None:
    """Route tokens to experts where TransformerEngine is not installed, and padding to no expert.

    megatron-core 0.16.1 asks whether TransformerEngine's matrix product is None, but without it the name does not
    exist: NameError in the first forward pass. Since 0.17 its dispatcher assumes that each token has as many experts as
    the router chooses. Our routers send padding to none, so less is sent than the sizes that lanes tell each other:
    RuntimeError.
    """
    if not (releases.PRODUCT_IS_NONE.here or moe_utils.HAVE_TE):
        moe_utils.te_general_gemm = None
    preprocess = MoEAlltoAllTokenDispatcher.preprocess
    if releases.TOKENS_ROUTED_ALIKE.here and not hasattr(preprocess, "__wrapped__"):
        MoEAlltoAllTokenDispatcher.preprocess = _counting(preprocess)


def _counting(preprocess: Any) -> Any:
    @functools.wraps(preprocess)
    def counting(self: Any, routing_map: Tensor) -> Any:
        found = preprocess(self, routing_map)
        self.num_out_tokens = routing_map.sum()
        # On a GPU the host waits anyway for the sizes that lanes tell each other; it then waits earlier, for both.
        self._maybe_update_cuda_sync_point("before_permutation_1")
        return found

    return counting


def repair_latent_attention() -> None:
    """Build multi-latent attention where TransformerEngine is not installed. megatron-core 0.16.1 takes its module of
    wrappers, which can be imported without TransformerEngine and then holds None, for the layers: `isinstance(...,
    None)` is a TypeError in the first layer."""
    if not transformer_engine.HAVE_TE:
        multi_latent_attention.HAVE_TE = False


def repair_norm_recomputation() -> None:
    """Recompute norms (--recompute-modules layernorm) where TransformerEngine is not installed. megatron-core 0.16.1 to
    0.19.2 takes its own default of `fp8=False` for "FP8 is on" (it asks `is not None`), and uses TransformerEngine
    without asking whether it is there: NameError in the first forward pass."""
    built = random.CheckpointWithoutOutput.__init__
    if random.HAVE_TE or hasattr(built, "__wrapped__"):
        return

    @functools.wraps(built)
    def without_fp8(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        self.fp8 = False

    random.CheckpointWithoutOutput.__init__ = without_fp8


def repair_gathered_logits() -> None:
    """Take the loss of logits that TP ranks have gathered (`parallel_output=False`, `runtime_gather_output`).
    megatron-core 0.16.1 to 0.19.2 takes any logits for a share of the vocabulary: with TP ranks the loss of gathered
    ones is too large by log(TP), and their gradients lack the label."""
    compute = LanguageModule.compute_language_model_loss
    if hasattr(compute, "__wrapped__"):
        return

    @functools.wraps(compute)
    def of_own_share(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        tp_size = self.tp_group.size()
        own_words = getattr(getattr(self, "output_layer", None), "output_size_per_partition", None)
        if tp_size > 1 and own_words is not None and logits.shape[-1] == own_words * tp_size:
            # A copy: losses overwrite the logits, and the share of a single token is a view.
            logits = scatter_to_tensor_model_parallel_region(logits, group=self.tp_group).clone()
        return compute(self, labels, logits)

    LanguageModule.compute_language_model_loss = of_own_share


def repair_optimizer_checkpoint() -> None:
    """Load checkpoints into the distributed optimizer: with torch's AdamW, and where halves of weights are kept.

    With torch's AdamW (no TransformerEngine, no apex) megatron-core 0.16.1 can save but not load, and neither where a
    rank has no parameter of an optimizer, as of experts on a stage of dense layers:

        sharded_state_dict(is_loading=True)     asserts on an optimizer that has not stepped: it gets zero state first
        _set_main_param_and_optimizer_states    writes to leaves under autograd, wants "step": no_grad, leave "step"
        load_state_dict                         one step tensor for all parameters counts many times: one tensor each
        state_dict                              looks for the step in the state of parameters: without any, no step

    TransformerEngine's precision-aware optimizer keeps of a float32 weight only the lower half, an int16, beside the
    bf16 weight. megatron-core 0.16.1 saves that half as if it were the weight: loading asserts an int16, and another
    optimizer would train from noise. Here whole weights are saved, and halved when they are loaded.
    """
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
    """Raise UnsupportedFeatureError, on all ranks alike, if halves are in the place of weights: integers above 1."""
    if saved.numel() and float(saved.abs().max()) > 1 and bool((saved == saved.round()).all()):
        raise UnsupportedFeatureError(
            "the checkpoint has lower halves of the optimizer's weights, as megatron-core's precision-aware optimizer "
            "saves them, and not the weights: load it with --no-load-optim, or save it anew with this project"
        )


def _shard_of(optimizer: Any, model_param: Any) -> torch.Tensor:
    group_index, group_order = optimizer.model_param_group_index_map[model_param]
    shard: torch.Tensor = optimizer.optimizer.param_groups[group_index]["params"][group_order]
    return shard
