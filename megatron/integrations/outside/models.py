"""What is done to a transformers model: its linear attention becomes ours, and it is tried on a few tokens.

A layer of linear attention keeps its projections, norm and gate; ours (`attention.linear.thd`) between them passes on
states or exchanges heads, as the plan says.

The trial asks whether the model takes positions from us, and each token by itself. Some classes derive more: RoBERTa
counts from the padding token's id + 1, BART by the length of the row, ESM scales a row by its masked tokens, MobileBERT
mixes neighbours. So the model is run up to its first attention with two short documents alone, and with both in one
pack: queries, keys and values must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dynamic_cp.decide.config_json.hugging_face import MODEL_TYPES
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import LinearAttention
from megatron.dynamic_cp.attention.linear.thd import gated_delta_net_thd, mamba2_thd
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams

_DOCUMENTS = ((5, 7, 6), (9, 5, 8, 6))
"""Token ids. In a pack the first document's last token has a new neighbour, and the second begins later in the row."""
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Largest difference of queries, keys and values, as a share of the largest; 0.03 in narrower types."""


class FirstAttention(Exception):
    """Ends a trial with what its first attention got: q, k and v of [1, heads, T, dim]."""

    def __init__(self, *qkv: Tensor) -> None:
        super().__init__()
        self.qkv = qkv


class Trial:
    """Stands in for packed_seq_params, so that attention and linear attention know that they are tried."""

    num_linear_layers = 0

    def attend_linearly(self, hidden_states: Tensor) -> Tensor:
        """Return zeros: linear attention does not use positions, and the next attention shows what it was given."""
        self.num_linear_layers += 1
        return torch.zeros_like(hidden_states)

    def attend(self, *qkv: Tensor) -> NoReturn:
        """End the trial."""
        raise FirstAttention(*qkv)


def first_position(model: torch.nn.Module) -> int:
    """Return the position_ids that the model gives the first token of a document by itself. `model`: with our
    attention, without a wrapper. On the meta device it cannot be tried: then only families whose shape is known are
    taken. Raises UnsupportedFeatureError: tokens of a pack differ from those of documents alone, whatever the positions
    are."""
    name, config = type(model).__name__, model.config
    weights = next(model.parameters())
    if weights.is_meta:
        if config.model_type in MODEL_TYPES:
            return 0
        raise UnsupportedFeatureError(
            f"the model {name} is on the meta device, where its positions cannot be looked at: load its weights first, "
            "or use a model of another family"
        )
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        size, mask = config.get_text_config().vocab_size, getattr(config, "mask_token_id", None)
        documents = [torch.tensor([one], device=weights.device) % size for one in _DOCUMENTS]
        if mask is not None and mask < size:
            documents[0][0, 1] = mask
        alone = [_qkv(model, input_ids=one) for one in documents]
        wanted = [torch.cat(pair, dim=-2) for pair in zip(*alone, strict=True)]
        for first in dict.fromkeys((0, (getattr(config, "pad_token_id", None) or 0) + 1)):
            positions = [torch.arange(one.shape[1], device=one.device)[None] + first for one in documents]
            found = _qkv(model, input_ids=torch.cat(documents, 1), position_ids=torch.cat(positions, 1))
            if all(_are_equal(*pair) for pair in zip(found, wanted, strict=True)):
                return first
    finally:
        for module in was_training:
            module.training = True
    raise UnsupportedFeatureError(
        f"the model {name} makes of a token in a pack something else than of the same token in a document alone: it "
        f"derives from its input what packs of {len(_DOCUMENTS)} documents cannot show (positions that it counts by "
        "itself, neighbours, shares of masked tokens); use another model"
    )


def _qkv(model: torch.nn.Module, **inputs: Tensor) -> tuple[Tensor, ...]:
    name, trial = type(model).__name__, Trial()
    try:
        with torch.no_grad():
            model(**inputs, packed_seq_params=trial, use_cache=False)
    except FirstAttention as attention:
        return attention.qkv
    except Exception as error:  # of any code of transformers
        raise UnsupportedFeatureError(
            f"the model {name}, called with {' and '.join(inputs)} of {inputs['input_ids'].shape[1]} tokens, ends with "
            f"{type(error).__name__} ({error}): use another model"
        ) from error
    if trial.num_linear_layers:
        return ()
    raise UnsupportedFeatureError(
        f"the model {name} called 0 attentions, at least 1 is needed: its tokens meet in another way; use another model"
    )


def _are_equal(found: Tensor, wanted: Tensor) -> bool:
    most = _ROUNDING.get(found.dtype, 0.03)
    return found.shape == wanted.shape and bool((found - wanted).abs().max() <= most * wanted.abs().max())


def shift_positions(first: int) -> Any:
    """Return a hook before the forward pass that adds `first` to position_ids, which count from 0."""

    def hook(_module: torch.nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = given.get("position_ids")
        return args, given if positions is None else {**given, "position_ids": positions + first}

    return hook


def linear_layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model's layers with linear attention; UnsupportedFeatureError if ours cannot replace one of them."""
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
    """Replace the linear attention of `linear_layers_of` by ours."""
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
    out_THD = gated_delta_net_thd(convolved, beta.sigmoid(), decay, weight, params, sizes)
    normed = module.norm(out_THD.flatten(0, 1), z.reshape(-1, sizes.value_size))
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
    out_THD = mamba2_thd(convolved, dt, module.A_log, module.D, weight, bias, params, sizes)
    out: Tensor = module.out_proj(module.norm(out_THD.flatten(1), gate).to(x_TC.dtype))
    return out


_DELTA, _MAMBA = (_delta_sizes, _gated_delta_net), (_mamba2_sizes, _mamba2)
_LAYERS: dict[str, tuple[Callable[[Any], LinearAttention], _Forward]] = {
    **dict.fromkeys(("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), _DELTA),
    **dict.fromkeys(("NemotronHMamba2Mixer", "GraniteMoeHybridMambaLayer", "BambaMixer"), _MAMBA),
}
"""Classes of transformers."""
