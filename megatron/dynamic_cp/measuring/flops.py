"""Model FLOPs of a step from true sequence lengths: padding is not work."""

from __future__ import annotations

from dynamic_cp.pricing.flops import batch_flops
from dynamic_cp.types import ModelShape


def training_flops(model: ModelShape, seqlen_sum: int, seqlen_squared_sum: int) -> float:
    """Return the FLOPs of forward and backward of sequences with these sums of S and S^2, recomputation not counted."""
    return batch_flops(model, seqlen_sum, seqlen_squared_sum).model_flops
