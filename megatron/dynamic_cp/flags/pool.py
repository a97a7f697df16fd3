"""The pool as flags say it: servers of all pipeline stages compute attention; what it is not run together with.

Pure functions of flags; neither torch nor megatron-core is needed. What a configuration must be like besides,
`step.ticks` says.
"""

from __future__ import annotations

from typing import Any

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import PoolUse
from megatron.dynamic_cp.flags import experts, fp8
from megatron.dynamic_cp.flags.pipeline_layers import FLAGS, is_given
from megatron.dynamic_cp.flags.windows import windows_of

FLAG = "--dynamic-cp-pool"
_AS_MANY = "all stages run as many layers, one beside the other"
_UNTRIED = "it was not tried with one"


def check_pool(args: Any) -> PoolUse:
    """Return the use of the pool that the flags ask for, once nothing else of them stands in its way.

    Args:
        args: of this trainer or of a checkout.

    Raises:
        UnsupportedFeatureError: something does; the message names its flag and the value with which the pool runs.
    """
    use: PoolUse = args.dynamic_cp_pool
    if use == "off":
        return use
    pp_size = args.pipeline_model_parallel_size
    uneven = next((flag for flag in FLAGS if is_given(args, flag)), "")
    recomputed = args.recompute_method, args.recompute_num_layers
    impl, softmax = getattr(args, "transformer_impl", None), getattr(args, "softmax_type", "vanilla")
    for is_on, what, wanted, why in (
        (not args.dynamic_cp, "--dynamic-cp off", "on", "other policies have one CP size for all samples"),
        (pp_size < 2, f"--pipeline-model-parallel-size {pp_size}", "at least 2", "it has servers of all stages"),
        (bool(uneven), uneven, "off", _AS_MANY),
        (
            experts.num_experts(args) is not None,
            f"--num-experts {experts.num_experts(args)}",
            "0",
            "stages without a micro-batch have no tokens for experts",
        ),
        (bool(getattr(args, "mtp_num_layers", None)), "--mtp-num-layers", "0", _AS_MANY),
        (bool(getattr(args, "multi_latent_attention", False)), "--multi-latent-attention", "off", _UNTRIED),
        (windows_of(args).are_there, "--window-size", "off", _UNTRIED),
        (softmax != "vanilla", f"--softmax-type {softmax}", "vanilla", _UNTRIED),
        (fp8.is_on(args), fp8.FLAG, "off", "it is for layers of TransformerEngine, whose attention is not placed"),
        (fp8.is_on(args), "--fp8-format", "off", "TransformerEngine's layers alone have it"),
        (impl == "transformer_engine", f"--transformer-impl {impl}", "local", "its attention is not placed"),
        (
            args.recompute_granularity == "full" and recomputed not in ((None, None), ("uniform", 1)),
            f"--recompute-method {recomputed[0]} --recompute-num-layers {recomputed[1]}",
            "uniform and 1",
            "all ranks recompute layer by layer",
        ),
        (
            args.dynamic_cp_refine > 0,
            f"--dynamic-cp-refine {args.dynamic_cp_refine}",
            "0",
            "the times of micro-batches in ticks are those of all stages",
        ),
    ):
        if is_on:
            raise UnsupportedFeatureError(
                f"{FLAG} {use} does not run with {what}, {wanted} is possible: {why}; change it, or leave {FLAG} out",
                flag=FLAG,
            )
    return use
