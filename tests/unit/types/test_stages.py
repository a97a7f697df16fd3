"""Stages of unlike layers: prices, memory and FLOPs are sums over the layers that a stage says it has."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.learning.observations import Observation, PricedObservations
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.flops import batch_flops
from dynamic_cp.types import FULL, Layer, ModelShape, PlanOptions, Problem, Stage, Topology
from tests.unit.support import CURVED_HARDWARE, TINY_MODEL

OPTIONS = PlanOptions(max_tokens_per_rank=256, cp_comm_types=("p2p",))
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
    return CostModel(Problem(topology=topology, model=model, hardware=CURVED_HARDWARE, options=OPTIONS)).cost(
        cp_size, 0, 512, 512 * 200, "p2p"
    )


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
        return MemoryModel(Problem(topology=topology, model=model, hardware=CURVED_HARDWARE, options=OPTIONS)).peak_at(
            128
        )

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


def test_modules_of_multi_token_prediction_are_layers_of_the_last_stage():
    later = replace(TINY_MODEL, num_layers=4, mtp_num_layers=2)
    assert [stage.num_layers for stage in later.stages(2)] == [2, 4]
    assert [stage.num_layers for stage in replace(later, pipeline_layers=((3,), (1,))).stages(2)] == [3, 3]
    projection = later.mtp_module.linear_weights - later.layer.linear_weights
    assert projection == 2 * TINY_MODEL.hidden_size**2
    # Three heads, six layers and two projections; the attention of all of them.
    plain, more = (batch_flops(model, 100, 10_000) for model in (replace(later, mtp_num_layers=0), later))
    heads = 2 * 2 * 100 * TINY_MODEL.hidden_size * TINY_MODEL.vocab_size
    layers = 2 * (2 * 100 * later.mtp_module.linear_weights + 10_000 * later.layer.attention_flops_per_token2)
    assert more.forward - plain.forward == pytest.approx(heads + layers, rel=1e-12)
    # All stages are priced as the last one; a lane alone pays for each layer.
    alone = [cost(replace(TINY_MODEL, num_layers=8), cp_size=1, pp_size=2), cost(later, cp_size=1, pp_size=2)]
    assert alone[1].forward_s > alone[0].forward_s
    expected = 3 * alone[0].head_forward_s + 2 * alone[0].embedding_forward_s
    assert alone[1].head_forward_s == pytest.approx(expected), "the modules embed their tokens, too"
    with pytest.raises(InvalidInputError, match="mtp_num_layers is 2 and window_tokens 8: modules of multi-token"):
        replace(later, window_tokens=8)


def test_chunks_with_modules_take_longer():
    later = replace(TINY_MODEL, num_layers=4, pipeline_layers=((1, 1), (1, 1)), mtp_num_layers=1)
    assert [later.chunks_of_heaviest(*place, 2) for place in ((0, 0), (1, 0), (1, 1))] == [3, 3, 1.5]


UNEVEN = replace(TINY_MODEL, num_layers=6, pipeline_layers=((1, 1), (2, 2)))


def test_stages_have_the_layers_that_they_are_said_to_have():
    assert [stage.num_layers for stage in UNEVEN.stages(2)] == [2, 4]
    assert UNEVEN.stages(1) == replace(TINY_MODEL, num_layers=6).stages(1)
    assert [stage.num_layers for stage in replace(UNEVEN, pipeline_layers=[[0], [6]]).stages(2)] == [0, 6]
    windowed = replace(UNEVEN, window_tokens=8, window_attn_skip_freq=3)
    found = [number for stage in windowed.stages(2) for number, _ in stage.layers]
    assert found == pytest.approx([2 / 3, 4 / 3, 4 / 3, 8 / 3])
    assert cost(UNEVEN, pp_size=2)[:2] == pytest.approx(cost(replace(TINY_MODEL, num_layers=8), pp_size=2)[:2])
    with pytest.raises(InvalidInputError, match="pipeline_layers are of 2 stages, the pipeline has 4"):
        UNEVEN.stages(4)
    with pytest.raises(InvalidInputError, match="are 5 layers, num_layers is 6: give each layer to one chunk"):
        replace(UNEVEN, pipeline_layers=((1, 1), (2, 1)))


def test_memory_takes_all_chunks_of_a_stage_for_its_largest():
    topology = Topology(num_lanes=2, pp_size=2, vp_size=2)

    def activations(chunks: tuple[tuple[int, ...], ...]) -> list[float]:
        model = replace(TINY_MODEL, num_layers=sum(map(sum, chunks)), pipeline_layers=chunks)
        stages = MemoryModel(
            Problem(topology=topology, model=model, hardware=CURVED_HARDWARE, options=OPTIONS)
        ).peak_at(128)
        return [stage.activations_bytes for stage in stages]

    even = replace(TINY_MODEL, num_layers=8)
    two = [
        one.activations_bytes
        for one in MemoryModel(
            Problem(topology=topology, model=even, hardware=CURVED_HARDWARE, options=OPTIONS)
        ).peak_at(128)
    ]
    assert activations(((2, 2), (2, 2))) == pytest.approx(two)
    assert activations(((1, 2), (2, 2))) == pytest.approx(two)
    assert activations(((1, 1), (2, 2))) == pytest.approx([two[0] / 2, two[1]])
    assert activations(((0, 0), (2, 2))) == pytest.approx([0, two[1]])


def test_what_was_measured_of_a_chunk_is_compared_with_its_own_layers():
    """Prices are those of the stage with most layers."""
    topology = Topology(num_lanes=4, pp_size=2, vp_size=2)
    model = replace(UNEVEN, num_layers=7, pipeline_layers=((0, 1), (2, 4)))
    priced = CostModel(
        Problem(
            topology=topology,
            model=model,
            hardware=replace(CURVED_HARDWARE, overhead_s_per_bucket_stage=0),
            options=OPTIONS,
        )
    )
    every = [
        Observation(
            cp_size=1, first_lane=0, tokens=64, tokens_squared=4096, forward_s=1, backward_s=1, stage=stage, chunk=chunk
        )
        for stage, chunk in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    found = PricedObservations(every, priced)
    assert found.num_ignored == 1, "a chunk without layers"
    one, two, four = found.predicted_s(priced)[:, 0]
    edges = priced.cost(1, 0, 64, 4096)
    assert two == pytest.approx(2 * one)
    assert four - edges.head_forward_s == pytest.approx(4 * one)
