"""Flags of gated activations, multi-latent attention, multi-token prediction, norms of outputs and low-rank adapters.

Each is completed, and checked alone and beside others. Pure functions of flags and configurations, without torch and
megatron-core. `--quick-geglu` with a clamp and an offset is the gated MLP of gpt-oss: min(a, c) * sigmoid(1.702 min(a,
c)) * (clamp(b, -c, c) + offset). YaRN of latent attention is megatron-core's own: `--rope-type yarn` with the flags
that `--position-embedding-type yarn` has in other models.
"""

from __future__ import annotations

from typing import Any

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.flags import MEANINGS
from dynamic_cp.models.table import destination_of, flag_of
from dynamic_cp.types import Adapters
from dynamic_cp.types.data_parallel import ADAPTED, OF_LINEAR, OF_MLP
from megatron.dynamic_cp.flags import linear_attention
from megatron.dynamic_cp.flags.attention import YARN
from megatron.dynamic_cp.flags.exclusions import ADAPTERS, BIASED_EXPERTS, LATENTS, MODULES, OUTPUTS, refuse_pairs
from megatron.dynamic_cp.flags.experts import num_experts

QUICK_GEGLU, _SQUARED, _GEGLU = "--quick-geglu", "--squared-relu", "--geglu"
_ACTIVATIONS = (QUICK_GEGLU, _SQUARED, _GEGLU)
"""Activations in place of GELU, or of the gates of --swiglu."""
_CLAMP, _OFFSET = "--activation-func-clamp-value", "--glu-linear-offset"
OF_QUICK_GEGLU = frozenset({"activation_func_clamp_value", "glu_linear_offset"})
"""Flags and fields of a configuration that only --quick-geglu reads."""


def is_quick_geglu(config: Any) -> bool:
    """Return whether flags or a configuration ask for --quick-geglu."""
    function = getattr(config, "activation_func", None)
    return bool(getattr(config, "quick_geglu", False)) or getattr(function, "__name__", None) == "quick_gelu"


def is_gated(flags: Any) -> bool:
    """Return whether the MLPs of a model are gated, by its flags."""
    return bool(getattr(flags, "swiglu", False) or getattr(flags, "geglu", False)) or is_quick_geglu(flags)


def named_activation(flags: Any) -> str | None:
    """Return the flag of an activation that is neither GELU nor that of --swiglu; None: there is none."""
    return next((flag for flag in _ACTIVATIONS if getattr(flags, destination_of(flag), False)), None)


def has_biases(config: Any) -> bool:
    """Return whether flags or a configuration ask for biases in all linear layers."""
    said = getattr(config, "add_bias_linear", None)
    return bool(not config.disable_bias_linear if said is None else said)


def check_activation(config: Any) -> None:
    """Check the activation in flags or a configuration, alone and with biases of experts. Raises InvalidInputError: two
    activations, or numbers for one that is not there. Raises UnsupportedFeatureError: what biases of experts were
    not checked with."""
    given = [
        flag for flag in (_SQUARED, _GEGLU, QUICK_GEGLU, "--swiglu") if getattr(config, destination_of(flag), False)
    ]
    if len(given) > 1 and given != [QUICK_GEGLU, "--swiglu"]:
        raise InvalidInputError(f"{given[0]} and {given[1]} both say what the MLP computes: give one of them")
    clamp, offset = (getattr(config, name, None) for name in ("activation_func_clamp_value", "glu_linear_offset"))
    if is_quick_geglu(config):
        if getattr(config, "swiglu", False):
            raise InvalidInputError(f"--swiglu and {QUICK_GEGLU} both say what the MLP computes: give one of them")
        if getattr(config, "gated_linear_unit", True) is False:
            raise UnsupportedFeatureError(
                f"TransformerConfig.activation_func quick_gelu is for gated MLPs ({QUICK_GEGLU}): set gated_linear_unit"
            )
        if getattr(config, "bias_activation_fusion", False):
            raise UnsupportedFeatureError(
                f"{QUICK_GEGLU} with a fused activation was not checked: give --no-bias-gelu-fusion"
            )
        if clamp is not None and not clamp > 0:
            raise InvalidInputError(f"{_CLAMP} is {clamp}, it must be greater than 0: raise it or leave it out")
    elif hasattr(config, "quick_geglu"):  # flags; of a configuration such fields are refused by their names
        for flag, value in ((_CLAMP, clamp), (_OFFSET, offset or None)):
            if value is not None:
                raise InvalidInputError(f"{flag} {value} is for {QUICK_GEGLU}: add it, or leave {flag} out")
    if (getattr(config, "num_moe_experts", None) or getattr(config, "num_experts", None)) and has_biases(config):
        refuse_pairs(BIASED_EXPERTS, config)


