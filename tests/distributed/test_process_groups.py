"""CP groups: the right blocks with the right ranks for any number of lanes, and errors on all ranks, never a hang."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import Topology
from megatron.dynamic_cp.attention.mechanisms.transfers import (
    ExchangeError,
    Expected,
    LaneMessages,
    RingShift,
    all_gather_tokens,
    all_to_all_heads,
    all_to_all_messages,
    reduce_scatter_tokens,
)
from megatron.dynamic_cp.groups import first_exchange as warm_up
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.pool import layer_pass
from tests import patience
from tests.distributed.harness import initialize_model_parallel, params_of, refuses, run_ranks


def all_blocks(num_lanes: int, min_size: int = 1, max_size: int | None = None) -> set[tuple[int, int]]:
    """Re-statement: every aligned power-of-two block inside [0, num_lanes)."""
    return {
        (first, size)
        for size in (1, 2, 4, 8, 16)
        for first in range(0, num_lanes, size)
        if first + size <= num_lanes and size <= (max_size or num_lanes) and (size == 1 or size >= min_size)
    }


def two_levels_of_lane(lane: int, num_lanes: int, inner_sizes: tuple[int, ...]) -> set[tuple[int, int, int]]:
    """Re-statement: every inner size below the block's, for each block that holds the lane."""
    blocks = [(first, size) for first, size in all_blocks(num_lanes) if first <= lane < first + size]
    return {(first, size, inner) for first, size in blocks for inner in inner_sizes if inner < size}


def build_and_sum(topology: Topology, limits: dict[str, Any]) -> tuple[DynamicCPGroups, dict]:
    """Return (the groups, without handles; block -> (global ranks, sum of 10^rank over the group))."""
    initialize_model_parallel(topology.tp_size, topology.pp_size)
    groups = DynamicCPGroups.build(topology, timeout_s=30, **{"exchanges": ("p2p",)} | limits)

    def members(group: dist.ProcessGroup) -> tuple[list[int], int]:
        total = torch.tensor(10 ** dist.get_rank())
        dist.all_reduce(total, group=group)
        return dist.get_process_group_ranks(group), total.item()

    found: dict[Any, Any] = {block: members(groups.group(*block)) for block in groups.groups}
    for place in groups.outer_groups:
        inner, outer = groups.levels(*place)
        found[place] = members(inner), members(outer)
    for size, group in groups.inner_groups.items():
        if (groups.lane - groups.lane % size, size) in groups.groups:
            assert group is groups.group(groups.lane - groups.lane % size, size), "built twice"
    facts = DynamicCPGroups(
        lane=groups.lane, num_lanes=groups.num_lanes, groups=dict.fromkeys(groups.groups), inner_groups={},
        outer_groups=dict.fromkeys(groups.outer_groups), build_s=groups.build_s, warm_up_s=groups.warm_up_s,
        warm_up_bytes=groups.warm_up_bytes,
    )  # fmt: skip
    return facts, found


