"""Activations of MLPs that megatron-core has compiled only: see `norm.TorchL2Norm`."""

from __future__ import annotations

import torch
from torch import Tensor


def quick_gelu(x: Tensor) -> Tensor:
    """Return x times the sigmoid of 1.702 x, which is close to GELU; in gated MLPs as of gpt-oss.

    DEVIATION: megatron-core's is compiled. Reason: as of `norm.TorchL2Norm`. Recovery: none.

    Source: Hendrycks and Gimpel 2016 (arXiv 1606.08415), section 2.
    """
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    """Return GELU of x in its form with tanh; in gated MLPs as of Gemma."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """Return the square of what is positive of x; as in Nemotron.

    DEVIATION, Reason, Recovery: as of `quick_gelu`.

    Source: So et al. 2021 (arXiv 2109.08668), section 4.2.
    """
    return torch.relu(x).square()
