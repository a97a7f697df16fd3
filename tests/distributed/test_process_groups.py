"""CP groups: the right blocks with the right ranks for any number of lanes, and errors on all ranks, never a hang."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import Topology
from megatron.dynamic_cp import process_groups
from megatron.dynamic_cp.attention.exchange import ExchangeError, RingShift, all_gather_tokens, reduce_scatter_tokens
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from megatron.dynamic_cp.process_groups import DynamicCPGroups, lane_blocks
from tests.distributed.harness import initialize_model_parallel, run_ranks


def all_blocks(num_lanes: int, min_size: int = 1, max_size: int | None = None) -> set[tuple[int, int]]:
    """Re-statement: every aligned power-of-two block inside [0, num_lanes)."""
    return {
        (first, size)
        for size in (1, 2, 4, 8, 16)
        for first in range(0, num_lanes, size)
        if first + size <= num_lanes and size <= (max_size or num_lanes) and (size == 1 or size >= min_size)
    }


@pytest.mark.parametrize("num_lanes", range(1, 18))
def test_lane_blocks(num_lanes: int) -> None:
    blocks_of_lane = [lane_blocks(lane, num_lanes) for lane in range(num_lanes)]
    for lane, blocks in enumerate(blocks_of_lane):
        sizes = [size for _, size in blocks]
        assert sizes == sorted(sizes)
        assert sizes[0] == 1, "an empty place runs on one lane"
        # Exactly the blocks that hold the lane: its peers therefore know the same ones.
        assert set(blocks) == {(first, size) for first, size in all_blocks(num_lanes) if first <= lane < first + size}
    assert set().union(*blocks_of_lane) == all_blocks(num_lanes)
    assert blocks_of_lane[0][-1][1] == Topology(num_lanes=num_lanes).max_cp_size


@pytest.mark.parametrize(("min_size", "max_size"), [(2, None), (4, 8), (8, 8), (1, 1), (16, None)])
def test_lane_blocks_within_limits(min_size: int, max_size: int | None) -> None:
    blocks = set().union(*(lane_blocks(lane, 13, min_size, max_size) for lane in range(13)))
    assert blocks == all_blocks(13, min_size, max_size)
    assert {(lane, 1) for lane in range(13)} <= blocks


def build_and_sum(topology: Topology, limits: dict[str, int]) -> tuple[DynamicCPGroups, dict]:
    """Return (the groups, without handles; block -> (global ranks, sum of 10^rank over the group))."""
    initialize_model_parallel(topology.tp_size, topology.pp_size)
    groups = DynamicCPGroups.build(topology, timeout_s=30, **limits)
    found = {}
    for block in groups.groups:
        group = groups.group(*block)
        total = torch.tensor(10 ** dist.get_rank())
        dist.all_reduce(total, group=group)
        found[block] = (dist.get_process_group_ranks(group), total.item())
    facts = DynamicCPGroups(
        lane=groups.lane,
        num_lanes=groups.num_lanes,
        groups=dict.fromkeys(groups.groups),
        build_s=groups.build_s,
        warm_up_s=groups.warm_up_s,
        warm_up_bytes=groups.warm_up_bytes,
    )
    return facts, found


@pytest.mark.parametrize(
    ("topology", "limits"),
    [
        (Topology(num_lanes=1), {}),
        (Topology(num_lanes=3), {}),
        (Topology(num_lanes=4), {}),
        (Topology(num_lanes=4), {"max_cp_size": 2}),
        (Topology(num_lanes=4), {"min_cp_size": 4}),
        (Topology(num_lanes=6), {}),
        (Topology(num_lanes=3, tp_size=2), {}),
        (Topology(num_lanes=2, tp_size=2, pp_size=2), {}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else f"{value.num_lanes}x{value.tp_size}x{value.pp_size}",
)
def test_groups_hold_the_expected_ranks(topology: Topology, limits: dict[str, int]) -> None:
    blocks = all_blocks(topology.num_lanes, limits.get("min_cp_size", 1), limits.get("max_cp_size"))
    results = run_ranks(topology.world_size, build_and_sum, topology, limits, timeout_s=60)
    for rank, (groups, found) in enumerate(results):
        # megatron-core counts tensor-parallel ranks fastest, then lanes, then pipeline stages.
        tp_rank, lane = rank % topology.tp_size, rank // topology.tp_size % topology.num_lanes
        stage = rank // (topology.tp_size * topology.num_lanes)
        assert (groups.lane, groups.num_lanes) == (lane, topology.num_lanes)
        assert set(found) == {(first, size) for first, size in blocks if first <= lane < first + size}
        for (first, size), (ranks, total) in found.items():
            members = range(first, first + size)
            expected = [(stage * topology.num_lanes + other) * topology.tp_size + tp_rank for other in members]
            assert ranks == expected
            assert total == sum(10**r for r in expected)
        num_exchanges = sum(size > 1 for _, size in found)
        assert groups.warm_up_bytes == 4 * num_exchanges, "one float32 is sent in each group of several lanes"
        assert f"{topology.num_lanes} lanes" in groups.describe()


def ask_for_missing_groups() -> list[str]:
    initialize_model_parallel()
    groups = DynamicCPGroups.build(Topology(num_lanes=2), timeout_s=30, max_cp_size=1)
    messages = []
    for block in ((0, 2), (1 - groups.lane, 1)):
        with pytest.raises(InvalidInputError) as caught:
            groups.group(*block)
        assert (caught.value.first_lane, caught.value.cp_size) == block
        messages.append(str(caught.value))
    return messages


def test_missing_group_names_what_is_there() -> None:
    (too_large, other_lane), _ = run_ranks(2, ask_for_missing_groups, timeout_s=60)
    assert "lane 0 has no CP group of 2 lanes at lane 0; built: [(0, 1)]" in too_large
    assert "--max-dynamic-cp-size" in too_large
    assert "lane 0 has no CP group of 1 lanes at lane 1; built: [(0, 1)]" in other_lane


def refuse(topology: Topology, order: str) -> str:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp_size, pipeline_model_parallel_size=topology.pp_size, order=order
    )
    with pytest.raises(InvalidInputError) as caught:
        DynamicCPGroups.build(topology, timeout_s=30)
    return str(caught.value)


def test_wrong_number_of_lanes_is_refused_on_all_ranks() -> None:
    messages = run_ranks(2, refuse, Topology(num_lanes=4), "tp-cp-ep-dp-pp", timeout_s=60)
    assert len(set(messages)) == 1
    assert "2 data-parallel ranks" in messages[0]
    assert "4 lanes" in messages[0]


def test_wrong_rank_order_is_refused_on_all_ranks() -> None:
    messages = run_ranks(4, refuse, Topology(num_lanes=2, pp_size=2), "tp-cp-ep-pp-dp", timeout_s=60)
    assert len(set(messages)) == 1
    assert "[2] ranks apart, expected 1" in messages[0]
    assert "--use-tp-pp-dp-mapping" in messages[0]


def break_the_warm_up() -> str:
    """The ring exchange of the warm-up must be looked at, not only made."""
    initialize_model_parallel()
    process_groups.RingShift.wait = lambda self: self._sent
    with pytest.raises(RuntimeError) as caught:
        DynamicCPGroups.build(Topology(num_lanes=2), timeout_s=30)
    return str(caught.value)


def test_warm_up_checks_what_it_receives() -> None:
    messages = run_ranks(2, break_the_warm_up, timeout_s=60)
    assert "dynamic_cp_lanes_0_to_1" in messages[0]
    assert "received 0.0, expected 1" in messages[0]


def wait_for_a_hung_peer() -> dict[str, tuple[str, float]]:
    """Return exchange -> (error, seconds until it came) on lane 0; lane 1 of its group hangs, lane 2 is not in it."""
    initialize_model_parallel()
    x_THD = torch.ones(2, 1, 4)
    exchanges = {
        "ring": lambda params: RingShift(x_THD, params).wait(),
        "all_gather": lambda params: all_gather_tokens(x_THD, params),
        "reduce_scatter": lambda params: reduce_scatter_tokens(x_THD, params),
    }
    # A group that timed out is of no use any more: each exchange gets its own.
    groups = {name: DynamicCPGroups.build(Topology(num_lanes=3), timeout_s=1) for name in exchanges}
    if dist.get_rank() == 1:
        time.sleep(5)  # hangs, does not die: a dead peer is noticed at once
    errors = {}
    if dist.get_rank() == 0:
        for name, exchange in exchanges.items():
            params = DynamicPackedSeqParams.build(
                (4,),
                torch.arange(2),
                groups[name].group(0, 2),
                cp_comm_type="p2p",
                label=f"step 7, {name}",
                stats=ExchangeStats(),
            )
            started = time.monotonic()
            with pytest.raises(ExchangeError) as caught:
                exchange(params)
            errors[name] = str(caught.value), time.monotonic() - started
    return errors


@pytest.mark.slow
def test_hung_peer_is_named_within_the_timeout() -> None:
    errors, _, _ = run_ranks(3, wait_for_a_hung_peer, timeout_s=60)
    assert set(errors) == {"ring", "all_gather", "reduce_scatter"}
    for name, (message, waited_s) in errors.items():
        assert 0.5 < waited_s < 3.5
        assert "ranks [0, 1]" in message
        assert f"step 7, {name}" in message
