"""Transformer layers by what they cost, and the stages of a pipeline that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dynamic_cp.types.linear_attention import LinearAttention
from dynamic_cp.types.masks import Causal, Full, Lambda


class Layer(NamedTuple):
    """One transformer layer by its cost: dense or with experts, with any attention, or only a mixer or an MLP.

    Attributes:
        linear_weights: weights of the matrices that a token meets (of its experts only), without biases and norms.
            Parts: up_weights (project latents up), mlp_weights (dense MLP), expert_weights (routed experts of a token),
            moe_weights (router and shared experts).
        held_weights, norm_weights: weights of all matrices but routed experts, which TP ranks share; weights that every
            TP rank has: norms, a router.
        mlp_kept_channels: channels per token that the MLP or shared experts keep for backward; TP ranks share them.
        more_kept_channels: the same beyond those of a plain layer; only sequence parallelism splits them over TP ranks.
        query_size, kv_size, gate_size: width of all query heads, of all key heads (as wide again for the values), and
            of the gate that multiplies the attention output (0: none).
        kv_channels: width of one KV head.
        value_size: width of the attention outputs of all heads where values have their own width; 0: query_size.
        latent_size: channels per token of the latents of keys and values, and of the shared rotated key; 0: none.
        linear_attention: what replaces attention, whose sizes are then 0; None: attention.
        halves: 2; 1 for a mixer or an MLP alone, as in the pattern of a hybrid.
        mask: of its attention; a window shows in the densities of samples (`ModelShape.density`).
        num_experts, held_expert_weights: routed experts (0: a dense MLP), and all their weights, which EP ranks share.
        routed_channels, routed_kept_channels: channels per token that travel to experts, once per expert, and that all
            these copies keep for backward where they are computed.
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
    num_experts: int = 0
    expert_weights: int = 0
    held_expert_weights: int = 0
    moe_weights: int = 0
    routed_channels: int = 0
    routed_kept_channels: int = 0
    more_kept_channels: int = 0
    value_size: int = 0
    latent_size: int = 0
    up_weights: int = 0
    linear_attention: LinearAttention | None = None
    halves: int = 2

    def with_linear_attention(self, linear: LinearAttention, attention_weights: int, hidden_size: int) -> Layer:
        """Return the layer with linear attention in place of attention with projections of `attention_weights`."""
        more = linear.weights(hidden_size) - attention_weights
        return self._without_attention()._replace(
            linear_weights=self.linear_weights + more,
            held_weights=self.held_weights + more + linear.small_weights,
            linear_attention=linear,
        )

    def mixer_alone(self, norm_weights: int) -> Layer:
        """Return a dense layer without its MLP and the norm before the MLP."""
        return self._replace(
            linear_weights=self.linear_weights - self.mlp_weights,
            held_weights=self.held_weights - self.mlp_weights,
            norm_weights=self.norm_weights - norm_weights,
            mlp_kept_channels=0,
            mlp_weights=0,
            halves=1,
        )

    def mlp_alone(self, attention_weights: int, norm_weights: int) -> Layer:
        """Return the layer without attention (whose projections have `attention_weights`) and the norm before it."""
        return self._without_attention()._replace(
            linear_weights=self.linear_weights - attention_weights,
            held_weights=self.held_weights - attention_weights,
            norm_weights=self.norm_weights - norm_weights,
            halves=1,
        )

    def _without_attention(self) -> Layer:
        return self._replace(num_attention_heads=0, query_size=0, kv_channels=0, kv_size=0, value_size=0, gate_size=0)

    @property
    def has_attention(self) -> bool:
        """Whether it has attention over pairs of tokens."""
        return self.query_size > 0

    @property
    def values_over_keys(self) -> float:
        """Width of a head's values over that of its keys."""
        return self.value_size / self.query_size if self.value_size else 1.0

    @property
    def attention_flops_per_token2(self) -> float:
        """Forward FLOPs of its attention per squared token: scores and values, 2 for each channel of a pair."""
        return 2 * (self.query_size + (self.value_size or self.query_size)) * self.mask.pairs_per_token2

    @property
    def kernel_flops_per_token2(self) -> float:
        """The same with values padded to the width of keys, as kernels compute them."""
        return 4 * self.query_size * self.mask.pairs_per_token2


class Stage(NamedTuple):
    """What a pipeline stage computes besides embedding and LM head; modules of multi-token prediction are layers.
    `layers`: (how many, of which kind), all of its model chunks together; not whole numbers where PP does not divide
    the layers."""

    layers: tuple[tuple[float, Layer], ...]

    @property
    def num_layers(self) -> float:
        """Number of layers of all kinds."""
        return sum(number for number, _ in self.layers)

    @property
    def attention(self) -> Stage:
        """Only its layers with attention."""
        return self._of(lambda layer: layer.has_attention)

    @property
    def linear_attention(self) -> Stage:
        """Only its layers with linear attention."""
        return self._of(lambda layer: layer.linear_attention is not None)

    def _of(self, is_one: Callable[[Layer], bool]) -> Stage:
        return Stage(tuple(one for one in self.layers if is_one(one[1])))

    @property
    def by_mask(self) -> tuple[Stage, ...]:
        """Its layers, one stage per mask, in the order of `layers`."""
        masks = dict.fromkeys(layer.mask for _, layer in self.layers)
        return tuple(Stage(tuple(one for one in self.layers if one[1].mask == mask)) for mask in masks)

    def sum(self, of: Callable[[Layer], float]) -> float:
        """Return the sum of `of` over its layers."""
        return sum(number * of(layer) for number, layer in self.layers)


PipelineLayers = tuple[tuple[int, ...], ...]
"""[stage][model chunk] -> layers; (): the same number everywhere."""
