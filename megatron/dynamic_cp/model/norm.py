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
        kinds: dict[str, type[torch.nn.Module]] = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        if config.fp32_residual_connection:
            kinds = {"RMSNorm": _RMSNormOfFloat32, "LayerNorm": _LayerNormOfFloat32}
        if config.layernorm_zero_centered_gamma:
            kinds = {"RMSNorm": _CenteredRMSNorm, "LayerNorm": _CenteredLayerNorm}
        kind = kinds[config.normalization]
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class _RMSNormOfFloat32(torch.nn.RMSNorm):
    """Computes in the dtype of its input; its output has that of its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype)
        return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps).to(self.weight.dtype)


class _LayerNormOfFloat32(torch.nn.LayerNorm):
    """As `_RMSNormOfFloat32`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return torch.nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


class _CenteredRMSNorm(torch.nn.RMSNorm):
    """Multiplies by 1 + weight, which begins with 0; computes in float32 at least, and gives what matrices take."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(exact)
        return torch.nn.functional.rms_norm(x.to(exact), self.normalized_shape, scale, self.eps).to(self.weight.dtype)


class _CenteredLayerNorm(torch.nn.LayerNorm):
    """As `_CenteredRMSNorm`."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        scale, bias = 1 + self.weight.to(exact), self.bias.to(exact)
        normed = torch.nn.functional.layer_norm(x.to(exact), self.normalized_shape, scale, bias, self.eps)
        return normed.to(self.weight.dtype)


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
