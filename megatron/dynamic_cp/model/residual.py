"""The residual stream in float32 (--fp32-residual-connection): what attention and MLP add to it is rounded, it is not.

megatron-core 0.16.1 rounds the residual in each addition, so that of the flag only the embedding is left; since 0.17 it
does not. Here it is so with every release. Norms read float32 and give what matrices take (`norm.TorchNorm`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_Added = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def add_to_residual(training: bool, _fused: bool) -> _Added:
    """Return the function that adds the output of attention or MLP; in a layer spec as `get_bias_dropout_add`."""

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        x = x.to(residual.dtype) if bias is None else x.to(residual.dtype) + bias.to(residual.dtype)
        return residual + torch.nn.functional.dropout(x, p=prob, training=training)

    return add
