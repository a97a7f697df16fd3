"""Small parts of a layer in plain torch: norms, activations, the residual stream, factors behind attention and MLPs.

megatron-core's own torch norm refuses sequence parallelism. torch's modules need only a tag for it, by which the
gradients of their parameters are summed over the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron.dynamic_cp.flags.features import changed_outputs

_Added = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]
_Change = Callable[[Tensor], Tensor]


class TorchNorm:
    """Builds the norm that `config.normalization` names, over the last dim of size `hidden_size`. It is a class,
    because megatron-core takes a function in a spec for the module itself."""

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
    """Multiplies by 1 + weight, which begins with 0; computes in float32 at least, and returns the weight's dtype."""

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

    DEVIATION: megatron-core's is compiled. Reason: new lengths would compile it again in training, and a resumed run
    would compute with other kernels than the run before it. Recovery: none.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., hidden size], normalized in float32, in its own dtype."""
        exact = x.float()
        return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def quick_gelu(x: Tensor) -> Tensor:
    """Return x times the sigmoid of 1.702 x, which is close to GELU; in gated MLPs as of gpt-oss.

    DEVIATION: megatron-core's is compiled. Reason: as of `TorchL2Norm`. Recovery: none.

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


def add_to_residual(training: bool, _fused: bool) -> _Added:
    """Return the function that adds the output of attention or MLP to a residual stream in float32. It is
    `get_bias_dropout_add` of layer specs for --fp32-residual-connection: what is added is rounded, the stream is
    not. megatron-core 0.16.1 rounds the stream in each addition. Norms read float32 and give what matrices take
    (`TorchNorm`)."""

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        x = x.to(residual.dtype) if bias is None else x.to(residual.dtype) + bias.to(residual.dtype)
        return residual + torch.nn.functional.dropout(x, p=prob, training=training)

    return add


def change_outputs(chunk: Any, flags: Any) -> None:
    """Hook norms and factors behind parts of a model chunk, where `flags` say so (`flags.features`). A layer keeps
    these norms as `post_self_attn_layernorm` and `post_mlp_layernorm`, also in checkpoints. The configuration has
    the factor of attention's scores."""
    said, config = changed_outputs(flags), chunk.config
    for layer in chunk.decoder.layers:
        for name, part in (("post_self_attn_layernorm", layer.self_attention), ("post_mlp_layernorm", layer.mlp)):
            if "sandwich_norm" in said:
                norm = TorchNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
                setattr(layer, name, norm)
                _change_branch(part, norm)
            if "residual_multiplier" in said:
                _change_branch(part, _times(said["residual_multiplier"]))
    if "embedding_multiplier" in said and chunk.pre_process:
        _change(chunk.embedding, _times(said["embedding_multiplier"]))
    if "logits_scaling" in said and chunk.post_process:
        _change(chunk.decoder.final_layernorm, _times(1 / said["logits_scaling"]))  # logits are linear in its output


def _times(factor: float) -> _Change:
    return lambda output: output * factor


def _change(part: nn.Module, change: _Change) -> None:
    part.register_forward_hook(lambda _module, _inputs, output: change(output))


def _change_branch(part: nn.Module, change: _Change) -> None:
    """Change what attention or an MLP adds to the residual: its output and a bias that is not yet added."""

    def hook(_module: nn.Module, _inputs: Any, returned: tuple[Tensor, Tensor | None]) -> tuple[Tensor, None]:
        output, bias = returned
        return change(output if bias is None else output + bias), None

    part.register_forward_hook(hook)
