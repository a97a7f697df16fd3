"""Topologies whose ranks hold multiples of 16 or 32 tokens, as FP8 needs: padding, price, memory, plans."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from dynamic_cp.decide.bounds.lower import lower_bound
from dynamic_cp.errors import IllegalPlanError, InvalidInputError
from dynamic_cp.memory.activations import activation_bytes
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.plans.padding import lane_tokens, padded_of, rank_tokens
from dynamic_cp.plans.serialize import digest, dumps, loads, topology_from_dict, topology_to_dict
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Bucket, PlanOptions, Topology
from tests.unit.support import TINY_MODEL, problem_of, samples_of

SEQLENS = [1, 1, 5, 17, 33, 64, 65, 129, 300, 511, 700]


@pytest.mark.parametrize(("tp_size", "alignment"), [(1, 16), (2, 16), (2, 32)])
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_plans_hold_whole_multiples(tp_size, alignment, pp_size, policy):
    topology = Topology(
        num_lanes=4, tp_size=tp_size, pp_size=pp_size, sequence_parallel=tp_size > 1, token_alignment=alignment
    )
    assert topology.rank_token_multiple == tp_size * alignment
    samples = samples_of(SEQLENS)
    problem = replace(problem_of(topology, static_cp_size=4, cp_comm_types=("p2p", "a2a")), policy=policy)
    plan = plan_problem(problem, samples).plan
    check_plan(plan, samples)
    held = [tokens for bucket in plan.buckets for tokens in lane_tokens(bucket, topology.rank_token_multiple)]
    assert all(tokens % (tp_size * alignment) == 0 for tokens in held)
    assert 0 < min(held) <= max(held) <= 256
    model = CostModel(problem)
    assert lower_bound(samples, model).seconds <= makespan_ns(plan, model) / 1e9 * (1 + 1e-9)
    with pytest.raises(IllegalPlanError, match="the limit is"):
        check_plan(replace(plan, max_tokens_per_rank=max(held) - 1), samples)


def test_a_place_without_samples_is_priced_with_what_it_computes():
    plain, aligned = (CostModel(problem_of(Topology(num_lanes=2, token_alignment=k))) for k in (1, 32))
    empty, full = Bucket(first_lane=0), Bucket(first_lane=0, samples=samples_of([32]))
    assert aligned.bucket_cost(empty) == plain.bucket_cost(full) == aligned.bucket_cost(full)
    assert plain.bucket_cost(empty).forward_s < plain.bucket_cost(full).forward_s


def test_only_sequence_parallelism_shares_activations_out():
    options = PlanOptions(max_tokens_per_rank=64, cp_comm_types=("p2p",))
    split = Topology(num_lanes=2, tp_size=2, pp_size=2, sequence_parallel=True)
    aligned = replace(split, token_alignment=16)
    assert activation_bytes(TINY_MODEL, aligned, options) == activation_bytes(TINY_MODEL, split, options)
    hops = [CostModel(problem_of(one)).table.hop_s_per_token for one in (split, aligned)]
    assert hops[0] == hops[1] > 0
    assert MemoryModel(problem_of(aligned, hardware=load_hardware("h100"))).max_tokens_per_rank() % 32 == 0


def test_plans_name_it_where_it_is_there():
    plain, aligned = Topology(num_lanes=2), Topology(num_lanes=2, token_alignment=16)
    assert "token_alignment" not in topology_to_dict(plain)
    assert topology_from_dict(topology_to_dict(aligned)) == aligned
    plan = plan_problem(problem_of(aligned), samples_of([20, 30])).plan
    assert loads(dumps(plan)) == plan
    assert json.loads(dumps(plan))["topology"]["token_alignment"] == 16
    assert digest(plan) != digest(replace(plan, topology=plain))
    with pytest.raises(InvalidInputError, match="token_alignment"):
        Topology(num_lanes=2, token_alignment=0)


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rank_token_multiple", [1, 2, 3, 4, 8, 16, 64])
def test_a_rank_holds_its_share_of_the_padded_lengths(cp_size: int, rank_token_multiple: int) -> None:
    rng = random.Random(f"{cp_size} {rank_token_multiple}")
    for number in (0, 1, 1, 2, 5, 9):
        samples = samples_of([rng.randint(1, 70) for _ in range(number)])
        bucket = Bucket(first_lane=0, cp_size=cp_size, samples=tuple(samples))
        padded = padded_of(bucket, rank_token_multiple)
        tokens = rank_tokens(bucket, rank_token_multiple)
        assert tokens * cp_size == sum(padded)
        assert tokens % rank_token_multiple == 0
        assert all(length >= sample.seqlen for length, sample in zip(padded, samples, strict=False))
        if cp_size > 1:
            assert all(length % (2 * cp_size) == 0 for length in padded[:-1])
            assert tokens % 2 == 0
