"""Multi-latent attention as Megatron-LM's flags say it, and what it is not trained together with.

Pure functions of flags and configurations; neither torch nor megatron-core is needed. Its YaRN is megatron-core's own:
`--rope-type yarn` with the flags that `--position-embedding-type yarn` has in other models.
"""

from __future__ import annotations

from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.flags import MEANINGS
from dynamic_cp.models.table import flag_of
from megatron.dynamic_cp.flags.exclusions import LATENTS, refuse_pairs
from megatron.dynamic_cp.flags.positions import YARN

FLAG = "--multi-latent-attention"
WIDTHS = {
    name: MEANINGS[name].usual
    for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
}
"""Flag -> Megatron-LM's default; None: queries are projected from the hidden states."""

_YARN_FIELDS = {
    "rotary_scaling_factor": "rotary_scaling_factor",
    "yarn_original_max_position_embeddings": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""Flag -> field of MLATransformerConfig; `YARN` has the defaults."""
FIELDS = frozenset({*_YARN_FIELDS.values(), "rotary_base"})
"""Fields of MLATransformerConfig that `latent_fields` may return."""


def is_on(config: Any) -> bool:
    """Return whether flags or a configuration ask for it."""
    return bool(getattr(config, "multi_latent_attention", False))


def qk_width(config: Any) -> int:
    """Return the width of a head of queries and keys: what has no position, and what is rotated."""
    width: int = config.qk_head_dim + config.qk_pos_emb_head_dim
    return width


def complete_latent_attention(flags: Any) -> None:
    """Fill in what flags of latent attention leave open, `kv_channels` among it; does nothing without it.

    Raises:
        InvalidInputError: flags of it without it, or values that disagree.
    """
    if not is_on(flags):
        for name in (*WIDTHS, "rope_type"):
            if getattr(flags, name) is not None:
                raise InvalidInputError(
                    f"{flag_of(name)} {getattr(flags, name)} is for multi-latent attention: add {FLAG}, or leave it "
                    "out",
                    name=name,
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
            "above 1, or rope",
            factor=stretch,
        )
    together = qk_width(flags)
    if flags.kv_channels not in (None, together):
        raise InvalidInputError(
            f"--kv-channels is {flags.kv_channels}, --qk-head-dim {flags.qk_head_dim} and --qk-pos-emb-head-dim "
            f"{flags.qk_pos_emb_head_dim} are together {together}: leave it out",
            kv_channels=flags.kv_channels,
        )
    flags.kv_channels = together


def check_latent_attention(config: Any) -> None:
    """Refuse what cannot be, and what was not checked together with latent attention.

    Args:
        config: completed flags or a configuration.

    Raises:
        InvalidInputError: widths that cannot be.
        UnsupportedFeatureError: another feature, which the message names.
    """
    if not is_on(config):
        return
    together = qk_width(config)
    if config.qk_pos_emb_head_dim % 2:
        raise InvalidInputError(
            f"--qk-pos-emb-head-dim is {config.qk_pos_emb_head_dim}, RoPE rotates pairs: give an even number",
            width=config.qk_pos_emb_head_dim,
        )
    if config.v_head_dim > together or config.kv_channels != together:
        raise InvalidInputError(
            f"--v-head-dim is {config.v_head_dim} and --kv-channels {config.kv_channels}, queries and keys have "
            f"{together} channels (--qk-head-dim and --qk-pos-emb-head-dim): values may have at most as many, and "
            "--kv-channels must be that",
            v_head_dim=config.v_head_dim,
            kv_channels=together,
        )
    refuse_pairs(LATENTS, config)


def latent_fields(model: Any) -> dict[str, Any]:
    """Return the fields of MLATransformerConfig that its YaRN reads; {} without latent attention.

    Args:
        model: completed flags.
    """
    if not is_on(model):
        return {}
    yarn = {}
    for name, field in _YARN_FIELDS.items():
        value = getattr(model, name) if model.rope_type == "yarn" else None
        yarn[field] = YARN[name][1] if value is None else value
    return {**yarn, "rotary_base": model.rotary_base}
