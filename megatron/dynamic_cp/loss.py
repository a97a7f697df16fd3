"""The documented path of `forward_step`, which is in `step/loss.py`."""

from megatron.dynamic_cp.step.loss import forward_step

__all__ = ["forward_step"]
