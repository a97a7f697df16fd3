"""Norms and factors of what parts of a model put out (`flags.layer_outputs`), as hooks of the parts that are there.

A layer keeps its norms beside its parts, as `post_self_attn_layernorm` and `post_mlp_layernorm`, also in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megatron.dynamic_cp.flags.layer_outputs import choices
from megatron.dynamic_cp.model.norm import TorchNorm

_Change = Callable[[Tensor], Tensor]


def change_outputs(chunk: Any, flags: Any) -> None:
    """Have a model chunk do what `flags` say; scores of attention have their factor from its configuration."""
    said, config = choices(flags), chunk.config
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
