"""The groups that a model was built with are megatron-core's own."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from dynamic_cp.errors import UnsupportedFeatureError

_NAMES = ("tp", "cp", "pp", "ep", "expt_tp")


def check_groups(given: ProcessGroupCollection | None) -> None:
    """Check the groups that a layer is built with, if it is given any.

    CP groups and plans follow megatron-core's own, and so does some of its code, whatever a model was given: masks of
    padding, recomputed activations and cross-attention would be those of other ranks, without a word.

    Raises:
        UnsupportedFeatureError: one of them has other ranks than megatron-core's.
    """
    if given is None:
        return
    own = ProcessGroupCollection.use_mpu_process_groups([name for name in _NAMES if hasattr(given, name)])
    for name in _NAMES:
        group, expected = getattr(given, name, None), getattr(own, name, None)
        if group is None or group is expected:
            continue
        ranks = _ranks_of(group)
        if ranks != _ranks_of(expected):
            raise UnsupportedFeatureError(
                f"the model's pg_collection.{name} has the ranks {ranks}, megatron-core's own group of this rank "
                f"{_ranks_of(expected)}: leave pg_collection out, or initialize_model_parallel with the layout of the "
                "model",
                field=f"pg_collection.{name}",
            )


def _ranks_of(group: Any) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)
