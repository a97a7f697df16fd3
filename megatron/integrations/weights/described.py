"""The model that the flags in a checkpoint describe, this trainer's or Megatron-LM's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dynamic_cp.errors import CheckpointError, UnsupportedFeatureError
from dynamic_cp.models.architecture import Architecture
from dynamic_cp.types import Adapters, ModelShape
from megatron.dynamic_cp.flags import activation, experts, layer_outputs
from megatron.dynamic_cp.flags.adapters import adapters_of
from megatron.dynamic_cp.flags.latent_attention import is_on
from megatron.dynamic_cp.flags.positions import YARN, unrotated_layers
from megatron.trainer.checkpoints import safe_loading
from megatron.trainer.flags import derive

_OFF: Mapping[str, tuple[Any, ...]] = {
    "heterogeneous_layers_config_path": (),
    "qk_l2_norm": (),
    "rotary_seq_len_interpolation_factor": (1, 1.0),
    "window_sink_tokens": (0,),
}
"""Argument that changes what is computed, which no family here has -> its values, beside none, that change nothing."""


class Described(NamedTuple):
    """A model, with the rows of its tables and how many of them are token ids; None: a checkpoint does not say it.

    Attributes:
        adapters: beside its weights; None: there are none.
    """

    shape: ModelShape
    architecture: Architecture
    num_rows: int
    vocab_size: int | None
    adapters: Adapters | None


def described(folder: Path) -> Described:
    """Return what the flags in a checkpoint say; `shape.vocab_size` are the rows of the tables.

    Args:
        folder: of one checkpoint.

    Raises:
        CheckpointError: there are no flags, or they cannot be read.
        UnsupportedFeatureError: they say something that no family has.
    """
    args = _arguments(folder)
    for name, harmless in _OFF.items():
        value = getattr(args, name, None)
        if value not in (None, False, *harmless):
            raise UnsupportedFeatureError(
                f"{folder} was trained with --{name.replace('_', '-')} {value}, which cannot be exported yet"
            )
    try:
        return _described(args)
    except AttributeError as error:
        raise CheckpointError(
            f"{folder} does not say {error.name} of its model: export one of this program or of Megatron-LM"
        ) from None


def _described(args: argparse.Namespace) -> Described:
    if not getattr(args, "group_query_attention", True):
        args.num_query_groups = args.num_attention_heads
    biases = getattr(args, "add_bias_linear", None)
    biases = not args.disable_bias_linear if biases is None else biases
    epsilon = getattr(args, "norm_epsilon", None)
    architecture = Architecture(
        normalization=args.normalization,
        norm_epsilon=args.layernorm_epsilon if epsilon is None else epsilon,  # as Megatron-LM keeps it
        add_bias_linear=biases,
        add_qkv_bias=bool(getattr(args, "add_qkv_bias", False)) and not biases,
        qk_layernorm=bool(getattr(args, "qk_layernorm", False)),
        rotary_base=args.rotary_base,
        **_positions(args),
        **_factors(args),
        zero_centered_gamma=bool(getattr(args, "apply_layernorm_1p", False)),
        softmax_type=getattr(args, "softmax_type", None) or "vanilla",
        **_routing(args),
        **activation.choices(args),
        max_position_embeddings=args.max_position_embeddings,
        init_method_std=args.init_method_std,
    )
    num_rows = args.padded_vocab_size
    shape = derive.model_shape(args, num_rows)
    if shape.experts is not None:  # in the one way that a config.json says it
        have_some = shape.experts.moe_layers(shape.num_layers)
        freq = 1 if all(have_some) else tuple(map(int, have_some))
        shape = replace(shape, experts=replace(shape.experts, layer_freq=freq, grouped=True))
    return Described(shape, architecture, num_rows, getattr(args, derive.TOKEN_IDS, None), adapters_of(args))


def _positions(args: argparse.Namespace) -> dict[str, Any]:
    """Return how positions are embedded, in the fields of `Architecture`."""
    kind = args.position_embedding_type
    if kind == "rope" and is_on(args) and args.rope_type == "yarn" and (args.rotary_scaling_factor or 1) > 1:
        kind = "yarn"
    unrotated = unrotated_layers(getattr(args, "no_rope_freq", None), args.num_layers) or ()
    found: dict[str, Any] = {
        "position_embedding_type": kind,
        "rotary_percent": float(getattr(args, "rotary_percent", 1.0)),
        "rotary_interleaved": bool(getattr(args, "rotary_interleaved", False)),
        "window_rotary_base": getattr(args, "window_rotary_base", None) or 0,
        "no_rope_freq": tuple(unrotated) if any(unrotated) else (),
    }
    if getattr(args, "use_rope_scaling", False):
        found |= {"use_rope_scaling": True, "rope_scaling_factor": float(args.rope_scaling_factor)}
    if kind == "yarn":
        for name, (_, default) in YARN.items():
            value = getattr(args, name, None)
            found[name] = type(default)(default if value is None else value)
    return found


def _factors(args: argparse.Namespace) -> dict[str, float]:
    """Return the factors of what parts put out, in the fields of `Architecture`."""
    said = layer_outputs.choices(args)
    return {name: float(value) for name, value in said.items() if name != "sandwich_norm"}


def _routing(args: argparse.Namespace) -> dict[str, Any]:
    """Return how tokens find their experts, in the fields of `Architecture`."""
    said = experts.choices(args)
    if not said:
        return {}
    return {
        "router_score_function": said["moe_router_score_function"],
        "router_pre_softmax": bool(said["moe_router_pre_softmax"]),
        "router_num_groups": said["moe_router_num_groups"] or 0,
        "router_group_topk": said["moe_router_group_topk"] or 0,
        "router_scaling_factor": float(said["moe_router_topk_scaling_factor"] or 1),
        "router_expert_bias": bool(said["moe_router_enable_expert_bias"]),
    }


def _arguments(folder: Path) -> argparse.Namespace:
    """Return the flags in a checkpoint."""
    try:
        common = safe_loading.read_common(folder)
        arguments = common["args"]
    except CheckpointError:
        raise
    except Exception as error:  # what is damaged makes torch and json raise anything
        raise CheckpointError(
            f"{folder}: the values beside its tensors cannot be read ({type(error).__name__}: {error}): export another"
        ) from error
    if not isinstance(arguments, argparse.Namespace):
        raise CheckpointError(f"{folder} has no flags of the run that saved it: export another")
    return argparse.Namespace(**vars(arguments))
