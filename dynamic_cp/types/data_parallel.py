"""What is trained, and how lanes share its gradients and the state of its optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.adapters import Adapters
from dynamic_cp.types.state import FP32_STATE, StateDtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """What a training job does with gradients and optimizer state, as Megatron-Core's flags of these names set it.

    Attributes:
        distributed_optimizer: its state is sharded over the lanes.
        overlap_grad_reduce: gradients are reduced bucket by bucket during the last backward pass.
        overlap_param_gather: parameters are gathered bucket by bucket during the first forward pass.
        state: dtypes of gradients and of the optimizer's state.
        adapters: all that is trained, where the model's own weights are frozen.
    """

    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    state: StateDtypes = FP32_STATE
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise InvalidInputError(
                "overlap_param_gather needs distributed_optimizer and overlap_grad_reduce: set both, or leave it out"
            )
        if self.state.use_precision_aware_optimizer and not self.distributed_optimizer:
            raise InvalidInputError(
                "--use-precision-aware-optimizer needs an optimizer whose state the lanes share: use the distributed "
                "optimizer, or leave it out"
            )


SHARDED = DataParallel(overlap_grad_reduce=True, overlap_param_gather=True)
"""A job that shards the optimizer, with its collectives beside the passes: what command and functions take where
nothing else is said, as the lines have it that a sweep prints. Megatron-LM's flags are off where they are not given."""
