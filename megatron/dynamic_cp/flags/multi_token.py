"""Multi-token prediction as Megatron-LM's flags say it, and what it is not trained together with.

Pure functions of flags and configurations; neither torch nor megatron-core is needed.
"""

from __future__ import annotations

from typing import Any

from dynamic_cp.errors import InvalidInputError
from megatron.dynamic_cp.flags.exclusions import MODULES, refuse_pairs

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
        raise InvalidInputError(f"{MODULES} is {depths}, it must be at least 0", mtp_num_layers=depths)
    if not depths:
        return
    factor = config.mtp_loss_scaling_factor
    if factor is None or not 0 < factor < float("inf"):
        raise InvalidInputError(
            f"--mtp-loss-scaling-factor is {factor}, it must be greater than 0: leave {MODULES} out for no such loss",
            mtp_loss_scaling_factor=factor,
        )
    refuse_pairs(MODULES, config, value=depths)
