"""Experts as Megatron says them: how many, which layers have them, how tokens are routed and what balances their load.

Pure functions of flags and configurations, without torch and megatron-core. A configuration calls the number of experts
`num_moe_experts`; other names are those of flags.
"""

from __future__ import annotations

from typing import Any

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.flags import BALANCING, MEANINGS, SCORE_FUNCTIONS, ModelSettings
from dynamic_cp.models.table import flags_of
from dynamic_cp.types import Experts, is_placed, is_power_of_two, layers_with_experts

DEFAULTS: dict[str, Any] = {
    **{
        row.destination: None if "None" in row.kind else MEANINGS[row.destination].usual
        for row in flags_of(ModelSettings)
        if row.group == "experts" and row.destination != "num_experts"
    },
    "moe_token_dispatcher_type": "alltoall",
    "moe_per_layer_logging": False,
}
"""Flag -> its value if it is not given: Megatron-LM's defaults, but for the dispatcher."""
DISPATCHER = "alltoall"
WHY_NOT_PLACED = (
    "the lanes of a placed bucket know some of its samples each and have no group of their own, so nobody counts the "
    "tokens of a sequence, as that loss does"
)
_UNBALANCED = {
    "global_aux_loss": "it would depend on which micro-batches came before",
    "sinkhorn": "it would depend on what is packed together",
    "quantile_balancing": "it would depend on what is packed together",
}


def num_experts(flags: Any) -> int | None:
    """Return the number of experts of a layer that has some, by flags or a configuration; None for a dense model."""
    return getattr(flags, "num_moe_experts", None) or getattr(flags, "num_experts", None)


def experts_of(model: Any) -> Experts | None:
    """Return the experts of a model by flags or a configuration (a missing flag is off); None for a dense model."""
    count = num_experts(model)
    if not count:
        return None
    freq, ffn_hidden_size = getattr(model, "moe_layer_freq", 1), getattr(model, "moe_ffn_hidden_size", None)
    return Experts(
        num_experts=count,
        topk=getattr(model, "moe_router_topk", 2),
        ffn_hidden_size=model.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size,
        shared_ffn_hidden_size=getattr(model, "moe_shared_expert_intermediate_size", None) or 0,
        shared_gate=bool(getattr(model, "moe_shared_expert_gate", False)),
        layer_freq=freq if isinstance(freq, int) else tuple(freq),
        grouped=bool(getattr(model, "moe_grouped_gemm", False)),
    )


def aux_loss_coeff(flags: Any) -> float:
    """Return the coefficient of the load-balancing loss of a sequence, 0.0 for none: the sum of those given."""
    types, coeffs = _losses(flags)
    return sum(coeff for name, coeff in zip(types, coeffs, strict=True) if name != "none")


def may_place(flags: Any) -> bool:
    """Return whether attention may be placed: not where a loss counts the tokens of a sequence."""
    return num_experts(flags) is None or aux_loss_coeff(flags) == 0


def check_experts(flags: Any) -> None:
    """Check the flags of experts against each other; `Topology` knows which lanes can share them. Raises
    InvalidInputError: numbers that do not fit each other. Raises UnsupportedFeatureError: routing that follows the
    packing, or a dispatcher that is not built here."""
    number = num_experts(flags)
    ep_size = flags.expert_model_parallel_size or 1
    if number is None:
        if ep_size > 1:
            raise InvalidInputError(
                f"--expert-model-parallel-size {ep_size} shares out experts, and there are none: give --num-experts, "
                "or leave it out"
            )
        return
    if number < 1:
        raise InvalidInputError(
            f"--num-experts is {number}, the smallest allowed number is 1: raise it or leave it out"
        )
    layers_with_experts(flags.moe_layer_freq, flags.num_layers)
    _check_routing(flags, number)
    _check_losses(flags)
    _check_sizes(flags, number, ep_size)
    _check_parts(flags)
    exchange = getattr(flags, "cp_comm_type", None)
    if isinstance(exchange, str) and is_placed(exchange) and not may_place(flags):  # a checkout has a list
        raise UnsupportedFeatureError(
            f"--cp-comm-type {exchange} with --moe-aux-loss-coeff {flags.moe_aux_loss_coeff} is not "
            f"supported: {WHY_NOT_PLACED}: take another exchange, or leave that loss out (experts are evenly loaded "
            "with --moe-router-enable-expert-bias, too)"
        )


