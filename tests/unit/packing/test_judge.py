"""The array judge agrees with the simulator to the nanosecond, on packings that no packer would make."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np

from dynamic_cp.packing.durations import Packing, sums_of_buckets
from dynamic_cp.packing.judge import build_plan, grid_of_packing, makespan_ns, num_microbatches_of, price_packing
from dynamic_cp.pipeline.simulator import grid_of
from dynamic_cp.pipeline.simulator import makespan_ns as simulated_ns
from dynamic_cp.plans.padding import padded_seqlens, rank_multiple, sample_multiple
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import Experts, Topology
from tests.unit.packing.packings import DEEP_MODEL, deep_cost_model, descending
from tests.unit.support import CURVED_HARDWARE, causal, problem_of, samples_of


def random_packing(rng: random.Random, model: CostModel) -> tuple[np.ndarray, Packing]:
    """Return lengths and legal buckets in random places, some of them without samples."""
    num_lanes, table = model.topology.num_lanes, model.table
    num_rows = rng.randint(1, 5)
    buckets = []
    for row in range(num_rows):
        lane = 0
        while lane < num_lanes:
            k = rng.randrange(num_lanes.bit_length())
            if lane % (1 << k) or lane + (1 << k) > num_lanes or table.capacities[k] == 0:
                k = 0
            if rng.random() < 0.7 and table.capacities[k]:
                buckets.append((row, lane, k))
            lane += 1 << k
    rng.shuffle(buckets)
    lengths = []
    for index, (_, _, k) in enumerate(buckets):
        room = int(table.capacities[k])
        for _ in range(rng.randint(0, 4)):
            seqlen = rng.randint(1, max(1, room // 2))
            padded = -(-seqlen // int(table.multiples[k])) * int(table.multiples[k])
            if padded <= room:
                lengths.append((seqlen, index))
                room -= padded
    lengths = sorted(lengths, key=lambda one: -one[0]) or [(1, 0)]
    rows, first_lanes, sizes = (np.array(column) for column in zip(*buckets or [(0, 0, 0)], strict=True))
    of_sample = np.array([index for _, index in lengths])
    return descending(seqlen for seqlen, _ in lengths), Packing(num_rows, of_sample, rows, first_lanes, sizes)


def test_compiled_padding_is_that_of_a_bucket():
    """`padding.py` is the one place; the loops that sum over buckets agree with it."""
    rng = random.Random(11)
    num_missing = 0
    for _ in range(100):
        rank_token_multiple = rng.choice([1, 2, 3, 4, 8])
        sizes = np.array([rng.randrange(5) for _ in range(4)])
        seqlens = descending(rng.randrange(1, 300) for _ in range(12))
        of_sample = np.array([rng.randrange(4) for _ in range(12)])
        multiples = np.array([sample_multiple(1 << k) for k in range(5)])
        tokens, squares = sums_of_buckets(causal(seqlens), of_sample, sizes, multiples, rank_token_multiple)
        for bucket in set(of_sample.tolist()):
            cp_size, held = 1 << sizes[bucket], seqlens[of_sample == bucket].tolist()
            padded = padded_seqlens(held, int(cp_size), rank_token_multiple)
            assert (tokens[bucket], squares[bucket]) == (sum(padded), sum(length**2 for length in padded))
            assert tokens[bucket] % (cp_size * rank_multiple(int(cp_size), rank_token_multiple)) == 0
            num_missing += sum(padded) > sum(padded_seqlens(held, int(cp_size)))
    assert num_missing > 100


def random_model(rng: random.Random) -> CostModel:
    pp_size = rng.choice([1, 2, 3, 4])
    topology = Topology(
        num_lanes=rng.randint(1, 9), tp_size=rng.choice([1, 2, 3, 4]), pp_size=pp_size,
        vp_size=rng.choice([1, 2, 3]) if pp_size > 1 else 1, ranks_per_node=rng.choice([1, 3, 4, 8]),
        sequence_parallel=rng.random() < 0.5,
    )  # fmt: skip
    exchanges = rng.choice([("p2p",), ("all_gather",), ("p2p", "all_gather", "a2a"), ("a2a", "p2p")])
    options = {"max_tokens_per_rank": rng.randint(2 * topology.rank_token_multiple, 90), "cp_comm_types": exchanges}
    if rng.random() < 0.5:
        return deep_cost_model(topology, **options)
    options["recompute"] = rng.choice(["none", "selective", "full"])
    # Many heads and a fast exchange, so that a2a is possible and pays.
    many_heads = replace(DEEP_MODEL, num_attention_heads=16, num_query_groups=16, kv_channels=8)
    hardware = replace(CURVED_HARDWARE, bandwidth_in_node_bytes_per_s=1e9, exchange_latency_s_per_layer=1e-6)
    return CostModel(problem_of(topology, many_heads, hardware, **options))


def test_the_judge_is_the_simulator():
    rng = random.Random(7)
    seen = Counter()
    for _ in range(500):
        model = random_model(rng)
        if model.table.capacities[0] == 0:
            continue
        seqlens, packing = random_packing(rng, model)
        samples = samples_of(seqlens)
        plan = build_plan(samples, price_packing(causal(seqlens), packing, model), model, "random")
        check_plan(plan, samples)
        assert plan.num_microbatches == num_microbatches_of(packing, model)
        assert makespan_ns(causal(seqlens), packing, model) == simulated_ns(plan, model)
        for ours, theirs in zip(grid_of_packing(causal(seqlens), packing, model), grid_of(plan, model), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        exchanges = {bucket.cp_comm_type for bucket in plan.buckets if bucket.cp_size > 1}
        seen["cases"] += 1
        seen["groups"] += len(exchanges) > 0
        seen["mixed exchanges"] += len(exchanges) > 1
        seen["a2a"] += "a2a" in exchanges
        seen["empty places"] += any(not bucket.samples for bucket in plan.buckets)
        seen["missing micro-batches"] += plan.num_microbatches > packing.num_rows
        seen["padded ranks"] += model.topology.rank_token_multiple > 1
        seen["interleaved"] += model.topology.vp_size > 1
    assert len(seen) == 8
    assert min(seen.values()) >= 5, seen


def test_the_judge_is_the_simulator_where_lanes_share_experts():
    rng = random.Random(8)
    seen = Counter()
    experts = Experts(num_experts=8, topk=2, ffn_hidden_size=48, layer_freq=2)
    for _ in range(200):
        pp_size, tp_size = rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
        topology = Topology(
            num_lanes=rng.choice([4, 8, 12]), tp_size=tp_size, pp_size=pp_size, ep_size=rng.choice([2, 4]) * tp_size,
            vp_size=rng.choice([1, 2]) if pp_size > 1 else 1, ranks_per_node=rng.choice([2, 4, 8]),
            sequence_parallel=tp_size > 1,
        )  # fmt: skip
        options = {"max_tokens_per_rank": 64, "cp_comm_types": ("p2p", "all_gather"), "bytes_per_element": 4}
        model = CostModel(problem_of(topology, replace(DEEP_MODEL, experts=experts), **options))
        seqlens, packing = random_packing(rng, model)
        plan = build_plan(samples_of(seqlens), price_packing(causal(seqlens), packing, model), model, "random")
        check_plan(plan, samples_of(seqlens))
        assert makespan_ns(causal(seqlens), packing, model) == simulated_ns(plan, model)
        ours, theirs = grid_of_packing(causal(seqlens), packing, model), grid_of(plan, model)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
        seen["groups wider than a block"] += bool((ours.sizes > topology.expert_lanes).any())
        seen["blocks wider than a group"] += bool((ours.sizes == topology.expert_lanes).any())
        seen["interleaved"] += topology.vp_size > 1
        seen["tp"] += tp_size > 1
    assert len(seen) == 4
    assert min(seen.values()) >= 20, seen
