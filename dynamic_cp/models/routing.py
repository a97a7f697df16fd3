"""The experts of a model of a config.json, and how it sends tokens to them. Source: the routers of transformers 5.23
(`modeling_<model_type>.py`), and megatron-core's `topk_routing_with_score_function`, which has to do the same."""

from __future__ import annotations

from typing import Any

from dynamic_cp.models.entries import SIZES, Entries
from dynamic_cp.models.families import Family
from dynamic_cp.types import Experts


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
