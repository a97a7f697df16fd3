"""Layer norm or RMS norm of plain torch, tagged for sequence parallelism.

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