WIDTHS = {
    name: MEANINGS[name].usual
    for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
}
"""Flag -> Megatron-LM's default; None: queries are projected from the hidden states."""

_YARN_FIELD_OF = {name: name.removeprefix("yarn_") for name in YARN if "range" not in name}
"""Flag -> field of MLATransformerConfig; `YARN` has the defaults."""
YARN_FIELDS = frozenset({*_YARN_FIELD_OF.values(), "rotary_base"})
"""Fields of MLATransformerConfig that `latent_fields` may return."""


def has_latents(config: Any) -> bool:
    """Return whether flags or a configuration ask for latent attention."""
    return bool(getattr(config, "multi_latent_attention", False))


def qk_width(config: Any) -> int:
    """Return the width of a head of queries and keys: of the part without position and the rotated part."""
    width: int = config.qk_head_dim + config.qk_pos_emb_head_dim
    return width


def complete_latent_attention(flags: Any) -> None:
    """Fill in what flags of latent attention leave open, `kv_channels` among it; do nothing without it. Raises
    InvalidInputError: flags of it without it, or values that disagree."""
    if not has_latents(flags):
        for name in (*WIDTHS, "rope_type"):
            if getattr(flags, name) is not None:
                raise InvalidInputError(
                    f"{flag_of(name)} {getattr(flags, name)} is for multi-latent attention: add {LATENTS}, or leave it "
                    "out"
                )
        return
    for name, default in WIDTHS.items():
        if getattr(flags, name) is None:
            setattr(flags, name, default)
    stretch = flags.rotary_scaling_factor
    if flags.rope_type is None:
        flags.rope_type = "yarn" if stretch is not None and stretch > 1 else "rope"
    if flags.rope_type == "yarn" and (stretch is None or stretch <= 1):
        raise InvalidInputError(
            f"--rope-type yarn stretches positions by --rotary-scaling-factor, which is {stretch or 1.0}: give one "
            "above 1, or rope"
        )
    together = qk_width(flags)
    if flags.kv_channels not in (None, together):
        raise InvalidInputError(
            f"--kv-channels is {flags.kv_channels}, --qk-head-dim {flags.qk_head_dim} and --qk-pos-emb-head-dim "
            f"{flags.qk_pos_emb_head_dim} are together {together}: leave it out"
        )
    flags.kv_channels = together


def check_latent_attention(config: Any) -> None:
    """Check completed flags or a configuration for what latent attention cannot have, or was not checked with. Raises
    InvalidInputError: widths that cannot be. Raises UnsupportedFeatureError: another feature, which the message
    names."""
    if not has_latents(config):
        return
    together = qk_width(config)
    if config.qk_pos_emb_head_dim % 2:
        raise InvalidInputError(
            f"--qk-pos-emb-head-dim is {config.qk_pos_emb_head_dim}, RoPE rotates pairs: give an even number"
        )
    if config.v_head_dim > together or config.kv_channels != together:
        raise InvalidInputError(
            f"--v-head-dim is {config.v_head_dim} and --kv-channels {config.kv_channels}, queries and keys have "
            f"{together} channels (--qk-head-dim and --qk-pos-emb-head-dim): values may have at most as many, and "
            "--kv-channels must be that"
        )
    refuse_pairs(LATENTS, config)


