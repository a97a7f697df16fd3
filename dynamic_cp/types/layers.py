"""Transformer layers by what they cost, and the stages of a pipeline that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dynamic_cp.types.linear_attention import LinearAttention
from dynamic_cp.types.masks import Causal, Full, Lambda


class Layer(NamedTuple):
    """One transformer layer, whatever it is made of: dense or with experts, any attention, or a half of it.

    Attributes:
        linear_weights: weights of the matrices that a token meets, without biases and norms; with experts those of the
            experts that it is sent to.
        held_weights: weights of its matrices but those of routed experts; the TP ranks share them.
        norm_weights: weights that every TP rank has: norms, a router.
        mlp_kept_channels: channels of a token that its MLP or its shared experts keep for backward, which the TP ranks
            share.
        more_kept_channels: channels that it keeps beyond those of a plain layer, which only sequence parallelism splits
            over the TP ranks.
        num_attention_heads, query_size: query heads, and how wide they are together.
        kv_channels, kv_size: width of one KV head, and of all key heads together (as wide again for the values).
        value_size: width of what all heads find, of the values' own width; 0: as query_size.
        latent_size: channels of a token that keys and values of all heads are projected up from, the rotated key that
            they share among them; 0: without latent attention.
        up_weights: those of linear_weights that project them up.
        linear_attention: what it has in the place of attention, of which all sizes are then 0; None: attention.
        halves: 2; 1 where it is a mixer or an MLP alone, as in the pattern of a hybrid.
        gate_size: width of the gate that what attention finds is multiplied by; 0: none.
        mlp_weights: those of linear_weights that are its dense MLP's.
        mask: of its attention; a window is there in the densities of samples (`ModelShape.density`).
        num_experts: its routed experts; 0: it has a dense MLP.
        expert_weights: those of linear_weights that are of routed experts, all that a token is sent to together.
        held_expert_weights: weights of all routed experts, which the ranks of an EP block share.
        moe_weights: those of linear_weights that are of the router and of shared experts.
        routed_channels: channels of a token that travel to experts, once for each that it is sent to.
        routed_kept_channels: channels that these copies keep for backward where they are computed, all of a token
            together.
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
        """Return it with linear attention in the place of its attention, whose projections have these weights."""
        more = linear.weights(hidden_size) - attention_weights
        return self._without_attention()._replace(
            linear_weights=self.linear_weights + more,
            held_weights=self.held_weights + more + linear.small_weights,
            linear_attention=linear,
        )

    def mixer_alone(self, norm_weights: int) -> Layer:
        """Return a dense layer without its MLP and the norm before that."""
        return self._replace(
            linear_weights=self.linear_weights - self.mlp_weights,
            held_weights=self.held_weights - self.mlp_weights,
            norm_weights=self.norm_weights - norm_weights,
            mlp_kept_channels=0,
            mlp_weights=0,
            halves=1,
        )

    def mlp_alone(self, attention_weights: int, norm_weights: int) -> Layer:
        """Return it without its attention, whose projections have these weights, and the norm before that."""
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
        """Whether its tokens meet in pairs."""
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
        """The same with values that are padded to the width of keys, as kernels compute them."""
        return 4 * self.query_size * self.mask.pairs_per_token2


class Stage(NamedTuple):
    """What a pipeline stage computes besides embedding and LM head; modules of multi-token prediction are layers.

    Attributes:
        layers: (how many, of which kind), all of its model chunks together; not whole numbers where PP does not divide
            the layers.
    """

    layers: tuple[tuple[float, Layer], ...]

    @property
    def num_layers(self) -> float:
        """Layers of all kinds."""
        return sum(number for number, _ in self.layers)

    @property
    def attention(self) -> Stage:
        """Its layers with attention alone."""
        return self._of(lambda layer: layer.has_attention)

    @property
    def linear_attention(self) -> Stage:
        """Its layers with linear attention alone."""
        return self._of(lambda layer: layer.linear_attention is not None)

    def _of(self, is_one: Callable[[Layer], bool]) -> Stage:
        return Stage(tuple(one for one in self.layers if is_one(one[1])))

    @property
    def by_mask(self) -> tuple[Stage, ...]:
        """Its layers of each mask alone, in the order of `layers`."""
        masks = dict.fromkeys(layer.mask for _, layer in self.layers)
        return tuple(Stage(tuple(one for one in self.layers if one[1].mask == mask)) for mask in masks)

    def sum(self, of: Callable[[Layer], float]) -> float:
        """Return the sum over its layers of what `of` says of one."""
        return sum(number * of(layer) for number, layer in self.layers)
