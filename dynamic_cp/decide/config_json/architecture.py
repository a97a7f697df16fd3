"""What a model is beyond the numbers that are priced: two models of one shape cost the same and learn differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.flags import MEANINGS, ModelSettings
from dynamic_cp.models.table import flags_of
from dynamic_cp.types import ModelShape

_ENTRIES = {
    entry: (flag, entry != means.entry)
    for flag, means in MEANINGS.items()
    if (entry := means.entry.removeprefix("not "))
}
"""Entry of an `architecture` -> its flag, and whether that says the opposite."""
_CHOICES = {row.destination: row.options.get("choices") for row in flags_of(ModelSettings)}
_KINDS = {row.destination: row.options.get("type", bool) for row in flags_of(ModelSettings)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Choices of a model that change no price.

    Attributes:
        flags: all flags for which a model file's `architecture` has an entry; see `architecture_of`.
        not_trained, not_imported: what pretrain_gpt.py lacks, and weights that are not read, with values.
        not_read: entries of its config.json that transformers does not read either, so they change nothing.
    """

    flags: Mapping[str, Any]
    not_trained: tuple[str, ...] = ()
    not_imported: tuple[str, ...] = ()
    not_read: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "flags", MappingProxyType(dict(self.flags)))

    def __getitem__(self, flag: str) -> Any:
        return self.flags[flag]


def architecture_of(flags: Mapping[str, Any], **remarks: tuple[str, ...]) -> Architecture:
    """Return the architecture that flags say, missing ones or None being as usual; `remarks`: `not_trained` and its
    kin."""
    said = {}
    for flag, _ in _ENTRIES.values():
        value = flags.get(flag)
        said[flag] = MEANINGS[flag].usual if value is None else value
    assert None not in said.values(), said  # each of these must be said
    return Architecture(flags=said, **remarks)


def assumed(*, gated: bool) -> Architecture:
    """Return that of a model whose file does not say: Llama's if the MLP is gated, else GPT-2's."""
    return architecture_of(
        {
            "normalization": "RMSNorm" if gated else "LayerNorm",
            "norm_epsilon": 1e-5,
            "position_embedding_type": "rope" if gated else "learned_absolute",
            "disable_bias_linear": gated,
            "add_qkv_bias": False,
            "qk_layernorm": False,
        }
    )


def architecture_of_file(where: str, data: Mapping[str, Any]) -> Architecture:
    """Return what an entry `architecture` of a model file says, or raise InvalidInputError, naming the file by `where`,
    if an entry is missing, unknown or of the wrong type."""
    needed = [entry for entry, (flag, _) in _ENTRIES.items() if MEANINGS[flag].usual is None]
    missing, unknown = [name for name in needed if name not in data], sorted(set(data) - set(_ENTRIES))
    if missing or unknown:
        lacks, has = f"lacks {', '.join(missing)}", f"has unknown {', '.join(unknown)}"
        words = " and ".join([lacks] * bool(missing) + [has] * bool(unknown))
        known = ", ".join(dict.fromkeys([*needed, *_ENTRIES]))
        raise InvalidInputError(f"{where}: architecture {words}: known are {known}")
    said = {}
    for entry, value in data.items():
        flag, is_opposite = _ENTRIES[entry]
        value = tuple(value) if isinstance(value, list) else value
        if why := _why_not(flag, value):
            raise InvalidInputError(f"{where}: architecture: {entry} is {value!r}, it must be {why}")
        said[flag] = not value if is_opposite else value
    return architecture_of(said)


def _why_not(flag: str, value: Any) -> str:
    """Return what the value of a flag must be, "" if it is that."""
    choices, kind = _CHOICES[flag], _KINDS[flag]
    if choices is not None:
        return "" if value in choices else f"one of {', '.join(choices)}"
    usual = MEANINGS[flag].usual
    kind = kind if usual is None else type(usual)
    fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    return "" if fits else f"of type {'tuple[int, ...]' if kind is tuple else kind.__name__}"


def as_flags(model: ModelShape, architecture: Architecture | None) -> dict[str, Any]:
    """Return a model as flags, name -> value, without those that say nothing of it; `architecture` None: `assumed`."""
    beyond = (architecture or assumed(gated=model.gated_linear_unit)).flags
    has_latents, linear, pattern = model.has_latents, model.linear_attention, model.layer_pattern
    flags: dict[str, Any] = {
        **{flag: _of_shape(model, means.shape) for flag, means in MEANINGS.items() if means.shape},
        **beyond,
        "multi_latent_attention": has_latents,
        "linear_attention": None if linear is None else linear.kind,
    }
    flags = {flag: value for flag, value in flags.items() if flag not in MEANINGS or MEANINGS[flag].is_met(flags)}
    flags["group_query_attention"] = model.num_query_groups != model.num_attention_heads
    if not flags["group_query_attention"]:
        del flags["num_query_groups"]
    kind = beyond["position_embedding_type"]
    if has_latents:
        # Latent attention has its own RoPE and YaRN, which follow from the flags of YaRN.
        flags["position_embedding_type"] = "rope" if kind == "yarn" else kind
        del flags["kv_channels"]
    if model.window is not None:
        flags["window_size"] = f"{model.window_tokens - 1},0"
        flags["window_attn_skip_freq"] = model.window_attn_skip_freq or None
    else:
        del flags["window_sink_tokens"]
    if pattern:
        flags["hybrid_override_pattern"] = pattern
    elif linear is not None:
        flags["experimental_attention_variant"] = linear.kind
        flags["linear_attention_freq"] = model.linear_attention_freq
    if not flags.get("moe_shared_expert_intermediate_size"):
        flags.pop("moe_shared_expert_gate", None)
    if not flags.get("moe_router_num_groups"):
        flags.pop("moe_router_group_topk", None)
    flags["swiglu"] = model.gated_linear_unit and not beyond["quick_geglu"] and not beyond["geglu"]
    return flags


def _of_shape(model: ModelShape, path: str) -> Any:
    """Return the value of a field of the shape, None if its owner is None."""
    is_opposite = path.startswith("not ")
    value: Any = model
    for name in path.removeprefix("not ").split("."):
        value = None if value is None else getattr(value, name)
    return not value if is_opposite else value
