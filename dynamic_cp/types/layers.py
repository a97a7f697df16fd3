"""Transformer layers by what they cost, and the stages of a pipeline that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dynamic_cp.types.masks import Causal, Full, Lambda


class Layer(NamedTuple):
    """One transformer layer, whatever it is made of: dense or with experts, any attention.

    Attributes:
        linear_weights: weights of the matrices that a token meets, without biases and norms; with experts those of the
            experts that it is sent to.
        held_weights: weights of all its matrices, which the TP ranks share.
        norm_weights: weights that every TP rank has.
        mlp_kept_channels: channels of a token that its MLP keeps for backward, which the TP ranks share.
        num_attention_heads, query_size: query heads, and how wide they are together.
        kv_channels, kv_size: width of one KV head, and of all key heads together (as wide again for the values).
        gate_size: width of the gate that what attention finds is multiplied by; 0: none.
        mlp_weights: those of linear_weights that are its MLP's.
        mask: of its attention; a window is there in the densities of samples (`ModelShape.density`).
    """

    linear_weights: int
    held_weights: int
    norm_weights: int
    mlp_kept_channels: int
    num_attention_heads: int
    query_size: int
    kv_channels: int
    kv_size: int
    mask: Causal | Full | Lambda
    gate_size: int = 0
    mlp_weights: int = 0

    @property
    def attention_flops_per_token2(self) -> float:
        """Forward FLOPs of its attention per squared token: scores and values, 2 for each channel of a pair."""
        return 4 * self.query_size * self.mask.pairs_per_token2


class Stage(NamedTuple):
    """What a pipeline stage computes besides embedding and LM head.

    Attributes:
        layers: (how many, of which kind), all of its model chunks together; not whole numbers where PP does not divide
            the layers.
    """

    layers: tuple[tuple[float, Layer], ...]

    @property
    def num_layers(self) -> float:
        """Layers of all kinds."""
        return sum(number for number, _ in self.layers)

    def sum(self, of: Callable[[Layer], float]) -> float:
        """Return the sum over its layers of what `of` says of one."""
        return sum(number * of(layer) for number, layer in self.layers)
