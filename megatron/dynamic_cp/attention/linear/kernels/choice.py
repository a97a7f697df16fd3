"""Which kernel computes linear attention: torch's products of matrices on CPUs, flash-linear-attention on GPUs."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import LinearAttention
from megatron.dynamic_cp.attention.linear.kernels import fla
from megatron.dynamic_cp.attention.linear.kernels.kernel import LinearKernel
from megatron.dynamic_cp.attention.linear.kernels.portable import PORTABLE

logger = logging.getLogger(__name__)


@lru_cache
def choose_linear_kernel(device: torch.device, sizes: LinearAttention) -> LinearKernel:
    """Return the kernel of linear attention on `device` and log why, once; called at start-up, too, to end there.

    Raises:
        UnsupportedFeatureError: on a GPU, flash-linear-attention is missing or cannot do it.
    """
    if device.type == "cpu":
        logger.info("linear attention kernel %s: on the CPU", PORTABLE.name)
        return PORTABLE
    obstacle = fla.why_not(device, sizes)
    if obstacle is not None:
        raise UnsupportedFeatureError(f"layers of linear attention find no kernel: flash-linear-attention {obstacle}")
    logger.info("linear attention kernel %s: on %s", fla.FLA.name, torch.cuda.get_device_name(device))
    return fla.FLA
