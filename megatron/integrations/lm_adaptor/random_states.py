"""The random states of all lanes in Megatron-LM's checkpoints, which have those of the first lane.

Lanes with equal shapes draw the same number of random numbers, so one state serves all of them. With dynamic CP each
lane computes different tokens, so its dropout continues from its own state. These states are added under a name that
Megatron-LM does not read.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

LANES = "dynamic_cp_lanes"
DRAWN_FROM = ("torch_rng_state", "cuda_rng_state", "rng_tracker_states")
"""What a forward pass draws from."""


def add_lanes(states: Any, lanes: dist.ProcessGroup) -> None:
    """Add the states of all lanes to what Megatron-LM saves as a rank's `rng_state`. Collective over the lanes.

    Args:
        states: [state], or a ShardedObject of that.
    """
    (state,) = getattr(states, "data", states)
    every: list[Any] = [None] * lanes.size()
    dist.all_gather_object(every, {name: state[name] for name in DRAWN_FROM}, group=lanes)
    state[LANES] = every


def choose_lane(checkpoint: dict[str, Any], lane: int, num_lanes: int) -> None:
    """Have Megatron-LM go on with the random states of `lane`, where a checkpoint has them for as many lanes.

    Args:
        checkpoint: as it was loaded; its `rng_state` is about to be set.
    """
    if "rng_state" not in checkpoint:
        return
    (state,) = checkpoint["rng_state"]
    saved = state.get(LANES, ())
    if len(saved) == num_lanes:
        state.update(saved[lane])
    elif lane == 0:
        logger.warning(
            "the checkpoint has the random states of %d lanes, this run has %d: dropout differs from now on",
            max(1, len(saved)),
            num_lanes,
        )
