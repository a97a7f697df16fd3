"""The shape of a diffusion transformer, whose tokens attend to their whole sample, from a diffusers config.json. Not
counted: what a clip or image has once (modulation, time), and keys and values of a text in cross-attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dynamic_cp.decide.config_json.entries import Entries, named
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import ModelShape


class _Blocks(NamedTuple):
    """What a config does not say of its blocks, which are all equal: width of the MLP's inner layer over the model's
    (None: the config has `ffn_dim`), and whether tokens have queries and outputs of an attention to the text."""

    ffn_over_hidden: int | None
    cross_attention: bool


_KNOWN = {
    "CogVideoXTransformer3DModel": _Blocks(4, cross_attention=False),  # text tokens are part of the sample
    "DiTTransformer2DModel": _Blocks(4, cross_attention=False),
    "WanTransformer3DModel": _Blocks(None, cross_attention=True),
}
"""Class -> its blocks. Source: the modules of these classes in diffusers, and for Wan their documentation (0.35)."""

_NEEDED = ("num_layers", "num_attention_heads", "attention_head_dim")


def model_shape(where: str, data: Mapping[str, Any]) -> ModelShape:
    """Return the shape in `data`, the content of a config.json; there is no vocabulary, so `vocab_size` is 1. Raise
    UnsupportedFeatureError for an unknown class, InvalidInputError for a missing key or a wrong type."""
    name = data["_class_name"]
    if name not in _KNOWN:
        raise UnsupportedFeatureError(
            f"{where}: _class_name is {name!r}, known are {', '.join(_KNOWN)}: write the numbers into a file like the "
            "bundled wan2.1-t2v-14b, with causal_attention false"
        )
    blocks = _KNOWN[name]
    needed = _NEEDED if blocks.ffn_over_hidden else (*_NEEDED, "ffn_dim")
    sizes = {key: Entries(where, data).whole(key, needed) for key in needed}
    hidden_size = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    entry_of = {"kv_channels": "attention_head_dim", "ffn_hidden_size": "ffn_dim"}
    with named(where, entry_of):
        return ModelShape(
            num_layers=sizes["num_layers"],
            hidden_size=hidden_size,
            ffn_hidden_size=sizes.get("ffn_dim", (blocks.ffn_over_hidden or 0) * hidden_size),
            num_attention_heads=sizes["num_attention_heads"],
            num_query_groups=sizes["num_attention_heads"],
            kv_channels=sizes["attention_head_dim"],
            vocab_size=1,
            gated_linear_unit=str(data.get("activation_fn")).endswith("glu"),
            causal_attention=False,
            share_embeddings_and_output_weights=True,
            other_weights_per_layer=2 * hidden_size**2 if blocks.cross_attention else 0,
            source=f"{where} (diffusers config, {name})",
        )
