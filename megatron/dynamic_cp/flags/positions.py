"""How queries and keys are rotated and normalized, as Megatron says it: which layers rotate, and how RoPE is stretched.

Pure functions of flags and configurations; neither torch nor megatron-core is needed. The names are Megatron-LM's; its
YaRN flags are those of its release 0.19, which earlier ones lack.
"""

from __future__ import annotations

import math
from typing import Any

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.flags import MEANINGS, ROTARY, ROTATION_PATTERN
from dynamic_cp.models.table import shown
from megatron.dynamic_cp.flags.windows import windows_of

YARN: dict[str, tuple[str, Any]] = {
    name: (f"yarn_{name.removeprefix('yarn_')}", means.usual)
    for name, means in MEANINGS.items()
    if means.needs == "position_embedding_type=yarn"
}
"""Flag -> the attribute of a configuration that megatron-core reads, and Megatron-LM's default."""

STRETCHED = {
    *("window_rotary_base", "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"),
    *(attribute for attribute, _ in YARN.values()),
}
"""What says how far positions reach: training may go on with others, as with another base of RoPE."""


def unrotated_layers(freq: Any, num_layers: int) -> tuple[int, ...] | None:
    """Return 1 (not rotated) or 0 for each layer, None where --no-rope-freq says nothing.

    Args:
        freq: every so many-th layer is not rotated, or 1 and 0 for each.

    Raises:
        InvalidInputError: it does not fit the layers.
    """
    if freq is None or (isinstance(freq, int) and freq == 0):
        return None
    if isinstance(freq, int):
        if freq < 0 or num_layers % freq:
            raise InvalidInputError(
                f"--no-rope-freq {freq} leaves every {freq}th layer without RoPE, and does not divide the {num_layers} "
                f"layers: {ROTATION_PATTERN}",
                num_layers=num_layers,
            )
        return ((0,) * (freq - 1) + (1,)) * (num_layers // freq)
    if len(freq) != num_layers or set(freq) - {0, 1}:
        raise InvalidInputError(
            f"--no-rope-freq {shown(freq)} has {len(freq)} entries, the model has {num_layers} layers: "
            f"{ROTATION_PATTERN}",
            num_layers=num_layers,
        )
    return tuple(freq)


def check_norms(config: Any) -> None:
    """Refuse two norms of queries and keys at once, of which megatron-core would leave one out silently.

    Args:
        config: flags or a configuration.

    Raises:
        InvalidInputError: both are on.
    """
    if getattr(config, "qk_l2_norm", False) and getattr(config, "qk_layernorm", False):
        raise InvalidInputError("--qk-l2-norm and --qk-layernorm both normalize queries and keys: give one of them")


def check_positions(flags: Any) -> None:
    """Check the flags of positions against each other: none of them is ignored.

    Args:
        flags: of this trainer or of a checkout.

    Raises:
        InvalidInputError: values that disagree.
        UnsupportedFeatureError: a checkout whose release has no flags for YaRN.
    """
    kind = flags.position_embedding_type
    interpolation, is_scaled = flags.rotary_seq_len_interpolation_factor, flags.use_rope_scaling
    unrotated = unrotated_layers(flags.no_rope_freq, flags.num_layers)
    if interpolation is not None and interpolation < 1:
        raise InvalidInputError(
            f"--rotary-seq-len-interpolation-factor is {interpolation}, it must be at least 1: positions are divided "
            "by it",
            factor=interpolation,
        )
    if is_scaled and not flags.rope_scaling_factor > 0:
        raise InvalidInputError(f"--rope-scaling-factor is {flags.rope_scaling_factor}, it must be greater than 0")
    own_base = flags.window_rotary_base if hasattr(flags, "window_rotary_base") else None
    if own_base is not None and not windows_of(flags).are_there:
        raise InvalidInputError(
            f"--window-rotary-base {own_base} is for layers with a window, and there are none: give --window-size, or "
            "leave it out"
        )
    for is_on, flag, kinds in (
        (own_base is not None, "--window-rotary-base", ROTARY[:1]),
        (unrotated is not None, "--no-rope-freq", ROTARY),
        (is_scaled, "--use-rope-scaling", ROTARY[:1]),
        (interpolation is not None, "--rotary-seq-len-interpolation-factor", ROTARY[:1]),
    ):
        if is_on and kind not in kinds:
            raise InvalidInputError(
                f"{flag} is for --position-embedding-type {' or '.join(kinds)}, this model has {kind}: leave one of "
                "them out",
                flag=flag,
            )
    if kind == "yarn":
        _check_yarn(flags)


def _check_yarn(flags: Any) -> None:
    if not hasattr(flags, "yarn_beta_fast"):
        raise UnsupportedFeatureError(
            "--position-embedding-type yarn: this Megatron-LM has no flags for what YaRN needs to know, 0.19 has them: "
            "take a newer checkout, or pretrain_gpt.py of this project",
            flag="--position-embedding-type",
        )
    factor = flags.rotary_scaling_factor
    if factor is None or factor <= 1:
        raise InvalidInputError(
            f"--position-embedding-type yarn stretches positions by --rotary-scaling-factor, which is "
            f"{YARN['rotary_scaling_factor'][1] if factor is None else factor}: give one above 1, or rope",
            factor=factor,
        )
    if flags.rotary_interleaved:
        raise InvalidInputError(
            "--rotary-interleaved: YaRN rotates halves: leave it out, or --position-embedding-type yarn"
        )
    if flags.rotary_percent != 1:
        raise InvalidInputError(
            f"--rotary-percent is {flags.rotary_percent}, YaRN rotates whole heads: leave it out",
            rotary_percent=flags.rotary_percent,
        )


def set_window_rotary_base(config: Any, base: int | None) -> None:
    """Let layers with a window that are built of a TransformerConfig rotate by another base: it has no field for it."""
    vars(config)["window_rotary_base"] = base


def yarn_attributes(flags: Any) -> dict[str, Any]:
    """Return the attributes that megatron-core's YaRN reads from a configuration; {} for other positions."""
    if getattr(flags, "position_embedding_type", None) != "yarn":
        return {}
    given = ((attribute, getattr(flags, name, None), default) for name, (attribute, default) in YARN.items())
    return {attribute: default if value is None else value for attribute, value, default in given}


def concentration(config: Any) -> float:
    """Return the factor of YaRN's rotated queries and keys; 1.0 of a configuration without YaRN.

    Args:
        config: with or without the attributes of `yarn_attributes`.

    Source: Peng et al. 2023 (YaRN, arXiv 2309.00071), section 3.4; DeepSeek-V2's code for `mscale`.
    """
    stretch = getattr(config, YARN["rotary_scaling_factor"][0], None)
    if stretch is None or stretch <= 1:
        return 1.0
    of_rotated, of_all = (getattr(config, YARN[name][0], None) for name in ("mscale", "mscale_all_dim"))
    if of_rotated is None or of_all is None:
        of_rotated, of_all = 1.0, 0.0
    return float((0.1 * of_rotated * math.log(stretch) + 1) / (0.1 * of_all * math.log(stretch) + 1))
