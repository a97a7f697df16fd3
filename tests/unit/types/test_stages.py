"""Stages of unlike layers: prices, memory and FLOPs are sums over the layers that a stage says it has."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.flops import batch_flops
from dynamic_cp.types import FULL, Layer, ModelShape, PlanOptions, Stage, Topology
from tests.unit.support import CURVED_HARDWARE, TINY_MODEL

OPTIONS = PlanOptions(max_tokens_per_rank=256)
EXPERTS = TINY_MODEL.layer._replace(linear_weights=300_000, held_weights=2_000_000, mlp_kept_channels=1500)
"""A layer that holds more weights than a token meets."""
NOT_CAUSAL = TINY_MODEL.layer._replace(mask=FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(ModelShape):
    """A model whose layers are `kinds`, evenly over the stages unless `first` of them are on the first one."""

    kinds: tuple[Layer, ...]
    first: int | None = None

    def stages(self, pp_size: int) -> tuple[Stage, ...]:
        if pp_size == 1:
            return (Stage(tuple((1, layer) for layer in self.kinds)),)
        first = len(self.kinds) // 2 if self.first is None else self.first
        return tuple(Stage(tuple((1, one) for one in part)) for part in (self.kinds[:first], self.kinds[first:]))


def mixed(*kinds: Layer, first: int | None = None) -> Mixed:
    numbers = {name: getattr(TINY_MODEL, name) for name in ModelShape.__dataclass_fields__}
    return Mixed(**{**numbers, "num_layers": len(kinds)}, kinds=kinds, first=first)


def only(layer: Layer, number: int) -> Mixed:
    return mixed(*(layer,) * number)


def cost(model: ModelShape, cp_size: int = 4, pp_size: int = 1):
    topology = Topology(num_lanes=4, pp_size=pp_size)
    return CostModel(model, CURVED_HARDWARE, topology, OPTIONS).cost(cp_size, 0, 512, 512 * 200, "p2p")


@pytest.mark.parametrize("cp_size", [1, 4])
def test_equal_layers_cost_what_the_model_does(cp_size):
    one = cost(only(TINY_MODEL.layer, TINY_MODEL.num_layers), cp_size)
    assert one == pytest.approx(cost(TINY_MODEL, cp_size), rel=1e-12)


@pytest.mark.parametrize("other", [EXPERTS, NOT_CAUSAL], ids=["experts", "mask"])
def test_a_lane_pays_for_each_layer_of_its_kind(other):
    """Alone in its lane nothing hides, so that times add up; what a bucket pays once is counted once."""
    dense, alike, both = (
        cost(mixed(*kinds), 1) for kinds in ((TINY_MODEL.layer,) * 2, (other,) * 2, (TINY_MODEL.layer, other))
    )
    assert alike.forward_s > dense.forward_s
    for part in ("forward_s", "backward_s"):
        assert getattr(both, part) == pytest.approx((getattr(dense, part) + getattr(alike, part)) / 2, rel=1e-9)


def test_the_price_is_that_of_the_heaviest_stage():
    uneven = mixed(*(TINY_MODEL.layer,) * 4, first=1)
    three = cost(only(TINY_MODEL.layer, 6), pp_size=2)
    assert cost(uneven, pp_size=2)[:2] == pytest.approx(three[:2])


def test_memory_is_counted_stage_by_stage():
    topology = Topology(num_lanes=2, pp_size=2)

    def parts(model: ModelShape):
        return MemoryModel(model, CURVED_HARDWARE, topology, OPTIONS).peak_at(128)

    even, uneven = parts(mixed(*(TINY_MODEL.layer,) * 4)), parts(mixed(*(TINY_MODEL.layer,) * 4, first=1))
    assert uneven[0].activations_bytes == pytest.approx(even[0].activations_bytes / 2)
    assert uneven[1].activations_bytes == pytest.approx(even[1].activations_bytes * 1.5)
    held = EXPERTS.held_weights - TINY_MODEL.layer.held_weights
    experts = parts(mixed(TINY_MODEL.layer, EXPERTS, TINY_MODEL.layer, TINY_MODEL.layer))
    assert experts[0].weights_bytes - even[0].weights_bytes == 2 * held
    assert experts[1] == even[1]
    assert experts[0].activations_bytes > even[0].activations_bytes


def test_parameters_and_flops_are_sums_over_layers():
    model = mixed(TINY_MODEL.layer, EXPERTS, NOT_CAUSAL)
    dense = replace(TINY_MODEL, num_layers=3)
    assert model.num_parameters == dense.num_parameters + EXPERTS.held_weights - TINY_MODEL.layer.held_weights
    more = batch_flops(model, 100, 10_000).forward - batch_flops(dense, 100, 10_000).forward
    of_experts = 2 * 100 * (EXPERTS.linear_weights - TINY_MODEL.layer.linear_weights)
    assert more == of_experts + 10_000 * TINY_MODEL.layer.attention_flops_per_token2