def latent_fields(model: Any) -> dict[str, Any]:
    """Return the fields of MLATransformerConfig that YaRN reads, from completed flags; {} without latent attention."""
    if not has_latents(model):
        return {}
    yarn = {}
    for name, field in _YARN_FIELD_OF.items():
        value = getattr(model, name) if model.rope_type == "yarn" else None
        yarn[field] = YARN[name][1] if value is None else value
    return {**yarn, "rotary_base": model.rotary_base}


FUTURE_LOSS = "mtp_{} loss"
"""The name of a depth's loss in logs, as in Megatron-LM."""


def check_multi_token(config: Any) -> None:
    """Check flags or a configuration for what multi-token prediction cannot have, or was not checked with. Raises
    InvalidInputError: numbers that cannot be. Raises UnsupportedFeatureError: another feature, which the message
    names."""
    depths = getattr(config, "mtp_num_layers", None)
    if depths is not None and depths < 0:
        raise InvalidInputError(f"{MODULES} is {depths}, it must be at least 0")
    if not depths:
        return
    factor = config.mtp_loss_scaling_factor
    if factor is None or not 0 < factor < float("inf"):
        raise InvalidInputError(
            f"--mtp-loss-scaling-factor is {factor}, it must be greater than 0: leave {MODULES} out for no such loss"
        )
    refuse_pairs(MODULES, config, value=depths)


_OUTPUTS = ("sandwich_norm", "residual_multiplier", "embedding_multiplier", "logits_scaling", "softmax_scale")


def changed_outputs(flags: Any) -> dict[str, Any]:
    """Return the changed outputs, name -> JSON value; {} where nothing is, or a checkout lacks such flags."""
    said = {name: getattr(flags, name, None) for name in _OUTPUTS}
    return {name: value for name, value in said.items() if value not in (None, False, MEANINGS[name].usual)}


def check_outputs(flags: Any) -> None:
    """Raise UnsupportedFeatureError for a feature that was not checked together with changed outputs."""
    for name, value in changed_outputs(flags).items():
        refuse_pairs(OUTPUTS, flags, called=_said_output(name, value))


def _said_output(name: str, value: Any) -> str:
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"


_OF_ADAPTERS = ("lora_alpha", "lora_target_modules")


def adapters_of(flags: Any) -> Adapters | None:
    """Return what flags, also those in a checkpoint, say of adapters; None: all weights are trained."""
    rank = getattr(flags, "lora_rank", None)
    if rank is None:
        return None
    alpha, modules = (getattr(flags, name) for name in _OF_ADAPTERS)
    absent = set() if linear_attention.is_on(flags) else set(OF_LINEAR)
    absent |= set(OF_MLP) if modules is None and num_experts(flags) else set()
    chosen = tuple(name for name in ADAPTED if name not in absent and (modules is None or name in modules))
    return Adapters(rank=rank, alpha=float(rank if alpha is None else alpha), modules=chosen)


def check_adapters(flags: Any) -> None:
    """Refuse what was not checked together with adapters. Raises InvalidInputError: flags of adapters without adapters,
    or layers that the model does not have. Raises UnsupportedFeatureError: another feature, which the message names."""
    if flags.lora_rank is None:
        given = [flag_of(name) for name in _OF_ADAPTERS if getattr(flags, name) is not None]
        if given:
            raise InvalidInputError(f"{given[0]} is for adapters: add {ADAPTERS}, or leave it out")
        return
    missing = [name for name in flags.lora_target_modules or () if name in OF_LINEAR]
    if missing and not linear_attention.is_on(flags):
        raise InvalidInputError(
            f"--lora-target-modules {missing[0]} is of layers with linear attention, which this model does not have: "
            "leave it out"
        )
    refuse_pairs(ADAPTERS, flags, value=flags.lora_rank)


def identity_of_adapters(flags: Any) -> dict[str, Any]:
    """Return the part of a run's identity that two runs with adapters must share, as JSON values; {} without."""
    found = adapters_of(flags)
    if found is None:
        return {}
    return {"adapters": {"rank": found.rank, "alpha": found.alpha, "modules": list(found.modules)}}
