"""Bytes that exchanges send, by link, against counting them one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynamic_cp.decide.sent import nodes_of, sent_by_bucket, sent_by_plan
from dynamic_cp.plans.padding import lane_tokens
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import EVERY_LAYER, Bucket, MicroBatch, Plan, Problem, RecomputedLayers, Topology
from tests.sent_bytes import sent_by
from tests.unit import support
from tests.unit.support import TINY_MODEL, plan_of_buckets, samples_of

MODEL = replace(TINY_MODEL, num_attention_heads=16, num_query_groups=4)


def problem_of(topology: Topology, **options: object) -> Problem:
    return support.problem_of(topology, MODEL, max_tokens_per_rank=600, **options)


@pytest.mark.parametrize(
    ("exchange", "cp_size", "inner", "across"),
    [
        # (of 8 lanes on nodes of 2) bytes to other nodes over all bytes
        ("p2p", 8, 1, 4 / 8), ("all_gather", 4, 1, 2 / 4), ("p2p", 2, 1, 0.0), ("a2a", 4, 4, 2 / 3),
        ("a2a", 8, 8, 6 / 7), ("a2a+p2p", 8, 2, None),
    ],
)  # fmt: skip
def test_exchanges_send_what_their_formula_says_over_the_links_of_their_lanes(exchange, cp_size, inner, across):
    topology = Topology(num_lanes=8, tp_size=2, pp_size=2, ranks_per_node=4, sequence_parallel=True)
    bucket = Bucket(
        first_lane=0, cp_size=cp_size, cp_comm_type=exchange, inner_cp_size=inner, samples=tuple(samples_of([300, 41]))
    )
    (tokens,) = set(lane_tokens(bucket, 2))
    one = sent_by(bucket, tokens, MODEL, 2, 2)
    layers, ranks = MODEL.num_layers, cp_size * 2
    attention, others = ("core_attn",), ("mlp", "layernorm")
    for recompute, modules, forward_passes in (
        ("none", attention, 1), ("selective", others, 1), ("selective", attention, 2), ("full", attention, 2)
    ):  # fmt: skip
        problem = problem_of(topology, recompute=recompute, recompute_modules=modules)
        rows = [[bucket, *(Bucket(first_lane=lane) for lane in range(cp_size, 8))]] * 3
        plan = plan_of_buckets(*rows, topology=topology, max_tokens_per_rank=600)
        found = sent_by_plan(plan, problem)
        assert sum(found) == pytest.approx(3 * layers * ranks * (forward_passes * one.forward + one.backward))
        if across is not None:
            assert found.across_nodes == pytest.approx(across * sum(found))
        else:  # heads inside nodes, the ring between them
            assert found.in_node == pytest.approx(3 * layers * ranks * (forward_passes + 1) * one.inner)
    assert sent_by_bucket(bucket, problem).num_bytes.sum() * 2 == pytest.approx(
        layers * ranks * (one.forward + one.backward)
    )


def test_exchanges_of_recomputed_layers_are_sent_once_more():
    """Of chunks of 4, 1, 1 and 2 layers one each, 4 of 8: 2 of 5 on the first stage, 2 of 3 on the second."""
    topology = Topology(num_lanes=6, pp_size=2, vp_size=2, ranks_per_node=4)
    model = replace(MODEL, num_layers=8, pipeline_layers=((4, 1), (1, 2)))
    bucket = Bucket(first_lane=0, cp_size=2, cp_comm_type="p2p", samples=samples_of([300]))
    # On two nodes of the first stage, on one of the second.
    apart = Bucket(first_lane=2, cp_size=4, cp_comm_type="p2p", samples=samples_of([300]))
    plan = Plan(topology=topology, max_tokens_per_rank=600, micro_batches=(MicroBatch(buckets=(bucket, apart)),))

    none, full, block = (
        sent_by_plan(plan, replace(problem_of(topology, recompute=mode, recompute_layers=layers), model=model))
        for mode, layers in (("none", EVERY_LAYER), ("full", EVERY_LAYER), ("full", RecomputedLayers("block", 1)))
    )
    assert sum(block) - sum(none) == pytest.approx((sum(full) - sum(none)) * 4 / 8)
    assert full.across_nodes > none.across_nodes
    assert block.across_nodes - none.across_nodes == pytest.approx((full.across_nodes - none.across_nodes) * 2 / 5)


def test_placed_buckets_send_what_their_lanes_fetch_on_every_stage():
    # 6 lanes on nodes of 4 ranks: the second stage's lanes lie otherwise on nodes.
    topology = Topology(num_lanes=6, pp_size=2, ranks_per_node=4)
    assert nodes_of(topology).tolist() == [0, 0, 0, 0, 1, 1]
    assert nodes_of(topology, 1).tolist() == [1, 1, 2, 2, 2, 2]
    problem = problem_of(topology, cp_comm_types=("blocks",))
    samples = samples_of([1500, 700, 100, 30])
    given = {name: getattr(problem, name) for name in ("topology", "model", "hardware", "options")}
    plan = plan_global_batch(samples, **given).plan
    placed = [bucket for bucket in plan.buckets if bucket.placement is not None]
    assert placed
    wanted = np.zeros(2)
    for bucket in placed:
        sent = sent_by_bucket(bucket, problem)
        wanted += sum(0.5 * sent.of_lanes(nodes_of(topology, stage)).sum(axis=(0, 2)) for stage in (0, 1))
    assert sent_by_plan(plan, problem) == pytest.approx(tuple(wanted))
    assert wanted.min() > 0
