"""Lanes that share experts: their price from its definition, an independent simulation, and lists that deadlock."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dynamic_cp.pipeline.simulator import grid_of, makespan_ns, simulate
from dynamic_cp.plans.padding import rank_tokens
from dynamic_cp.pricing.cost_model import BucketCost, CostModel
from dynamic_cp.pricing.experts import ranks_of_block_in_node
from dynamic_cp.types import Bucket, Experts, MicroBatch, Plan, PlanOptions, Problem, Sample, Topology
from tests.unit.pipeline.event_simulator import megatron_lists, play
from tests.unit.support import CURVED_HARDWARE, TINY_MODEL

EXPERTS = Experts(num_experts=16, topk=2, ffn_hidden_size=64, shared_ffn_hidden_size=32)
MODEL = replace(TINY_MODEL, experts=EXPERTS)
HARDWARE = replace(CURVED_HARDWARE, expert_flops_per_s=3e10, expert_extra_tokens=5)
OPTIONS = PlanOptions(max_tokens_per_rank=64, bytes_per_element=4, cp_comm_types=("p2p",))


def random_plan(rng: random.Random, topology: Topology) -> Plan:
    """Every bucket holds a sample, so that its id names its price."""
    rows, sample_id = [], 0
    num_rows = rng.randint(1, 4) * topology.num_microbatches_multiple
    for _ in range(num_rows):
        buckets, lane = [], 0
        while lane < topology.num_lanes:
            sizes = [cp for cp in (1, 2, 4, 8) if lane % cp == 0 and lane + cp <= topology.num_lanes]
            cp_size = rng.choice(sizes)
            sample = Sample(sample_id=sample_id, seqlen=rng.randint(1, 64 * cp_size))
            buckets.append(Bucket(first_lane=lane, cp_size=cp_size, samples=(sample,)))
            sample_id += 1
            lane += cp_size
        rows.append(MicroBatch(buckets=tuple(buckets)))
    return Plan(topology=topology, max_tokens_per_rank=64, micro_batches=tuple(rows))


def waiting_with(lane: int, micro_batch: MicroBatch, block: int) -> set[int]:
    """All lanes that wait for `lane`, by following buckets and blocks until nothing is new."""
    found, new = set(), {lane}
    while new:
        one = new.pop()
        found.add(one)
        bucket = micro_batch.bucket_of_lane(one)
        near = {*bucket.lanes, *range(one // block * block, one // block * block + block)}
        new |= near - found
    return found


def experts_s(tokens: list[float], topology: Topology, recompute: str, imbalance: float) -> tuple[float, float]:
    """Forward and backward seconds of the experts of a block on a stage, from their definition."""
    layers, hidden = MODEL.num_layers / topology.pp_size, MODEL.hidden_size
    mean, most = sum(tokens) / len(tokens), max(tokens)
    weights = 2 * hidden * EXPERTS.ffn_hidden_size
    copies = EXPERTS.topk * imbalance * mean / topology.tp_size
    gemms = 2 * weights * (copies + EXPERTS.num_experts / topology.ep_size * 5) / 3e10
    copy_bytes = 4 * hidden
    sorting = 4 * copies * copy_bytes / HARDWARE.memory_bandwidth_bytes_per_s
    routed = EXPERTS.topk * max(most, imbalance * mean) * copy_bytes / topology.tp_size
    near = ranks_of_block_in_node(topology)
    in_node, across = near - 1, topology.ep_size - near
    link = max(1e8, HARDWARE.collective_bandwidth_in_node_bytes_per_s)
    sent = routed / topology.ep_size * (in_node / link + across / 2e7) + HARDWARE.exchange_latency_s_per_layer
    forward = layers * (gemms + sorting + 2 * sent)
    backward = layers * (2 * gemms + sorting + 2 * sent)
    return forward, backward + (forward if recompute == "full" else 0)


@pytest.mark.by_day("3")
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_the_price_and_an_independent_event_driven_simulation(seed):
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    for _ in range(50):
        ep_size, tp_size = rng.choice([2, 4, 8]), rng.choice([1, 1, 2])
        pp_size = rng.choice([1, 1, 2, 3])
        topology = Topology(
            num_lanes=rng.choice([8, 16, 24]), ep_size=ep_size, tp_size=tp_size, pp_size=pp_size,
            vp_size=rng.choice([1, 2]) if pp_size > 1 else 1, ranks_per_node=rng.choice([2, 4, 8]),
        )  # fmt: skip
        recompute, imbalance = rng.choice(["none", "full"]), rng.choice([1.0, 1.3])
        shape = replace(MODEL, experts=replace(EXPERTS, imbalance=imbalance))
        if topology.expert_lanes == 1:
            continue
        model = CostModel(
            Problem(topology=topology, model=shape, hardware=HARDWARE, options=replace(OPTIONS, recompute=recompute))
        )
        plan = random_plan(rng, topology)
        costs = {bucket.samples[0].sample_id: model.bucket_cost(bucket) for bucket in plan.buckets}
        longer: Counter[tuple[str, int, int]] = Counter()
        for row, micro_batch in enumerate(plan.micro_batches):
            held = {lane: rank_tokens(bucket, 1) for bucket in micro_batch.buckets for lane in bucket.lanes}
            own = {lane: costs[bucket.samples[0].sample_id] for bucket in micro_batch.buckets for lane in bucket.lanes}
            for lane in range(topology.num_lanes):
                together = waiting_with(lane, micro_batch, topology.expert_lanes)
                blocks = {one // topology.expert_lanes for one in together}
                for direction, kind in enumerate("FB"):
                    tokens = [
                        [held[one] for one in together if one // topology.expert_lanes == block] for block in blocks
                    ]
                    experts = max(experts_s(each, topology, recompute, imbalance)[direction] for each in tokens)
                    longest = max(round(own[one][direction] / topology.vp_size * 1e9) for one in together)
                    whole = longest + experts / topology.vp_size * 1e9
                    mine = round(own[lane][direction] / topology.vp_size * 1e9)
                    longer[kind, row, lane] = found = grid_ns(plan, model, direction, row, lane) - mine
                    assert found == pytest.approx(whole - mine, rel=1e-9, abs=1.01)
                seen["several blocks wait"] += len(blocks) > 1
                seen["several buckets wait"] += len({micro_batch.bucket_of_lane(one) for one in together}) > 1
        lists = megatron_lists(plan)
        groups = [
            {lane: waiting_with(lane, row, topology.expert_lanes) for lane in range(topology.num_lanes)}
            for row in plan.micro_batches
        ]
        expected = play(plan, costs, lists, longer, groups)
        assert expected.finished
        timeline = simulate(plan, model)
        assert timeline.makespan_ns == expected.makespan_ns == makespan_ns(plan, model)
        for name in ("busy_ns", "pipeline_bubble_ns", "cp_wait_ns", "dp_wait_ns"):
            found = Counter({place: int(ns) for place, ns in np.ndenumerate(getattr(timeline.split, name)) if ns})
            assert found == +getattr(expected, name), name
        seen["pipelines"] += pp_size > 1
        seen["interleaved"] += topology.vp_size > 1
        seen["TP ranks share experts"] += tp_size > 1
        seen["across nodes"] += ranks_of_block_in_node(topology) < topology.ep_size
    assert len(seen) == 6
    assert min(seen.values()) > 3, seen


def grid_ns(plan: Plan, model: CostModel, direction: int, row: int, lane: int) -> int:
    if grid_ns.of is not plan:
        grid_ns.of, grid_ns.grid = plan, grid_of(plan, model)
    return int(grid_ns.grid.chunk_ns[direction, row, lane])


grid_ns.of = None


def test_experts_of_one_lane_are_part_of_its_price():
    """EP 1, and EP among the TP ranks of a lane: no lane waits for another, and all sums agree."""
    for topology in (Topology(num_lanes=2), Topology(num_lanes=2, tp_size=2, ep_size=2)):
        model = CostModel(Problem(topology=topology, model=MODEL, hardware=HARDWARE, options=OPTIONS))
        dense = CostModel(
            Problem(topology=replace(topology, ep_size=1), model=TINY_MODEL, hardware=HARDWARE, options=OPTIONS)
        )
        assert model.table.expert_lanes == 1
        one = model.cost(1, 0, 40, 0).forward_s - model.cost(1, 0, 20, 0).forward_s
        more, nothing = (
            experts_s([tokens], topology, "none", MODEL.imbalance(topology.ep_size))[0] for tokens in (20.0, 0.0)
        )
        if topology.ep_size == 1:  # nothing is sent
            latency_s = 2 * MODEL.num_layers * HARDWARE.exchange_latency_s_per_layer
            nothing -= latency_s
            more -= latency_s
        layer = MODEL.layer
        own = 2 * (layer.linear_weights - layer.expert_weights) / HARDWARE.linear_flops_per_s
        copying = 4 * layer.routed_channels * 4 / HARDWARE.memory_bandwidth_bytes_per_s
        one_s = 20 * MODEL.num_layers / topology.tp_size * (own + copying)
        tensor = dense.cost(1, 0, 40, 0).forward_s - dense.cost(1, 0, 20, 0).forward_s
        tensor -= 20 * MODEL.num_layers / topology.tp_size * 2 * TINY_MODEL.layer.linear_weights / 5e10
        assert one == pytest.approx(one_s + tensor + more - nothing, rel=1e-9)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_another_order_on_one_lane_of_a_block_deadlocks(ep_size):
    """Two micro-batches of CP size 1: without EP lanes may run them in any order, with EP only in the same one."""
    samples = [Sample(sample_id=index, seqlen=8) for index in range(4)]
    buckets = [Bucket(first_lane=index % 2, samples=(sample,)) for index, sample in enumerate(samples)]
    rows = MicroBatch(buckets=tuple(buckets[:2])), MicroBatch(buckets=tuple(buckets[2:]))
    plan = Plan(topology=Topology(num_lanes=2, ep_size=ep_size), max_tokens_per_rank=64, micro_batches=rows)
    lists = megatron_lists(plan)
    groups = [{lane: waiting_with(lane, row, ep_size) for lane in range(2)} for row in rows]
    costs = dict.fromkeys(range(4), BucketCost(1e-3, 2e-3, 0.0))
    assert play(plan, costs, lists, waiting=groups).finished
    lists[0, 1] = [*lists[0, 1][2:], *lists[0, 1][:2]]
    assert play(plan, costs, lists, waiting=groups).finished == (ep_size == 1)