def _check_routing(flags: Any, number: int) -> None:
    topk, score = flags.moe_router_topk, flags.moe_router_score_function
    if not 1 <= topk <= number:
        raise InvalidInputError(
            f"--moe-router-topk is {topk}, each token can have 1 to {number} of --num-experts {number}: change one of "
            "them"
        )
    if score not in SCORE_FUNCTIONS:
        raise UnsupportedFeatureError(f"--moe-router-score-function {score} is not supported: use softmax or sigmoid")
    if topk == 1 and score == "softmax" and not flags.moe_router_pre_softmax:
        raise InvalidInputError(
            "--moe-router-topk 1 with a softmax over what was chosen gives every token the weight 1, and the router no "
            "gradient: add --moe-router-pre-softmax"
        )
    if flags.moe_router_enable_expert_bias and score != "sigmoid":
        raise InvalidInputError(
            f"--moe-router-enable-expert-bias is for --moe-router-score-function sigmoid, it is {score}: change one of "
            "them"
        )
    groups, group_topk = flags.moe_router_num_groups, flags.moe_router_group_topk
    if (groups is None) != (group_topk is None):
        raise InvalidInputError(
            f"--moe-router-num-groups is {groups} and --moe-router-group-topk {group_topk}: give both or neither"
        )
    if groups is None or group_topk is None:
        return
    if groups < 1 or number % groups:
        raise InvalidInputError(
            f"--moe-router-num-groups {groups} does not divide --num-experts {number}: change one of them"
        )
    in_group = number // groups
    if not 1 <= group_topk <= groups or topk % group_topk or topk // group_topk > in_group:
        raise InvalidInputError(
            f"--moe-router-group-topk {group_topk} of {groups} groups of {in_group} experts cannot share "
            f"--moe-router-topk {topk} evenly: give at most {groups}, of which {topk} is a multiple and which have "
            f"{topk} experts together"
        )


def _check_losses(flags: Any) -> None:
    types, coeffs = _losses(flags)
    if len(types) != len(coeffs):
        raise InvalidInputError(
            f"--moe-router-load-balancing-type has {len(types)} values and --moe-aux-loss-coeff {len(coeffs)}: give a "
            "coefficient for each"
        )
    for name in types:
        if name not in BALANCING:
            raise UnsupportedFeatureError(
                f"--moe-router-load-balancing-type {name} is not supported: "
                f"{_UNBALANCED.get(name, 'it is not known here')}; use {', '.join(BALANCING)}"
            )
    for name, values in (("--moe-aux-loss-coeff", coeffs), ("--moe-z-loss-coeff", [flags.moe_z_loss_coeff or 0.0])):
        for value in values:
            if not value >= 0:
                raise InvalidInputError(f"{name} is {value}, it must be at least 0")


def _losses(flags: Any) -> tuple[list[str], list[float]]:
    types, coeffs = flags.moe_router_load_balancing_type, flags.moe_aux_loss_coeff
    return (
        [types] if isinstance(types, str) else list(types),
        list(coeffs) if isinstance(coeffs, list | tuple) else [coeffs or 0.0],
    )


def _check_sizes(flags: Any, number: int, ep_size: int) -> None:
    if not is_power_of_two(ep_size):
        raise InvalidInputError(
            f"--expert-model-parallel-size is {ep_size}, lanes that share experts are blocks of 1, 2, 4, ...: give one "
            "of those"
        )
    if number % ep_size:
        raise InvalidInputError(
            f"--num-experts {number} is not a multiple of --expert-model-parallel-size {ep_size}: change one of them"
        )
    tp_size, expert_tp_size = flags.tensor_model_parallel_size, flags.expert_tensor_parallel_size
    if expert_tp_size not in (None, 1):
        raise UnsupportedFeatureError(
            f"--expert-tensor-parallel-size {expert_tp_size} is not supported: experts are shared out whole; give 1"
        )
    if tp_size > 1 and not flags.sequence_parallel:
        raise InvalidInputError(
            f"--tensor-model-parallel-size {tp_size} with experts needs --sequence-parallel, without which every rank "
            "would route all tokens: add it"
        )


def _check_parts(flags: Any) -> None:
    dispatcher = flags.moe_token_dispatcher_type
    if dispatcher != DISPATCHER:
        raise UnsupportedFeatureError(
            f"--moe-token-dispatcher-type {dispatcher} is not supported: lanes have unlike numbers of tokens; use "
            f"{DISPATCHER}"
        )
    if flags.moe_shared_expert_intermediate_size is None and flags.moe_shared_expert_gate:
        raise InvalidInputError(
            "--moe-shared-expert-gate is for a shared expert: give --moe-shared-expert-intermediate-size, or leave it "
            "out"
        )
