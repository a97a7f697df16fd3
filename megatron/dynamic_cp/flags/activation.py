"""What an MLP computes between its matrices, as Megatron-LM's flags say it, and what biases of experts go with.

Pure functions of flags and configurations; neither torch nor megatron-core is needed. `--quick-geglu` with a clamp and
an offset is the gated MLP of gpt-oss: min(a, c) * sigmoid(1.702 min(a, c)) * (clamp(b, -c, c) + offset).
"""

from __future__ import annotations

from typing import Any

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.table import destination_of
from megatron.dynamic_cp.flags.exclusions import BIASED_EXPERTS, refuse_pairs

FLAG, SQUARED, GEGLU = "--quick-geglu", "--squared-relu", "--geglu"
_NAMED = (FLAG, SQUARED, GEGLU)
"""Activations that take the place of GELU, or of the gates of --swiglu."""
CLAMP, OFFSET = "--activation-func-clamp-value", "--glu-linear-offset"
OF_QUICK_GEGLU = frozenset({"activation_func_clamp_value", "glu_linear_offset"})
"""Flags and fields of a configuration that mean something with it alone."""


def is_quick_geglu(config: Any) -> bool:
    """Return whether flags or a configuration ask for it."""
    function = getattr(config, "activation_func", None)
    return bool(getattr(config, "quick_geglu", False)) or getattr(function, "__name__", None) == "quick_gelu"


def is_gated(flags: Any) -> bool:
    """Return whether the MLPs of a model are gated, by its flags."""
    return bool(getattr(flags, "swiglu", False) or getattr(flags, "geglu", False)) or is_quick_geglu(flags)


def named(flags: Any) -> str | None:
    """Return the flag of an activation that is neither GELU nor that of --swiglu; None: there is none."""
    return next((flag for flag in _NAMED if getattr(flags, destination_of(flag), False)), None)


def has_biases(config: Any) -> bool:
    """Return whether flags or a configuration ask for biases in all linear layers."""
    return bool(config.add_bias_linear if hasattr(config, "add_bias_linear") else not config.disable_bias_linear)


def check_activation(config: Any) -> None:
    """Check the activation, alone and with biases of experts.

    Args:
        config: flags of this trainer or of a checkout, or a configuration.

    Raises:
        InvalidInputError: two activations, or numbers for one that is not there.
        UnsupportedFeatureError: what biases of experts were not checked with.
    """
    given = [flag for flag in (SQUARED, GEGLU, FLAG, "--swiglu") if getattr(config, destination_of(flag), False)]
    if len(given) > 1 and given != [FLAG, "--swiglu"]:
        raise InvalidInputError(f"{given[0]} and {given[1]} both say what the MLP computes: give one of them")
    clamp, offset = (getattr(config, name, None) for name in ("activation_func_clamp_value", "glu_linear_offset"))
    if is_quick_geglu(config):
        if getattr(config, "swiglu", False):
            raise InvalidInputError(f"--swiglu and {FLAG} both say what the MLP computes: give one of them")
        if getattr(config, "gated_linear_unit", True) is False:
            raise UnsupportedFeatureError(
                f"TransformerConfig.activation_func quick_gelu is for gated MLPs ({FLAG}): set gated_linear_unit",
                flag=FLAG,
            )
        if getattr(config, "bias_activation_fusion", False):
            raise UnsupportedFeatureError(
                f"{FLAG} with a fused activation was not checked: give --no-bias-gelu-fusion", flag=FLAG
            )
        if clamp is not None and not clamp > 0:
            raise InvalidInputError(f"{CLAMP} is {clamp}, it must be greater than 0: raise it or leave it out")
    elif hasattr(config, "quick_geglu"):  # flags; of a configuration such fields are refused by their names
        for flag, value in ((CLAMP, clamp), (OFFSET, offset or None)):
            if value is not None:
                raise InvalidInputError(f"{flag} {value} is for {FLAG}: add it, or leave {flag} out", flag=flag)
    if (getattr(config, "num_moe_experts", None) or getattr(config, "num_experts", None)) and has_biases(config):
        refuse_pairs(BIASED_EXPERTS, config)
