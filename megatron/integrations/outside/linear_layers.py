"""Linear attention of transformers models in packed micro-batches: gated delta nets and Mamba-2, with their parameters.

A layer keeps its projections, its norm and its gate; between them stands ours (`attention.linear.thd`), which passes
states between the lanes of a micro-batch, or exchanges heads, as the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import LinearAttention
from megatron.dynamic_cp.attention.linear.thd import gated_delta_net_thd, mamba2_thd
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.integrations.outside.trial import Trial


def linear_layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of a model with linear attention, none of most.

    Raises:
        UnsupportedFeatureError: one is of another kind than ours, or has another activation.
    """
    number = list(getattr(model.config, "layer_types", None) or ()).count("linear_attention")
    layers = [module for module in model.modules() if type(module).__name__ in _LAYERS]
    if len(layers) != number:
        raise UnsupportedFeatureError(
            f"the model {type(model).__name__} has {number} layers with linear attention, ours takes the place of "
            f"{len(layers)} of them, those of the classes {', '.join(_LAYERS)}: train it with Megatron's layers "
            "(dynamic-cp weights, pretrain_gpt.py), or use another model"
        )
    for module in layers:
        if module.activation not in ("silu", "swish"):
            raise UnsupportedFeatureError(
                f"linear attention with the activation {module.activation!r} is not supported, silu is: use another "
                "model"
            )
    return layers


def use_linear_layers(layers: Iterable[torch.nn.Module]) -> None:
    """Make the linear attention of `linear_layers_of` ours."""
    for module in layers:
        sizes_of, forward = _LAYERS[type(module).__name__]
        module.forward = partial(_forward, forward, module, sizes_of(module))


_Forward = Callable[[Any, LinearAttention, Tensor, DynamicPackedSeqParams], Tensor]
"""(layer, its sizes, [T, hidden size], parameters of the micro-batch) -> [T, hidden size]."""


def _forward(
    forward: _Forward,
    module: Any,
    sizes: LinearAttention,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    *,
    packed_seq_params: DynamicPackedSeqParams | Trial | None = None,
    **_others: Any,
) -> Tensor:
    """Linear attention as transformers calls it, of [1, T, hidden size]."""
    if packed_seq_params is None or cache_params is not None or attention_mask is not None:
        raise InvalidInputError(
            f"linear attention got {0 if packed_seq_params is None else 1} packed_seq_params, "
            f"{int(cache_params is not None)} caches and {int(attention_mask is not None)} masks, 1, 0 and 0 are "
            "possible: call the model with model_inputs(batch) of a planned micro-batch; generate() needs the model "
            "as it was loaded"
        )
    if isinstance(packed_seq_params, Trial):
        return packed_seq_params.attend_linearly(hidden_states)
    return forward(module, sizes, hidden_states[0], packed_seq_params)[None]


def _delta_sizes(module: Any) -> LinearAttention:
    return LinearAttention(
        kind="gated_delta_net",
        num_heads=module.num_v_heads,
        num_groups=module.num_k_heads,
        key_size=module.head_k_dim,
        value_size=module.head_v_dim,
        kernel_size=module.conv_kernel_size,
    )


def _gated_delta_net(module: Any, sizes: LinearAttention, x_TC: Tensor, params: DynamicPackedSeqParams) -> Tensor:
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next: sections of each key head together
        parts = module.fix_query_key_value_ordering(module.in_proj_qkvz(x_TC[None]), module.in_proj_ba(x_TC[None]))
        *qkv, z, beta, alpha = (part[0].flatten(1) for part in parts)
        convolved = torch.cat(qkv, dim=-1)
    else:
        convolved, z = module.in_proj_qkv(x_TC), module.in_proj_z(x_TC)
        beta, alpha = module.in_proj_b(x_TC), module.in_proj_a(x_TC)
    decay = -module.A_log.float().exp() * softplus(alpha.float() + module.dt_bias)
    weight = module.conv1d.weight.to(convolved.dtype)  # as autocast has it
    found = gated_delta_net_thd(convolved, beta.sigmoid(), decay, weight, params, sizes)
    normed = module.norm(found.flatten(0, 1), z.reshape(-1, sizes.value_size))
    out: Tensor = module.out_proj(normed.view(len(x_TC), -1))
    return out


def _mamba2_sizes(module: Any) -> LinearAttention:
    return LinearAttention(
        kind="mamba2",
        num_heads=module.num_heads,
        num_groups=module.n_groups,
        key_size=module.ssm_state_size,
        value_size=module.head_dim,
        kernel_size=module.conv_kernel_size,
    )


def _mamba2(module: Any, sizes: LinearAttention, x_TC: Tensor, params: DynamicPackedSeqParams) -> Tensor:
    widths = [module.intermediate_size, module.conv_dim, module.num_heads]
    gate, convolved, dt = module.in_proj(x_TC).split(widths, dim=-1)
    dt = softplus(dt.float() + module.dt_bias).clamp(*module.time_step_limit)
    weight, bias = (
        None if one is None else one.to(convolved.dtype) for one in (module.conv1d.weight, module.conv1d.bias)
    )
    found = mamba2_thd(convolved, dt, module.A_log, module.D, weight, bias, params, sizes)
    out: Tensor = module.out_proj(module.norm(found.flatten(1), gate).to(x_TC.dtype))
    return out


_DELTA, _MAMBA = (_delta_sizes, _gated_delta_net), (_mamba2_sizes, _mamba2)
_LAYERS: dict[str, tuple[Callable[[Any], LinearAttention], _Forward]] = {
    **dict.fromkeys(("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), _DELTA),
    **dict.fromkeys(("NemotronHMamba2Mixer", "GraniteMoeHybridMambaLayer", "BambaMixer"), _MAMBA),
}
"""Classes of transformers."""
