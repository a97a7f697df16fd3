"""How a model of a config.json sends tokens to experts. Source: the routers of transformers 5.23
(`modeling_<model_type>.py`), and megatron-core's `topk_routing_with_score_function`, which has to do the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamic_cp.models.entries import number

_SCORES = {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid"}
"""model_type -> its scores, where a config may say otherwise."""
_BEST_OF_GROUP = {"deepseek_v2": 1, "deepseek_v3": 2}
"""model_type -> number of best experts of a group by which groups are chosen."""
_CHOOSES = {
    "deepseek_v2": ("greedy", "group_limited_greedy", None),
    "deepseek_v3": ("noaux_tc", None),
}
"""model_type -> values of topk_method."""
_SCALING = {"deepseek_v2": 1.0, "deepseek_v3": 2.5}
"""model_type -> default of routed_scaling_factor, as in transformers."""


def routing(where: str, data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the flags that say how tokens are routed, and what of it pretrain_gpt.py does not have; `data` is a
    config.json of a model with experts. Raise InvalidInputError for a value of the wrong type."""
    model_type = str(data.get("model_type"))
    if model_type in _SCORES:
        return _deepseek(where, data, model_type)
    if model_type in ("mixtral", "gpt_oss"):
        return {}, []
    if model_type == "deepseek":
        return {}, ["model_type deepseek: transformers has no such model to compare with"]
    # Softmax over all experts, of which some are chosen; normalized to sum 1 it is the softmax over the chosen ones.
    return {"moe_router_pre_softmax": not data.get("norm_topk_prob", False)}, []


def _deepseek(where: str, data: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], list[str]]:
    is_sigmoid = _SCORES[model_type] == "sigmoid"
    fields: dict[str, Any] = {
        "moe_router_score_function": _SCORES[model_type],
        "moe_router_pre_softmax": not is_sigmoid,
        "moe_router_enable_expert_bias": is_sigmoid,
        "moe_router_topk_scaling_factor": float(number(where, data, "routed_scaling_factor", _SCALING[model_type])),
    }
    why_not = []
    if data.get("scoring_func", _SCORES[model_type]) != _SCORES[model_type]:
        why_not.append(f"scoring_func {data['scoring_func']}: {model_type} has {_SCORES[model_type]}")
    if data.get("topk_method") not in _CHOOSES[model_type]:
        why_not.append(f"topk_method {data['topk_method']}: not known here")
    topk = number(where, data, "num_experts_per_tok", 1)
    if is_sigmoid and not (data.get("norm_topk_prob", True) and topk > 1):
        why_not.append(
            f"norm_topk_prob {data.get('norm_topk_prob', True)} with num_experts_per_tok {topk}: megatron-core brings "
            "sigmoid scores of several experts to sum 1, and that of one not"
        )
    elif not is_sigmoid and data.get("norm_topk_prob"):
        why_not.append(f"norm_topk_prob true: transformers has no {model_type} with it to compare with")
    groups, group_topk = number(where, data, "n_group", 1), number(where, data, "topk_group", 1)
    if 1 <= group_topk < groups and data.get("topk_method") != "greedy":
        fields |= {"moe_router_num_groups": int(groups), "moe_router_group_topk": int(group_topk)}
        if topk // group_topk != _BEST_OF_GROUP[model_type]:
            why_not.append(
                f"topk_group {group_topk:g} with num_experts_per_tok {topk:g}: megatron-core chooses groups by their "
                f"best {topk // group_topk:g} experts, {model_type} by the best {_BEST_OF_GROUP[model_type]}"
            )
    return fields, why_not
