"""Multi-token prediction as Megatron-LM's flags say it, and what it is not trained together with.

Pure functions of flags and configurations; neither torch nor megatron-core is needed.
"""

from __future__ import annotations

from typing import Any

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError

FLAG = "--mtp-num-layers"
FUTURE_LOSS = "mtp_{} loss"
"""What the loss of a depth is called in logs, as Megatron-LM calls it."""


def check_multi_token(config: Any) -> None:
    """Refuse what was not checked together with multi-token prediction.

    Args:
        config: flags or a configuration.

    Raises:
        InvalidInputError: numbers that cannot be.
        UnsupportedFeatureError: another feature, which the message names.
    """
    depths = getattr(config, "mtp_num_layers", None)
    if depths is not None and depths < 0:
        raise InvalidInputError(f"{FLAG} is {depths}, it must be at least 0", mtp_num_layers=depths)
    if not depths:
        return
    factor = config.mtp_loss_scaling_factor
    if factor is None or not 0 < factor < float("inf"):
        raise InvalidInputError(
            f"--mtp-loss-scaling-factor is {factor}, it must be greater than 0: leave {FLAG} out for no such loss",
            mtp_loss_scaling_factor=factor,
        )
    recomputes = getattr(config, "recompute_granularity", None) == "full"
    method, number = (getattr(config, name, None) for name in ("recompute_method", "recompute_num_layers"))
    has_pipeline = config.pipeline_model_parallel_size > 1
    # A configuration does not say how positions are embedded; flags do.
    learns_positions = getattr(config, "position_embedding_type", None) == "learned_absolute"
    for is_on, what, why in (
        (
            getattr(config, "window_size", None) is not None,
            "--window-size",
            "which modules have one is not the same in all releases of megatron-core",
        ),
        (bool(getattr(config, "no_rope_freq", None)), "--no-rope-freq", "it says nothing of layers behind the last"),
        (
            bool(getattr(config, "fp32_residual_connection", False)),
            "--fp32-residual-connection",
            "what the modules project is rounded",
        ),
        (
            recomputes and (method, number) not in ((None, None), ("uniform", 1)),
            f"--recompute-method {method} --recompute-num-layers {number}",
            "megatron-core recomputes its modules one at a time only (uniform and 1)",
        ),
        (
            learns_positions and has_pipeline,
            f"--position-embedding-type learned_absolute --pipeline-model-parallel-size "
            f"{config.pipeline_model_parallel_size}",
            "the last stage would learn positions of its own",
        ),
    ):
        if is_on:
            raise UnsupportedFeatureError(
                f"{FLAG} {depths} with {what} is not supported: {why}; leave one of them out", flag=FLAG, other=what
            )


MODULES = frozenset({"mtp_num_layers"})
"""All names that `modules_of` may return."""


def modules_of(flags: Any) -> dict[str, Any]:
    """Return what checkpoints must share of the modules: name -> JSON value, nothing where there are none."""
    depths = getattr(flags, "mtp_num_layers", None)
    return {"mtp_num_layers": depths} if depths else {}
