"""How lanes share gradients, parameters and the state of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from dynamic_cp.errors import InvalidInputError

_ELEMENT_BYTES = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """What a training job does with gradients and optimizer state, as Megatron-Core's flags of these names set it.

    Attributes:
        distributed_optimizer: its state is sharded over the lanes.
        overlap_grad_reduce: gradients are reduced bucket by bucket during the last backward pass.
        overlap_param_gather: parameters are gathered bucket by bucket during the first forward pass.
        gradient_bytes: of an element of the gradients that are kept and reduced, 2 or 4.
    """

    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    gradient_bytes: int = 4

    def __post_init__(self) -> None:
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise InvalidInputError(
                "overlap_param_gather needs distributed_optimizer and overlap_grad_reduce: set both, or leave it out"
            )
        if self.gradient_bytes not in _ELEMENT_BYTES:
            raise InvalidInputError(
                f"gradient_bytes is {self.gradient_bytes}, gradients have 2 bytes (bf16) or 4 (fp32)",
                gradient_bytes=self.gradient_bytes,
            )


SHARDED = DataParallel()
"""A job that shards the optimizer, and overlaps nothing with its collectives."""
