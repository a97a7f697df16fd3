"""RoPE of a config.json: plain, scaled as in Llama 3.1, or YaRN; and the same written back. Its entries are in
`rope_scaling`, since transformers 5 in `rope_parameters`. Source: `modeling_rope_utils.py` of transformers 5.23."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynamic_cp.models.architecture import Architecture
from dynamic_cp.models.entries import Entries
from dynamic_cp.models.families import SLIDING, WHOLE, Family
from dynamic_cp.models.flags import MEANINGS

_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Numbers of Llama 3.1 to 3.3's scaled RoPE that megatron-core has fixed; the factor is free."""
_NAMES = frozenset({"rope_type", "type", "rope_theta"})
_YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "yarn_correction_range_round_to_int",
}
"""Entry of YaRN -> flag."""
_EXACT = 1e-6
"""Relative tolerance of attention_factor against the value that follows from the rest."""


def rotation(config: Entries, family: Family) -> dict[str, Any]:
    """Return the flags that say how a model rotates; `why_not` gets what of it pretrain_gpt.py lacks. Raise
    InvalidInputError for a wrong type."""
    if config.get("position_embedding_type") != "rope" and config.get("model_type") == "granitemoehybrid":
        return {"position_embedding_type": "none"}
    found: dict[str, Any] = {"position_embedding_type": "rope"}
    values = Entries(config.where, {"partial_rotary_factor": family.rotated, **config})
    if config.get("model_type") == "gemma3_text":
        found["window_rotary_base"] = _of_windows(config, values)
    for key in ("rope_scaling", "rope_parameters"):
        if not (entry := values.get(key)):
            continue
        is_object = isinstance(entry, Mapping)
        flags, reason = _scaled(Entries(config.where, entry)) if is_object else ({}, "it is no object")
        if reason:
            config.why_not.append(f"{key} {entry!r}: {reason}")
            continue
        found |= flags
        values |= {name: entry[name] for name in ("rope_theta", "partial_rotary_factor") if entry.get(name) is not None}
    base, share = values.number("rope_theta", family.base), float(values.number("partial_rotary_factor", 1.0))
    if base != int(base):
        config.why_not.append(f"rope_theta {base}: a whole number is needed")
    if found["position_embedding_type"] == "yarn" and share != 1:
        config.why_not.append(f"partial_rotary_factor {share} with YaRN: YaRN rotates whole heads")
    return found | {"rotary_base": int(base), "rotary_percent": share}


def _of_windows(config: Entries, values: Entries) -> int:
    """Return the base of layers of Gemma 3 with a window, and leave in `values` the rotation of its other layers."""
    entry = config.get("rope_parameters")
    parts = {kind: (entry.get(kind) if isinstance(entry, Mapping) else None) or {} for kind in (WHOLE, SLIDING)}
    for kind, part in parts.items():
        if not isinstance(part, Mapping):
            config.why_not.append(f"rope_parameters {entry!r}: {kind} is no object")
            parts[kind] = {}
    of_whole, of_windows = (Entries(config.where, part) for part in parts.values())
    values.setdefault("rope_theta", 1000000)
    values["rope_parameters"] = dict(of_whole)
    of_windows.setdefault("rope_theta", config.get("rope_local_base_freq", 10000))
    base = of_windows.number("rope_theta", 10000)
    kind = of_windows.get("rope_type", "default")
    if kind != "default":
        config.why_not.append(f"rope_type {kind} of layers with a window")
    if base != int(base):
        config.why_not.append(f"rope_theta {base} of layers with a window: a whole number is needed")
    return int(base)


def _scaled(entry: Entries) -> tuple[dict[str, Any], str]:
    """Return the flags of an entry of RoPE, or why there are none."""
    kind = entry.get("rope_type", entry.get("type"))
    if kind == "default" or (kind is None and set(entry) == {"rope_theta"}):
        return {}, ""
    if kind == "llama3" and _LLAMA_3.items() <= entry.items() and entry.keys() <= {*_LLAMA_3, *_NAMES, "factor"}:
        return {"use_rope_scaling": True, "rope_scaling_factor": float(entry.number("factor", 8.0))}, ""
    if kind == "yarn":
        return _yarn(entry)
    return {}, f"RoPE is scaled by YaRN, or as in Llama 3 with {_LLAMA_3}"


def _yarn(entry: Entries) -> tuple[dict[str, Any], str]:
    unknown = sorted(entry.keys() - {*_YARN, *_NAMES, "attention_factor"})
    if unknown:
        return {}, f"{', '.join(unknown)} of YaRN: not known here"
    found: dict[str, Any] = {"position_embedding_type": "yarn"}
    for key, name in _YARN.items():
        default = MEANINGS[name].usual
        is_choice = isinstance(default, bool)
        found[name] = type(default)(entry.get(key, default) if is_choice else entry.number(key, default))
    if entry.get("original_max_position_embeddings") is None:
        return {}, "original_max_position_embeddings of YaRN: it is missing"
    if found["rotary_scaling_factor"] <= 1:
        return {}, "YaRN stretches by a factor above 1"
    if not (entry.get("mscale") and entry.get("mscale_all_dim")):
        if entry.get("mscale_all_dim") or entry.get("mscale") not in (None, 0, 1):
            return {}, "mscale and mscale_all_dim of YaRN: both are needed, or neither"
        found |= {"mscale": 1.0, "mscale_all_dim": 0.0}  # what transformers does with one of them
    given, follows = entry.get("attention_factor"), _concentration(found)
    if given is not None and not math.isclose(entry.number("attention_factor", 1.0), follows, rel_tol=_EXACT):
        return {}, f"attention_factor {given} of YaRN: {follows} follows from the rest"
    return found, ""


def _concentration(fields: Mapping[str, Any]) -> float:
    stretch = math.log(fields["rotary_scaling_factor"])
    return float((0.1 * fields["mscale"] * stretch + 1) / (0.1 * fields["mscale_all_dim"] * stretch + 1))


def written(architecture: Architecture) -> dict[str, Any]:
    """Return the entries of a config.json that `rotation` reads as those of `architecture`, which has RoPE or YaRN."""
    values: dict[str, Any] = {"rope_theta": architecture["rotary_base"]}
    if architecture["use_rope_scaling"]:
        values["rope_scaling"] = {"rope_type": "llama3", "factor": architecture["rope_scaling_factor"], **_LLAMA_3}
    elif architecture["position_embedding_type"] == "yarn":
        yarn = {key: architecture[name] for key, name in _YARN.items()}
        if not architecture["mscale_all_dim"]:
            del yarn["mscale"], yarn["mscale_all_dim"]
        values["rope_scaling"] = {"rope_type": "yarn", **yarn}
    return values
