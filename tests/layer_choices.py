"""Layers chosen for flags of which a test names only those that it is about."""

from types import SimpleNamespace
from typing import Any

from dynamic_cp.models.flags import TransformerImpl
from megatron.dynamic_cp.attention.te.support import LayerChoice, choose_layers
from megatron.dynamic_cp.flags.shape import LayerNeeds, layer_needs


def needs_of(requested: TransformerImpl | None, exchange: str, **flags: Any) -> LayerNeeds:
    """Return what flags of a dense model in bf16 with heads of 64 ask of layers."""
    given = {
        **{"attention_backend": "auto", "bf16": True, "kv_channels": 64, "softmax_type": "vanilla"},
        **{"fp8": None, "fp8_recipe": None, "hidden_size": 4096, "sequence_parallel": False},
        **{"has_windows": False, "recomputes_norms": False, "fp32_residual": False},
        **flags,
    }
    topology = SimpleNamespace(sequence_shares=2 if given["sequence_parallel"] else 1)
    planning: Any = SimpleNamespace(pool="off", cp_comm_type=exchange, topology=topology, **given)
    return layer_needs(SimpleNamespace(transformer_impl=requested, **given), planning)


def chosen_layers(
    requested: TransformerImpl | None, exchange: str, *, capability: tuple[int, int] | None, flash_attn: Any,
    version: str | None, why_missing: str = "", **flags: Any,
) -> LayerChoice:  # fmt: skip
    """Return the layers of a device with a version of TransformerEngine; see `needs_of`."""
    return choose_layers(
        needs_of(requested, exchange, **flags), capability=capability, flash_attn=flash_attn, version=version,
        why_missing=why_missing,
    )  # fmt: skip
