"""The model that the flags in a checkpoint describe, this trainer's or Megatron-LM's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dynamic_cp.decide.config_json.architecture import Architecture, architecture_of
from dynamic_cp.errors import CheckpointError, UnsupportedFeatureError
from dynamic_cp.models.flags import MEANINGS
from dynamic_cp.types import Adapters, ModelShape
from megatron.dynamic_cp.flags.attention import unrotated_layers
from megatron.dynamic_cp.flags.features import adapters_of, has_biases, has_latents
from megatron.dynamic_cp.flags.shape import model_shape, said
from megatron.trainer.checkpoints import safe_loading
from megatron.trainer.flags import derive

_OFF: Mapping[str, tuple[Any, ...]] = {
    "heterogeneous_layers_config_path": (),
    "qk_l2_norm": (),
    "rotary_seq_len_interpolation_factor": (1, 1.0),
    "window_sink_tokens": (0,),
}
"""Argument that changes what is computed, which no family here has -> its values, beside none, that change nothing."""
_SAID = ("normalization", "rotary_base", "max_position_embeddings", "init_method_std")
"""What a checkpoint has to say."""


class Described(NamedTuple):
    """A model, the rows of its tables, and how many of them are token ids (None: a checkpoint does not say it); and its
    adapters, None without."""

    shape: ModelShape
    architecture: Architecture
    num_rows: int
    vocab_size: int | None
    adapters: Adapters | None


def described(folder: Path) -> Described:
    """Return what the flags in one checkpoint say; `shape.vocab_size` are the rows of the tables. Raise CheckpointError
    if there are no flags, or they cannot be read, UnsupportedFeatureError if no family has what they say."""
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
    num_rows = args.padded_vocab_size
    shape = model_shape(args, num_rows)
    if shape.experts is not None:  # in the one way that a config.json says it
        have_some = shape.experts.moe_layers(shape.num_layers)
        freq = 1 if all(have_some) else tuple(map(int, have_some))
        shape = replace(shape, experts=replace(shape.experts, layer_freq=freq, grouped=True))
    token_ids = getattr(args, derive.TOKEN_IDS, None)
    return Described(shape, architecture_of(_beyond_shape(args)), num_rows, token_ids, adapters_of(args))


def _beyond_shape(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that say more than the shape of a model, as a config.json would."""
    values, kind, biases = said(args), args.position_embedding_type, has_biases(args)
    if kind == "rope" and has_latents(args) and args.rope_type == "yarn" and (args.rotary_scaling_factor or 1) > 1:
        kind = "yarn"
    unrotated = unrotated_layers(getattr(args, "no_rope_freq", None), args.num_layers) or ()
    values |= {name: getattr(args, name) for name in _SAID}
    if values["norm_epsilon"] is None:
        values["norm_epsilon"] = args.layernorm_epsilon  # as Megatron-LM keeps it
    if values["use_rope_scaling"]:
        values["rope_scaling_factor"] = args.rope_scaling_factor
    values |= {
        "position_embedding_type": kind,
        "no_rope_freq": tuple(unrotated) if any(unrotated) else (),
        "disable_bias_linear": not biases,
        "add_qkv_bias": bool(values["add_qkv_bias"]) and not biases,
        "qk_layernorm": bool(values["qk_layernorm"]),
    }
    return {name: value for name, value in values.items() if name not in MEANINGS or MEANINGS[name].is_met(values)}


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
