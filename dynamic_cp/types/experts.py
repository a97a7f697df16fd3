"""The experts of a model: what a token is sent to instead of one MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import counted, require_at_least

Dispatcher = Literal["alltoall", "deepep", "hybridep"]
DISPATCHERS: tuple[Dispatcher, ...] = get_args(Dispatcher)
EXPERT_IMBALANCE = 1.25
"""Tokens of the busiest rank of an EP block over the mean, where nothing else is known. An estimate: the capacity
factor of Switch Transformers (arXiv 2101.03961, section 2.2), which drops tokens beyond it."""


def layers_with_experts(layer_freq: int | Sequence[int], num_layers: int) -> tuple[bool, ...]:
    """Return whether each of `num_layers` layers has experts. `layer_freq`: as Megatron says it: with N the first of
    every N layers, or 1 (has them) and 0 (a dense MLP) for each. Raises InvalidInputError: it is of another number of
    layers, or no layer has any."""
    if not isinstance(layer_freq, Sequence):
        require_at_least(1, **{"layer_freq (--moe-layer-freq)": layer_freq})
        return tuple(layer % layer_freq == 0 for layer in range(num_layers))
    if set(layer_freq) - {0, 1} or 1 not in layer_freq:
        raise InvalidInputError(
            f"layer_freq (--moe-layer-freq) {list(layer_freq)} must be 1 (experts) or 0 (a dense MLP) for each layer, "
            "1 at least once: a model without experts has none"
        )
    if len(layer_freq) != num_layers:
        raise InvalidInputError(
            f"layer_freq (--moe-layer-freq) is of {counted(len(layer_freq), 'layer')}, the model has {num_layers}: "
            "give a number, or 1 (experts) and 0 (none) for each of them, such as [0]+[1]*3"
        )
    return tuple(map(bool, layer_freq))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed and shared experts of a model's MoE layers, in Megatron's words. Routing drops no token.

    Attributes:
        topk: routed experts that each token is sent to.
        ffn_hidden_size, shared_ffn_hidden_size: width of the inner layer of one routed expert (--moe-ffn-hidden-size),
            and of all shared experts together (--moe-shared-expert-intermediate-size), which every token meets; 0:
            none.
        shared_gate: the output of the shared experts is weighted by a gate of one number.
        layer_freq: see `layers_with_experts`.
        grouped: a rank computes its experts in grouped products (--moe-grouped-gemm, only TransformerEngine's layers);
            False: one after the other.
        num_groups, group_topk: groups of experts, of which each token is sent to some (--moe-router-num-groups,
            --moe-router-group-topk); 0: to all.
        dispatcher: how copies of tokens travel: "alltoall", each by itself, or "deepep" or "hybridep"
            (--moe-token-dispatcher-type flex, --moe-flex-dispatcher-backend), once to each node, and to each rank.
        overlapped: while another micro-batch computes (--overlap-moe-expert-parallel-comm).
        imbalance: routed tokens of the busiest rank of an EP block over the mean, >= 1; time and memory are planned for
            it.
    """

    num_experts: int
    topk: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    layer_freq: int | tuple[int, ...] = 1
    grouped: bool = True
    num_groups: int = 0
    group_topk: int = 0
    dispatcher: Dispatcher = "alltoall"
    overlapped: bool = False
    imbalance: float = EXPERT_IMBALANCE

    def __post_init__(self) -> None:
        require_at_least(1, num_experts=self.num_experts, topk=self.topk, ffn_hidden_size=self.ffn_hidden_size)
        require_at_least(0, shared_ffn_hidden_size=self.shared_ffn_hidden_size, group_topk=self.group_topk)
        if self.topk > self.num_experts:
            raise InvalidInputError(
                f"a token is sent to {self.topk} experts, a layer has {self.num_experts}: give topk "
                "(--moe-router-topk) <= num_experts (--num-experts)"
            )
        if self.dispatcher not in DISPATCHERS:
            raise InvalidInputError(f"dispatcher is {self.dispatcher!r}: use one of {', '.join(DISPATCHERS)}")
        if self.shared_gate and not self.shared_ffn_hidden_size:
            raise InvalidInputError(
                "shared_gate is true and shared_ffn_hidden_size 0: give the width of the shared experts that it "
                "weights, or neither"
            )
        if not isinstance(self.imbalance, int | float) or not 1 <= self.imbalance < inf:
            raise InvalidInputError(
                f"the imbalance of experts is {self.imbalance}, it must be a number >= 1: how many tokens the rank "
                "with most has for each of their mean"
            )
        if isinstance(self.layer_freq, list | tuple):
            object.__setattr__(self, "layer_freq", tuple(self.layer_freq))  # a list where it comes from JSON
            self.moe_layers(len(self.layer_freq))
        else:
            self.moe_layers(1)

    def moe_layers(self, num_layers: int) -> tuple[bool, ...]:
        """Return `layers_with_experts` for this layer_freq."""
        return layers_with_experts(self.layer_freq, num_layers)

    def __str__(self) -> str:
        shared = f" + shared {self.shared_ffn_hidden_size}" if self.shared_ffn_hidden_size else ""
        return f"{self.num_experts} experts of {self.ffn_hidden_size}, top {self.topk}{shared}"