@pytest.mark.by_day("3x1x1", "2x2x2")
@pytest.mark.parametrize(
    ("topology", "limits"),
    [
        (Topology(num_lanes=1), {}), (Topology(num_lanes=3), {}), (Topology(num_lanes=4), {}),
        (Topology(num_lanes=4), {"max_cp_size": 2}), (Topology(num_lanes=4), {"min_cp_size": 4}),
        (Topology(num_lanes=6), {}), (Topology(num_lanes=3, tp_size=2), {}),
        (Topology(num_lanes=2, tp_size=2, pp_size=2), {}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else f"{value.num_lanes}x{value.tp_size}x{value.pp_size}",
)  # fmt: skip
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


ALL = ("p2p", "all_gather", "a2a", "a2a+p2p")


@pytest.mark.by_day("4-p2p+all_gather+a2a+a2a+p2p")
@pytest.mark.parametrize(
    ("topology", "limits"),
    [
        (Topology(num_lanes=6), {"exchanges": ALL, "inner_sizes": (2,)}),
        (Topology(num_lanes=8), {"exchanges": ("a2a+p2p",), "inner_sizes": (2, 4), "min_cp_size": 8}),
        (Topology(num_lanes=4), {"exchanges": ALL, "inner_sizes": (2,), "min_cp_size": 4}),
        (Topology(num_lanes=4, tp_size=2), {"exchanges": ("p2p", "a2a+p2p"), "inner_sizes": (2,)}),
        (Topology(num_lanes=4), {"exchanges": ("p2p", "a2a"), "inner_sizes": (2,), "query_heads": 6}),
        (Topology(num_lanes=2), {"exchanges": ("p2p",), "inner_sizes": (), "has_linear_attention": True}),
    ],
    ids=lambda value: "+".join(value["exchanges"]) if isinstance(value, dict) else f"{value.num_lanes}",
)
def test_levels_hold_the_expected_ranks(topology: Topology, limits: dict[str, Any]) -> None:
    """Also: what is built and sent for exactly the exchanges that the run may use."""
    exchanges, inner_sizes = limits["exchanges"], limits["inner_sizes"]
    results = run_ranks(topology.world_size, build_and_sum, topology, limits, timeout_s=60)
    num_outer = 0
    for rank, (groups, found) in enumerate(results):
        lane, tp_rank = rank // topology.tp_size, rank % topology.tp_size
        blocks = [block for block in found if len(block) == 2]
        places = {place for place in found if len(place) == 3}
        wanted = two_levels_of_lane(lane, topology.num_lanes, inner_sizes) if "a2a+p2p" in exchanges else set()
        assert places == {place for place in wanted if place[1] >= limits.get("min_cp_size", 1)}
        num_outer += len(places)
        for first, size, inner in places:
            start = lane - lane % inner
            expected = range(start, start + inner), range(first + (lane - first) % inner, first + size, inner)
            for (ranks, total), lanes in zip(found[first, size, inner], expected, strict=True):
                assert ranks == [member * topology.tp_size + tp_rank for member in lanes]
                assert total == sum(10**r for r in ranks)
        num_floats = sum("p2p" in exchanges for _, size in blocks if size > 1) + len(places)
        num_floats += sum(size - 1 for _, size in blocks if "all_gather" in exchanges)
        if "a2a" in exchanges:
            num_floats += sum(size - 1 for _, size in blocks if limits.get("query_heads", size) % size == 0)
        num_floats += sum(size - 1 for _, size in blocks if limits.get("has_linear_attention"))
        warmed = {size for _, size in blocks} if "a2a" in exchanges else set()
        num_floats += sum(inner - 1 for inner in {inner for _, _, inner in places} - warmed)
        assert groups.warm_up_bytes == 4 * num_floats
        assert ("inner x outer" in groups.describe()) == bool(places)
    assert (num_outer > 0) == ("a2a+p2p" in exchanges)


def build_in_a_bound_job() -> tuple[list[Any], Any]:
    """Return the device that the job is bound to whenever a group is made, and afterwards."""
    initialize_model_parallel()
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    create, seen = dist.new_group, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(dist.group.WORLD.bound_device_id)
        return create(*args, **kwargs)

    dist.new_group = watched
    DynamicCPGroups.build(Topology(num_lanes=3), timeout_s=30, exchanges=("p2p",))
    return seen, dist.group.WORLD.bound_device_id


def test_groups_are_not_split_off_a_job_that_is_bound_to_a_device() -> None:
    """NCCL's split is a collective of the whole job; lane 2 has no group of two and would not come."""
    for lane, (seen, afterwards) in enumerate(run_ranks(3, build_in_a_bound_job, timeout_s=60)):
        assert seen == [None] * (1 if lane == 2 else 2)
        assert afterwards == torch.device("cuda", 0)


def build_for_placed_buckets() -> tuple[list[tuple[int, int]], list[range], str]:
    """Return the groups of this lane, the ranks of those around some buckets that hold it, and the line for the log."""
    initialize_model_parallel()
    groups = DynamicCPGroups.build(
        Topology(num_lanes=6), timeout_s=60, exchanges=("p2p", "a2a+p2p", "blocks"), inner_sizes=(2, 4)
    )
    around = []
    for lanes in (range(6), range(1, 4), range(3, 6), range(4, 6)):
        if groups.lane in lanes:
            first, group = groups.around(lanes.start, len(lanes))
            around.append(range(first, first + group.size()))
            assert dist.get_process_group_ranks(group) == list(around[-1])
    return list(groups.groups), around, groups.describe()


def test_placed_buckets_span_any_lanes() -> None:
    """Of 6 lanes the groups of powers of two hold 4 at most; one of all lanes holds every other bucket."""
    ranks = run_ranks(6, build_for_placed_buckets, timeout_s=60)
    assert ranks[0][:2] == ([(0, 1), (0, 2), (0, 4), (0, 6)], [range(6)])
    assert ranks[3][:2] == ([(3, 1), (2, 2), (0, 4), (0, 6)], [range(6), range(4), range(6)])
    assert ranks[5][:2] == ([(5, 1), (4, 2), (0, 6)], [range(6), range(6), range(4, 6)])
    assert "sizes 1, 2, 6: built" in ranks[5][2]


def build_for_messages(topology: Topology, has_pool: bool) -> int:
    initialize_model_parallel(pp=topology.pp_size)
    exchanges = ("p2p",) if has_pool else ("p2p", "blocks")
    groups = DynamicCPGroups.build(topology, timeout_s=60, exchanges=exchanges, has_pool=has_pool)
    return groups.warm_up_bytes


@pytest.mark.by_day("topology1", "topology3")
@pytest.mark.parametrize(
    ("topology", "has_pool", "num_pairs"),
    [
        (Topology(num_lanes=4), False, 1 + 3),
        (Topology(num_lanes=4, ranks_per_node=2), False, 1 + 1),
        (Topology(num_lanes=2, pp_size=2), True, 3 + 1),  # and the shift of the pool's own group
        (Topology(num_lanes=2, pp_size=2, ranks_per_node=2), True, 1 + 1),
    ],
)
def test_ranks_of_a_node_connect_before_the_first_step(topology: Topology, has_pool: bool, num_pairs: int) -> None:
    """A number goes to the next lane of each group, and to each rank of the node in those that send messages."""
    num_groups = topology.num_lanes.bit_length() - 1
    sent = run_ranks(4, build_for_messages, topology, has_pool, timeout_s=60)
    assert sent == [4 * (num_groups + num_pairs)] * 4


def ask_for_missing_groups() -> None:
    initialize_model_parallel()
    limits = {"exchanges": ("p2p", "a2a+p2p"), "max_cp_size": 2}
    groups = DynamicCPGroups.build(Topology(num_lanes=4), timeout_s=30, **limits)
    if groups.lane == 0:
        built = "built: [(0, 1), (0, 2)]"
        says = "lane 0 has no CP group of 4 lanes at lane 0", built, "--max-dynamic-cp-size"
        refuses(InvalidInputError, lambda: groups.group(0, 4), *says)
        refuses(InvalidInputError, lambda: groups.group(1, 1), "lane 0 has no CP group of 1 lanes at lane 1", built)
        says = "lane 0 has no CP group that holds lanes 0 to 2", built, "widen --max-dynamic-cp-size"
        refuses(InvalidInputError, lambda: groups.around(0, 3), *says)
        says = "lane 0 has no groups for a2a+p2p with 2 inner lanes in the 4 lanes from lane 0; built"
        refuses(InvalidInputError, lambda: groups.levels(0, 4, 2), says, "--dynamic-cp-inner-sizes")
        with pytest.raises(InvalidInputError) as caught:
            groups.group(1, 1)
        assert (caught.value.first_lane, caught.value.cp_size) == (1, 1)
    dist.barrier()  # a rank that ends closes connections that others may still be making


def test_missing_groups_are_named_with_their_flag() -> None:
    run_ranks(4, ask_for_missing_groups, timeout_s=60)


def refuse(topology: Topology, order: str) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=topology.pp_size, order=order)
    with pytest.raises(InvalidInputError) as caught:
        DynamicCPGroups.build(topology, timeout_s=30, exchanges=("p2p",))
    return str(caught.value)


@pytest.mark.parametrize(
    ("world_size", "topology", "order", "says"),
    [
        (2, Topology(num_lanes=4), "tp-cp-ep-dp-pp", ("2 data-parallel ranks", "4 lanes")),
        (4, Topology(num_lanes=2, pp_size=2), "tp-cp-ep-pp-dp",
         ("[2] ranks apart, expected 1", "--use-tp-pp-dp-mapping")),
    ],
    ids=["lanes", "order"],
)  # fmt: skip
def test_other_lanes_and_orders_of_ranks_are_refused_on_all_ranks(
    world_size: int, topology: Topology, order: str, says: tuple[str, ...]
) -> None:
    (message,) = set(run_ranks(world_size, refuse, topology, order, timeout_s=60))
    assert all(part in message for part in says)


def return_what_was_sent(exchange: str) -> str:
    """The exchanges of the warm-up must be looked at, not only made."""
    initialize_model_parallel()
    warm_up.RingShift.wait = lambda self: self._sent
    warm_up.all_gather_tokens = lambda x, params: x.repeat(2)
    warm_up.all_to_all_heads = lambda x, group, params: x
    with pytest.raises(RuntimeError) as caught:
        DynamicCPGroups.build(Topology(num_lanes=2), timeout_s=30, exchanges=(exchange,))
    return str(caught.value)


@pytest.mark.by_day("p2p")
@pytest.mark.parametrize(
    ("exchange", "message"),
    [
        ("p2p", "received 0.0, expected 1"),
        ("all_gather", "received [0.0, 0.0], expected [0, 1]"),
        ("a2a", "received [0.0, 0.0], expected [0, 1]"),
    ],
)
def test_warm_up_checks_what_it_receives(exchange: str, message: str) -> None:
    messages = run_ranks(2, return_what_was_sent, exchange, timeout_s=60)
    assert f"dynamic_cp_lanes_0_to_1 ({exchange})" in messages[0]
    assert message in messages[0]


def wait_for_a_hung_peer() -> dict[str, tuple[str, float]]:
    """Return exchange -> (error, seconds until it came) on lane 0; lane 1 of its group hangs, lane 2 is not in it."""
    initialize_model_parallel()
    x_THD = torch.ones(2, 1, 4)
    exchanges = {
        "ring": lambda params: RingShift(x_THD, params.cp_group, params).wait(),
        "all_gather": lambda params: all_gather_tokens(x_THD, params),
        "reduce_scatter": lambda params: reduce_scatter_tokens(x_THD, params),
        "all_to_all": lambda params: all_to_all_heads(x_THD, params.cp_group, params),
        "messages": lambda params: LaneMessages(
            [(1, [x_THD])], [(1, [Expected((2, 1, 4), x_THD.dtype)])], params
        ).wait(),
        "messages_of_all": lambda params: all_to_all_messages(
            [[x_THD]] * 2, [[Expected((2, 1, 4), x_THD.dtype)]] * 2, params
        ),
        "chain": lambda params: layer_pass.begin_chain(
            LaneMessages([], [(1, [Expected((2, 1, 4), x_THD.dtype)])], params, 5).wait, x_THD.device
        ).wait(),
    }
    # A group that timed out is of no use any more: each exchange gets its own.
    groups = {name: DynamicCPGroups.build(Topology(num_lanes=3), timeout_s=1, exchanges=("p2p",)) for name in exchanges}
    if dist.get_rank() == 1:
        time.sleep(9)  # hangs, does not die: a dead peer is noticed at once
    errors = {}
    if dist.get_rank() == 0:
        for name, exchange in exchanges.items():
            group, label = groups[name].group(0, 2), f"step 7, {name}"
            params = params_of((4,), torch.arange(2), group, cp_comm_type="p2p", label=label)
            started_s, began_s = time.monotonic(), patience.now_s()
            with pytest.raises(ExchangeError) as caught:
                exchange(params)
            assert time.monotonic() - started_s > 0.5
            errors[name] = str(caught.value), patience.now_s() - began_s
    return errors


def test_hung_peer_is_named_within_the_timeout() -> None:
    errors, _, _ = run_ranks(3, wait_for_a_hung_peer, timeout_s=60)
    assert len(errors) == 7
    for name, (message, waited_s) in errors.items():
        assert waited_s < 3.5
        assert "imed out" in message
        assert "ranks [0, 1]" in message
        assert f"step 7, {name}" in message
