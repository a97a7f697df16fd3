"""Windows of layers, and how queries and keys are rotated and normalized, as Megatron-LM's flags say it.

Pure functions of flags and configurations, without torch and megatron-core. Megatron's window does not count the token
itself, ours does: `--window-size 127,0` is `Lambda(0, 128)`, a window of 128 keys. Sinks are ours alone:
`--window-sink-tokens 4` shows layers with a window the first 4 tokens of each sequence, too. YaRN's flags are those of
Megatron-LM 0.19, which earlier releases lack.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.flags import MEANINGS, ROTARY, ROTATION_PATTERN, WINDOW_PATTERN
from dynamic_cp.models.table import shown
from dynamic_cp.types import Lambda


class Windows(NamedTuple):
    """Checked windows, as `ModelShape` has them.

    Attributes:
        tokens: keys that a token sees in a layer with a window, itself among them; 0: no layer has one.
        skip_freq: every so many-th layer has none, or 1 (has one) and 0 for each layer; 0: all have one.
        sink_tokens: first keys of its sequence that a token sees besides.
    """

    tokens: int
    skip_freq: int | tuple[int, ...]
    sink_tokens: int = 0

    @property
    def are_there(self) -> bool:
        """Whether any layer has one."""
        return self.tokens > 0 and (any(self.skip_freq) if isinstance(self.skip_freq, tuple) else self.skip_freq != 1)

    def of_layer(self, layer_number: int) -> Lambda | None:
        """Return the mask of a layer with a window, None without; layers of the whole model count from 1."""
        if isinstance(self.skip_freq, tuple):
            has_one = bool(self.skip_freq[layer_number - 1])
        else:
            has_one = not self.skip_freq or layer_number % self.skip_freq != 0
        return Lambda(self.sink_tokens, self.tokens) if self.tokens and has_one else None


def windows_of(config: Any) -> Windows:
    """Return the windows in flags or a config with `window_size`, `window_attn_skip_freq` and `num_layers`.
    `window_sink_tokens` is there in flags, and in configs that `set_sinks` has seen. Raises InvalidInputError:
    values that cannot be. Raises UnsupportedFeatureError: a window that ends behind the token."""
    size, skip = (getattr(config, name, None) for name in ("window_size", "window_attn_skip_freq"))
    sink = getattr(config, "window_sink_tokens", 0)
    if sink < 0:
        raise InvalidInputError(
            f"--window-sink-tokens is {sink}, the smallest allowed number is 0: give the first tokens of a sequence "
            "that all see, such as 4, or leave it out"
        )
    if size is None:
        if sink:
            raise InvalidInputError(
                f"--window-sink-tokens {sink} is for layers with a window, and there is none: give --window-size, or "
                "leave it out"
            )
        if skip is not None:
            raise InvalidInputError(
                f"--window-attn-skip-freq {shown(skip)} skips windows, and there is none: give --window-size, or "
                "leave it out"
            )
        return Windows(0, 0)
    if len(size) != 2 or size[0] < 0:
        raise InvalidInputError(
            f"--window-size is {shown(size)}, two numbers are needed, tokens before (at least 0) and after (0): give "
            "127,0 for a window of 128 tokens with the token itself, or leave it out for whole samples"
        )
    if size[1] != 0:
        raise UnsupportedFeatureError(
            f"--window-size {shown(size)} shows {size[1]} tokens behind a token, attention is causal: give {size[0]},0"
        )
    return Windows(size[0] + 1, _checked_skip(skip, config.num_layers), sink)


def set_sinks(config: Any, sink_tokens: int) -> None:
    """Let windowed layers built from a TransformerConfig, which has no field for it, see the first tokens."""
    vars(config)["window_sink_tokens"] = sink_tokens


def _checked_skip(skip: Any, num_layers: int) -> int | tuple[int, ...]:
    if skip is None:
        return 0
    if isinstance(skip, int):
        if skip < 1:
            raise InvalidInputError(
                f"--window-attn-skip-freq is {skip}, the smallest allowed number is 1: {WINDOW_PATTERN}"
            )
        return skip
    if len(skip) != num_layers or set(skip) - {0, 1}:
        raise InvalidInputError(
            f"--window-attn-skip-freq {shown(skip)} has {len(skip)} entries, the model has {num_layers} layers: "
            f"{WINDOW_PATTERN}"
        )
    return tuple(skip)


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
"""What says how far positions reach; training may go on with other values, as with another base of RoPE."""


def unrotated_layers(freq: Any, num_layers: int) -> tuple[int, ...] | None:
    """Return 1 (not rotated) or 0 for each layer, None where --no-rope-freq says nothing. `freq`: every so many-th
    layer is not rotated, or 1 and 0 for each. Raises InvalidInputError: it does not fit the layers."""
    if freq is None or (isinstance(freq, int) and freq == 0):
        return None
    if isinstance(freq, int):
        if freq < 0 or num_layers % freq:
            raise InvalidInputError(
                f"--no-rope-freq {freq} leaves every {freq}th layer without RoPE, and does not divide the {num_layers} "
                f"layers: {ROTATION_PATTERN}"
            )
        return ((0,) * (freq - 1) + (1,)) * (num_layers // freq)
    if len(freq) != num_layers or set(freq) - {0, 1}:
        raise InvalidInputError(
            f"--no-rope-freq {shown(freq)} has {len(freq)} entries, the model has {num_layers} layers: "
            f"{ROTATION_PATTERN}"
        )
    return tuple(freq)


def check_norms(config: Any) -> None:
    """Raise InvalidInputError for two norms of queries and keys, of which megatron-core would drop one silently."""
    if getattr(config, "qk_l2_norm", False) and getattr(config, "qk_layernorm", False):
        raise InvalidInputError("--qk-l2-norm and --qk-layernorm both normalize queries and keys: give one of them")


def check_positions(flags: Any) -> None:
    """Check the flags of positions, of this trainer or of a checkout, against each other: none of them is ignored.
    Raises InvalidInputError: values that disagree. Raises UnsupportedFeatureError: a checkout whose release has no
    flags for YaRN."""
    kind = flags.position_embedding_type
    interpolation, is_scaled = flags.rotary_seq_len_interpolation_factor, flags.use_rope_scaling
    unrotated = unrotated_layers(flags.no_rope_freq, flags.num_layers)
    if interpolation is not None and interpolation < 1:
        raise InvalidInputError(
            f"--rotary-seq-len-interpolation-factor is {interpolation}, it must be at least 1: positions are divided "
            "by it"
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
                "them out"
            )
    if kind == "yarn":
        _check_yarn(flags)


def _check_yarn(flags: Any) -> None:
    if not hasattr(flags, "yarn_beta_fast"):
        raise UnsupportedFeatureError(
            "--position-embedding-type yarn: this Megatron-LM has no flags for what YaRN needs to know, 0.19 has them: "
            "take a newer checkout, or pretrain_gpt.py of this project"
        )
    factor = flags.rotary_scaling_factor
    if factor is None or factor <= 1:
        raise InvalidInputError(
            f"--position-embedding-type yarn stretches positions by --rotary-scaling-factor, which is "
            f"{YARN['rotary_scaling_factor'][1] if factor is None else factor}: give one above 1, or rope"
        )
    if flags.rotary_interleaved:
        raise InvalidInputError(
            "--rotary-interleaved: YaRN rotates halves: leave it out, or --position-embedding-type yarn"
        )
    if flags.rotary_percent != 1:
        raise InvalidInputError(f"--rotary-percent is {flags.rotary_percent}, YaRN rotates whole heads: leave it out")


def set_window_rotary_base(config: Any, base: int | None) -> None:
    """Let windowed layers built from a TransformerConfig, which has no field for it, rotate by another base."""
    vars(config)["window_rotary_base"] = base


def yarn_attributes(flags: Any) -> dict[str, Any]:
    """Return the attributes that megatron-core's YaRN reads from a configuration; {} for other positions."""
    if getattr(flags, "position_embedding_type", None) != "yarn":
        return {}
    given = ((attribute, getattr(flags, name, None), default) for name, (attribute, default) in YARN.items())
    return {attribute: default if value is None else value for attribute, value, default in given}


def concentration(config: Any) -> float:
    """Return YaRN's factor of rotated queries and keys, 1.0 without the attributes of `yarn_attributes`.

    Source: Peng et al. 2023 (YaRN, arXiv 2309.00071), section 3.4; DeepSeek-V2's code for `mscale`.
    """
    stretch = getattr(config, YARN["rotary_scaling_factor"][0], None)
    if stretch is None or stretch <= 1:
        return 1.0
    of_rotated, of_all = (getattr(config, YARN[name][0], None) for name in ("mscale", "mscale_all_dim"))
    if of_rotated is None or of_all is None:
        of_rotated, of_all = 1.0, 0.0
    return float((0.1 * of_rotated * math.log(stretch) + 1) / (0.1 * of_all * math.log(stretch) + 1))
