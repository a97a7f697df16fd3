"""Which layers a model trains with: one fact for the command, which prices it, and the trainer, which builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamic_cp.models.catalog import hardware_names
from dynamic_cp.models.flags import MEANINGS

HEAD_DIM_MULTIPLE = 8
LARGEST_HEAD_DIM = 256
"""Limits of the flash and cuDNN kernels that TransformerEngine calls."""

CHECKED_LOCALLY = "checked with local layers only"


_ONLY_LOCAL = {
    "multi_latent_attention": "latent attention (--multi-latent-attention) is",
    "window_size": "layers with a window (--window-size) are",
    "softmax_type": "a score beside those of keys (--softmax-type {}) is",
    "quick_geglu": "gated MLPs of --quick-geglu are",
    "geglu": "gated MLPs of --geglu are",
    "window_rotary_base": "a base of RoPE for layers with a window (--window-rotary-base) is",
    "sandwich_norm": "--sandwich-norm is",
    "residual_multiplier": "--residual-multiplier {} is",
    "embedding_multiplier": "--embedding-multiplier {} is",
    "logits_scaling": "--logits-scaling {} is",
    "softmax_scale": "--softmax-scale {} is",
}
"""Flag of a model -> what only local layers were checked with."""


def why_local(flags: Mapping[str, Any]) -> str | None:
    """Return the first reason against TransformerEngine's layers; None: there is none. `flags` are the model's, with
    `kv_channels`; missing ones are as usual."""
    for name, what in _ONLY_LOCAL.items():
        if flags.get(name) not in (None, False, 0, MEANINGS[name].usual):
            return f"{what.format(flags[name])} {CHECKED_LOCALLY}"
    if flags.get("num_experts") and not flags["disable_bias_linear"]:
        return f"experts with biases (without --disable-bias-linear) are {CHECKED_LOCALLY}"
    width = flags["kv_channels"]
    if width % HEAD_DIM_MULTIPLE or width > LARGEST_HEAD_DIM:
        return (
            f"TransformerEngine's attention needs --kv-channels that are a multiple of {HEAD_DIM_MULTIPLE} up to "
            f"{LARGEST_HEAD_DIM}, they are {width}"
        )
    return None


def hardware_of_layers(name: str, *, is_local: bool) -> str:
    """Return the bundled hardware of these layers for the name of one; another name, or a path, stays what it is."""
    return local if is_local and (local := f"{name}-local") in hardware_names() else name


def is_of_local_layers(name: str) -> bool:
    """Return whether the bundled hardware `name` is that of local layers; CPUs have no others."""
    return name == "cpu" or name.endswith("-local")
