"""Stages that cannot all have as many layers get what keeps the heaviest lightest, and the flags that say so do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.stage_layers import _splits, best_split, flags_of, in_words, is_level
from megatron.dynamic_cp.flags.pipeline_layers import FLAGS, pipeline_layers
from tests.unit.support import TINY_MODEL


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
    first, last, embedding, loss = FLAGS
    numbers = range(1, num_layers + 1)
    own = [[f"{first} {number}"] for number in numbers] + [[f"{last} {number}"] for number in numbers]
    own += [[f"{first} {one}", f"{last} {two}"] for one, two in product(numbers, numbers)]
    for flags in [*own, [embedding], [loss], [embedding, loss]]:
        layers = run_with(num_layers, pp_size, vp_size, flags)
        if layers:
            yield layers


@pytest.mark.parametrize("num_modules", [0, 1])
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


def test_deepseek_v3_has_unlike_stages():
    """61 layers and a module of multi-token prediction on the last stage."""
    found = {pp_size: best_split(61, pp_size, 1, 1) for pp_size in (2, 4, 8, 16)}
    assert {size: in_words(one.layers) for size, one in found.items()} == {
        2: "31+30 layers", 4: "3x16+13 layers", 8: "7x8+5 layers", 16: "15x4+1 layers"
    }  # fmt: skip
    assert found[16].flags == ("--decoder-last-pipeline-num-layers 1",)
    assert [size for size in (1, 2, 4, 8, 16, 32, 64) if is_level(61, size, 1)] == [1, 2, 4, 8, 16]


def test_a_model_says_why_its_layers_cannot_be_shared_out():
    model = replace(TINY_MODEL, num_layers=6)

    def why(pp_size, vp_size=1, layers=()):
        of_stages = replace(model, pipeline_layers=layers)
        return of_stages.why_no_split(tp_size=1, pp_size=pp_size, vp_size=vp_size, ranks_per_node=8)

    assert why(4) is why(8) is why(4, 2) is None
    assert why(9) == why(4, 3) == "PP x VPP cannot share out the layers"
    assert why(1, 2) == "VPP without a pipeline"
    assert why(2, 1, ((2,), (4,))) is None
    assert why(1, 1, ((2,), (4,))) is None
    given = "PP x VPP is not what the model's pipeline_layers are for"
    assert why(4, 1, ((2,), (4,))) == why(2, 2, ((2,), (4,))) == given
    assert model.in_stages(4, 1).pipeline_layers == ((1,), (2,), (2,), (1,))
    assert model.in_stages(3, 1) is model.in_stages(1, 1) is model
