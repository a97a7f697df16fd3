"""Stages of unlike layers: what they cost is a sum over their layers, and the heaviest is as light as can be."""

from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace

import pytest

from dynamic_cp.decide.stage_splits import _splits, best_split, flags_of, in_stages, why_no_split
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.learning.observations import Observation, PricedObservations
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.work import batch_flops
from dynamic_cp.types import FULL, Layer, ModelShape, Stage, Topology
from megatron.dynamic_cp.flags.layout import STAGE_FLAGS, pipeline_layers
from tests.unit.support import CURVED_HARDWARE, TINY_MODEL, problem_of

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
    prices = CostModel(problem_of(Topology(num_lanes=4, pp_size=pp_size), model))
    return prices.cost(cp_size, 0, 512, 512 * 200, "p2p")


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
        return MemoryModel(problem_of(topology, model)).peak_at(128)

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

    def activations(chunks: tuple[tuple[int, ...], ...], num_layers: int = 0) -> list[float]:
        model = replace(TINY_MODEL, num_layers=num_layers or sum(map(sum, chunks)), pipeline_layers=chunks)
        return [stage.activations_bytes for stage in MemoryModel(problem_of(topology, model)).peak_at(128)]

    two = activations((), 8)
    assert activations(((2, 2), (2, 2))) == pytest.approx(two)
    assert activations(((1, 2), (2, 2))) == pytest.approx(two)
    assert activations(((1, 1), (2, 2))) == pytest.approx([two[0] / 2, two[1]])
    assert activations(((0, 0), (2, 2))) == pytest.approx([0, two[1]])


def test_what_was_measured_of_a_chunk_is_compared_with_its_own_layers():
    """Prices are those of the stage with most layers."""
    topology = Topology(num_lanes=4, pp_size=2, vp_size=2)
    model = replace(UNEVEN, num_layers=7, pipeline_layers=((0, 1), (2, 4)))
    priced = CostModel(problem_of(topology, model, replace(CURVED_HARDWARE, overhead_s_per_bucket_stage=0)))
    one = Observation(cp_size=1, first_lane=0, tokens=64, tokens_squared=4096, forward_s=1, backward_s=1)
    found = PricedObservations([replace(one, stage=stage, chunk=chunk) for stage in (0, 1) for chunk in (0, 1)], priced)
    assert found.num_ignored == 1, "a chunk without layers"
    one, two, four = found.predicted_s(priced)[:, 0]
    edges = priced.cost(1, 0, 64, 4096)
    assert two == pytest.approx(2 * one)
    assert four - edges.head_forward_s == pytest.approx(4 * one)


def run_with(num_layers, pp_size, vp_size, flags):
    """Return the layers that a run has with `flags`, None where it is refused."""
    given = SimpleNamespace(
        num_layers=num_layers, pipeline_model_parallel_size=pp_size, virtual_pipeline_model_parallel_size=vp_size
    )
    for flag in flags:
        name, _, value = flag.removeprefix("--").replace("-", "_").partition(" ")
        setattr(given, name, int(value) if value else True)
    try:
        return pipeline_layers(given)
    except InvalidInputError:
        return None


def every_run(num_layers, pp_size, vp_size):
    """Yield the layers of all runs with flags for unlike stages."""
    first, last, embedding, loss = STAGE_FLAGS
    numbers = range(1, num_layers + 1)
    own = [[f"{first} {number}"] for number in numbers] + [[f"{last} {number}"] for number in numbers]
    own += [[f"{first} {one}", f"{last} {two}"] for one, two in product(numbers, numbers)]
    for flags in [*own, [embedding], [loss], [embedding, loss]]:
        layers = run_with(num_layers, pp_size, vp_size, flags)
        if layers:
            yield layers


@pytest.mark.parametrize("num_modules", [0, 1, 2])
def test_no_flags_make_the_heaviest_stage_lighter(num_modules):
    looked_at = 0
    for num_layers, pp_size, vp_size in product(range(1, 15), (1, 2, 3, 4, 5), (1, 2, 3)):
        heaviest = [max(sum(one[-1]) + num_modules, *map(sum, one)) for one in every_run(num_layers, pp_size, vp_size)]
        if num_layers % (pp_size * vp_size) == 0:
            heaviest.append(num_layers // pp_size + num_modules)
        split = best_split(num_layers, pp_size, vp_size, num_modules)
        assert (split is None) == (not heaviest)
        if split is None:
            continue
        layers = split.layers or ((num_layers // (pp_size * vp_size),) * vp_size,) * pp_size
        assert max(sum(layers[-1]) + num_modules, *map(sum, layers)) == min(heaviest)
        assert run_with(num_layers, pp_size, vp_size, split.flags) == split.layers
        assert not (num_layers % (pp_size * vp_size) == num_modules == 0 and split.flags), "even where it can be"
        looked_at += bool(split.layers)
    assert looked_at > 50


def test_flags_say_the_layers_that_they_are_asked_for():
    looked_at = 0
    for num_layers, pp_size, vp_size in product((7, 12), (2, 3, 4), (1, 2)):
        for split in _splits(num_layers, pp_size, vp_size):
            assert run_with(num_layers, pp_size, vp_size, flags_of(split.layers)) in (split.layers, ())
            looked_at += 1
    assert looked_at > 100
    assert flags_of(((1,), (3,), (2,), (1,))) is None


def test_a_model_says_why_its_layers_cannot_be_shared_out():
    model = replace(TINY_MODEL, num_layers=6)

    def why(pp_size, vp_size=1, layers=()):
        of_stages = replace(model, pipeline_layers=layers)
        return why_no_split(of_stages, tp_size=1, pp_size=pp_size, vp_size=vp_size, ranks_per_node=8)

    assert why(4) is why(8) is why(4, 2) is None
    assert why(9) == why(4, 3) == "PP x VPP cannot share out the layers"
    assert why(1, 2) == "VPP without a pipeline"
    assert why(2, 1, ((2,), (4,))) is None
    assert why(1, 1, ((2,), (4,))) is None
    given = "PP x VPP is not what the model's pipeline_layers are for"
    assert why(4, 1, ((2,), (4,))) == why(2, 2, ((2,), (4,))) == given
    assert in_stages(model, 4, 1).pipeline_layers == ((1,), (2,), (2,), (1,))
    assert in_stages(model, 3, 1) is in_stages(model, 1, 1) is model
