"""Exchanges that heads or nodes do not allow are refused before anything is built, with both numbers and a remedy."""

from typing import Any

import pytest

from dynamic_cp.mechanisms.mechanism import Sharing
from dynamic_cp.mechanisms.registry import MECHANISMS, chosen_inner_sizes
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import Attention, Problem
from megatron.dynamic_cp.flags.shape import model_shape
from megatron.dynamic_cp.groups.process_groups import lane_blocks, two_level_blocks
from megatron.trainer.flags.arguments import parse_args
from tests.trainer.commandline import command_line

NUM_HEADS = 4  # of the command line's model


def parsed(flags: str, world_size: int, lanes_per_node: int, monkeypatch: Any) -> Any:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(lanes_per_node))
    return parse_args(command_line(f"--dynamic-cp {flags}"), world_size)


@pytest.mark.parametrize(
    ("flags", "num_lanes", "lanes_per_node", "inner", "largest"),
    [
        ("", 8, 8, (2, 4), None), ("--cp-comm-type p2p", 8, 8, (), None),
        ("--cp-comm-type all_gather", 8, 8, (), None), ("--cp-comm-type auto", 8, 8, (2, 4), None),
        ("--cp-comm-type auto", 16, 2, (2,), None), ("--cp-comm-type auto", 16, 6, (2,), None),
        ("--cp-comm-type auto --max-dynamic-cp-size 4", 16, 8, (2,), 4),
        ("--cp-comm-type auto --num-attention-heads 3 --num-query-groups 1 --kv-channels 32", 8, 8, (), None),
        ("--cp-comm-type auto", 64, 8, (4,), None),
        ("--cp-comm-type auto --dynamic-cp-inner-sizes 4", 16, 8, (4,), None),
        ("--cp-comm-type a2a", 8, 8, (), 4),  # four heads: a group of 8 is never built
        ("--cp-comm-type a2a", 4, 4, (), 4),
        ("--cp-comm-type a2a", 1, 1, (), None),
        ("--cp-comm-type a2a+p2p", 16, 4, (2, 4), 16),
        ("--cp-comm-type a2a+p2p --dynamic-cp-inner-sizes 4 2", 16, 4, (2, 4), 16),
    ],
)  # fmt: skip
def test_what_is_left_out_is_filled_in(flags, num_lanes, lanes_per_node, inner, largest, monkeypatch):
    settings = parsed(flags, num_lanes, lanes_per_node, monkeypatch)
    assert settings.model.num_attention_heads in (NUM_HEADS, 3)
    options, topology = settings.planning.options(), settings.planning.topology
    sharing = Sharing.of(model_shape(settings.model, 256), topology, options)
    built = chosen_inner_sizes(options.cp_comm_types, options.max_cp_size or topology.max_cp_size, sharing)
    assert (built, settings.planning.max_cp_size) == (inner, largest)


def test_the_planner_keeps_to_the_sizes_that_are_built(monkeypatch):
    """A long sample on 8 lanes takes a2a+p2p; with which inner size is the flag's to say."""
    for flags, sizes in (("", (2, 4)), ("--dynamic-cp-inner-sizes 2", (2,))):
        settings = parsed(f"--cp-comm-type a2a+p2p {flags}", 8, 4, monkeypatch)
        options = settings.planning.options()
        cost_model = CostModel(
            Problem(
                topology=settings.planning.topology, model=model_shape(settings.model, 256),
                hardware=load_hardware("h100"), options=options,
            )
        )  # fmt: skip
        assert {one.inner_cp_size for one in cost_model.attentions} - {1} == set(sizes)


@pytest.mark.parametrize("has_masks", [False, True])
def test_auto_makes_ten_communicators_of_64_lanes_and_plans_for_no_others(has_masks, monkeypatch):
    """Groups of 2 to 64 lanes, and around the 8 lanes of a node rings of 2, 4 and 8; blocks need no more."""
    settings = parsed("--num-attention-heads 8", 64, 8, monkeypatch)
    model, topology = model_shape(settings.model, 256), settings.planning.topology
    options = settings.planning.options(has_masks=has_masks)
    sharing = Sharing.of(model, topology, options)
    problem = Problem(topology=topology, model=model, hardware=load_hardware("h100"), options=options)
    priced = [one for one in CostModel(problem).attentions if one.cp_comm_type == "a2a+p2p"]
    assert set(priced) == {Attention("a2a+p2p", 8)}
    inner_sizes = chosen_inner_sizes(options.cp_comm_types, 64, sharing)
    assert inner_sizes == ((2, 4, 8) if has_masks else (8,)), "blocks have all"
    assert len(priced) == 3
    for lane in (0, 37, 63):
        rings = two_level_blocks(lane, lane_blocks(lane, 64), sharing.ring_sizes)
        assert [place[1:] for place in rings] == [(16, 8), (32, 8), (64, 8)]
        assert len(lane_blocks(lane, 64)) - 1 + len(rings) <= 10
    # With the job's own, the optimizer's and that of gradients.
    assert MemoryModel(problem).num_communicators == 6 + 3 + 3


@pytest.mark.parametrize(("num_lanes", "ranks_per_node"), [(32, 32), (64, 64)])
def test_rings_go_around_inner_groups_smaller_than_the_largest(num_lanes, ranks_per_node, monkeypatch):
    """A group of all lanes of a node leaves no ring around it."""
    settings = parsed(
        "--num-attention-heads 64 --num-query-groups 8 --hidden-size 512", num_lanes, ranks_per_node, monkeypatch
    )
    model, topology = model_shape(settings.model, 256), settings.planning.topology
    sharing = Sharing.of(model, topology, settings.planning.options())
    assert sharing.ring_sizes == (num_lanes // 2,)
    assert MECHANISMS["a2a+p2p"].inner_sizes(num_lanes, sharing) == (num_lanes // 2,)
