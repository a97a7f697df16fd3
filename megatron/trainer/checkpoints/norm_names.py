"""Norms before projections have other names in layers of TransformerEngine, which fuse them: both are understood.

megatron-core maps one name to the other in dense layers only. With experts or multi-latent attention a checkpoint of
local layers would not load into TransformerEngine's, or the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

_ALONE_AND_FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)


def found_as(name: str, there: Container[str]) -> str:
    """Return the name under which the tensor `name` is `there`; itself where it is under none."""
    if name in there:
        return name
    for pair in _ALONE_AND_FUSED:
        for one, other in (pair, pair[::-1]):
            if one in name and (renamed := name.replace(one, other)) in there:
                return renamed
    return name


def ask_as_found(sharded: Any, there: Container[str]) -> None:
    """Have a (nested) sharded state dict ask for the names that are `there`; of weights and of their optimizer."""
    _for_each(sharded, lambda one: setattr(one, "key", found_as(one.key, there)))


def _for_each(nested: Any, change: Callable[[Any], None]) -> None:
    if isinstance(nested, dict):
        for value in nested.values():
            _for_each(value, change)
    elif isinstance(nested, list | tuple):
        for value in nested:
            _for_each(value, change)
    elif isinstance(getattr(nested, "key", None), str):
        change(nested)
