"""RoPE and experts of a config.json, and the same written back. RoPE is plain, scaled as in Llama 3.1, or YaRN; its
entries are in `rope_scaling`, since transformers 5 in `rope_parameters`. Source: `modeling_rope_utils.py` and the
routers (`modeling_<model_type>.py`) of transformers 5.23, and megatron-core's `topk_routing_with_score_function`, which
has to route the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynamic_cp.decide.config_json.architecture import Architecture
from dynamic_cp.decide.config_json.entries import SIZES, Entries
from dynamic_cp.decide.config_json.families import SLIDING, WHOLE, Family
from dynamic_cp.models.flags import MEANINGS
from dynamic_cp.types import Experts

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


def has_experts(config: Entries, family: Family) -> bool:
    """Return whether any layer of a model that is no hybrid has experts; those of DeepSeek may have none."""
    if family.experts is None or family.experts.layers != "later":
        return family.experts is not None
    first, layers = config.get("first_k_dense_replace"), config.get("num_hidden_layers")
    return config.get(family.experts.number) is not None and not (
        isinstance(first, int) and isinstance(layers, int) and first >= layers
    )


def experts_of(config: Entries, family: Family, num_layers: int) -> Experts | None:
    """Return the experts of a model that has some, with the layers of transformers; None if no layer of a hybrid has.
    Raise InvalidInputError for an entry that is missing or wrong."""
    said = family.experts
    assert said is not None
    needed = SIZES if family.kind else (said.number, "num_experts_per_tok", said.width)
    # transformers 5 writes this name into configs of qwen3_moe.
    is_new = said.layers == "not listed" and config.get(said.number) is None and "num_local_experts" in config
    width, moe = config.whole(said.width, needed), [True] * num_layers
    if said.layers == "later":
        first, every = config.whole("first_k_dense_replace", needed, 0), config.interval("moe_layer_freq", 1)
        moe = [layer >= first and layer % every == 0 for layer in range(num_layers)]
    elif said.layers == "not listed":
        every, dense = config.interval("decoder_sparse_step", 1), config.some_layers("mlp_only_layers")
        moe = [layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers)]
        if family.kind and not any(moe):
            return None
    shared = config.whole(said.shared, needed, 0) if said.shared else 0
    return Experts(
        num_experts=config.whole("num_local_experts" if is_new else said.number, needed),
        topk=config.whole("num_experts_per_tok", needed),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=shared * width if said.layers == "later" else shared,
        shared_gate=said.layers == "not listed" and shared > 0,
        layer_freq=1 if all(moe) else tuple(map(int, moe)),
    )


def routing(config: Entries, family: Family) -> dict[str, Any]:
    """Return the flags that say how tokens of a model with experts are routed, beside rows; `why_not` gets what
    pretrain_gpt.py does not have. Raise InvalidInputError for a value of the wrong type."""
    model_type, routers, is_hybrid = config["model_type"], family.routing, bool(family.kind)
    if routers is None:
        if model_type == "deepseek":
            config.why_not.append("model_type deepseek: transformers has no such model to compare with")
        return {}
    is_sigmoid, is_grouped = routers.score == "sigmoid", is_hybrid or config.get("topk_method") != "greedy"
    if not is_hybrid and config.get("scoring_func", routers.score) != routers.score:
        config.why_not.append(f"scoring_func {config['scoring_func']}: {model_type} has {routers.score}")
    if not is_hybrid and config.get("topk_method") not in routers.chooses:
        config.why_not.append(f"topk_method {config['topk_method']}: not known here")
    topk, groups, best = (config.number(key, 1) for key in ("num_experts_per_tok", "n_group", "topk_group"))
    summed = config.get("norm_topk_prob", is_sigmoid)
    if is_sigmoid and not (summed and topk > 1):
        ours = "megatron-core brings sigmoid scores of several experts to sum 1, and that of one not"
        why = "scores of several experts have sum 1" if is_hybrid else ours
        config.why_not.append(f"norm_topk_prob {summed} with num_experts_per_tok {topk}: {why}")
    elif summed and not is_sigmoid:
        config.why_not.append(f"norm_topk_prob true: transformers has no {model_type} with it to compare with")
    flags: dict[str, Any] = {
        "moe_router_score_function": routers.score,
        "moe_router_pre_softmax": not is_sigmoid,
        "moe_router_enable_expert_bias": is_sigmoid,
        "moe_router_topk_scaling_factor": float(config.number("routed_scaling_factor", routers.scaling)),
    }
    if 1 <= best < groups and is_grouped:
        flags |= {"moe_router_num_groups": int(groups), "moe_router_group_topk": int(best)}
        if topk // best != routers.best_of_group:
            ours = f"megatron-core chooses groups by their best {topk // best:g} experts, {model_type} by the best "
            why = "groups go by their best 2 experts" if is_hybrid else f"{ours}{routers.best_of_group}"
            config.why_not.append(f"topk_group {best:g} with num_experts_per_tok {topk:g}: {why}")
    return flags
