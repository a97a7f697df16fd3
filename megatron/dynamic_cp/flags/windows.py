"""Windows of layers as Megatron says them: `--window-size 127,0` (tokens before and after), and which layers skip it.

Pure functions of flags and configurations; neither torch nor megatron-core is needed. Megatron's window does not count
the token itself, ours does: `--window-size 127,0` is `Lambda(0, 128)`, a window of 128 keys. A
sink is ours alone: with `--window-sink-tokens 4` layers with a window see the first 4 tokens of each sequence, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.flags import WINDOW_PATTERN
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
    """Return the windows of what has `window_size`, `window_attn_skip_freq` and `num_layers`: flags or a config.

    `window_sink_tokens` is there in flags, and in configs that `set_sinks` has seen.

    Raises:
        InvalidInputError: values that cannot be.
        UnsupportedFeatureError: a window that ends behind the token.
    """
    size, skip = (getattr(config, name, None) for name in ("window_size", "window_attn_skip_freq"))
    sink = getattr(config, "window_sink_tokens", 0)
    if sink < 0:
        raise InvalidInputError(
            f"--window-sink-tokens is {sink}, the smallest allowed number is 0: give the first tokens of a sequence "
            "that all see, such as 4, or leave it out",
            window_sink_tokens=sink,
        )
    if size is None:
        if sink:
            raise InvalidInputError(
                f"--window-sink-tokens {sink} is for layers with a window, and there is none: give --window-size, or "
                "leave it out",
                window_sink_tokens=sink,
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
            "127,0 for a window of 128 tokens with the token itself, or leave it out for whole samples",
            window_size=tuple(size),
        )
    if size[1] != 0:
        raise UnsupportedFeatureError(
            f"--window-size {shown(size)} shows {size[1]} tokens behind a token, attention is causal: give {size[0]},0",
            window_size=tuple(size),
        )
    return Windows(size[0] + 1, _checked_skip(skip, config.num_layers), sink)


def set_sinks(config: Any, sink_tokens: int) -> None:
    """Let layers with a window that are built of a TransformerConfig see the first tokens: it has no field for them."""
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
            f"{WINDOW_PATTERN}",
            num_layers=num_layers,
        )
    return tuple(skip)
