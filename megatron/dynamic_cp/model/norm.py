"""Norms of plain torch: layer norm or RMS norm, tagged for sequence parallelism, and the norm without weights.

megatron-core's own torch norm refuses sequence parallelism. torch's modules need only a tag for it: the one by which
the gradients of their parameters are summed over the tensor-parallel group.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchNorm:
    """Builds the norm that `config.normalization` names, over the last dim of size `hidden_size`.

    A class, because megatron-core takes a function in a spec for the module itself.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> torch.nn.Module:
        kind = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}[config.normalization]
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class TorchL2Norm(torch.nn.Module):
    """The norm of queries and keys that has no weights (Llama 4): the mean of squares over the last dim becomes 1.

    DEVIATION: megatron-core's is compiled. Reason: it would be compiled again in training, for lengths that are new,
    and a resumed run would compute with other kernels than the run before it. Recovery: none.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., hidden size], normalized in float32, in its own dtype."""
        exact = x.float()
        return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
