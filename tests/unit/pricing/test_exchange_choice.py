"""The planner finds out by itself when an exchange pays: on the frozen prices, extended by all-to-alls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner.exchanges import ALL, GOALS, RING, SHARE_GOAL, token_shares, with_exchanges
from benchmarks.planner.frozen import frozen_cases, frozen_problem, lengths_of
from dynamic_cp.packing.durations import durations_of
from dynamic_cp.packing.lane_blocks import widths_of
from dynamic_cp.packing.rows import alone_ns
from dynamic_cp.plans.validate import check_plan
from tests.unit.support import causal


def problem_of(name: str, seed: int, nic_gb_per_s: float | None = None):
    case = next(case for case in frozen_cases() if (case["case"], case["seed"]) == (name, seed))
    problem = frozen_problem(name, case, lengths_of(case))
    if nic_gb_per_s is None:
        return problem
    hardware = replace(problem.hardware, bandwidth_across_nodes_bytes_per_s=nic_gb_per_s * 1e9)
    return replace(problem, hardware=hardware)


def planned(problem, exchanges):
    free = with_exchanges(problem, exchanges)
    plan = free.planned().plan
    check_plan(plan, free.samples)
    return free.seconds(plan), plan


@pytest.mark.parametrize(("name", "seed"), GOALS)
def test_a_hierarchy_reaches_the_prototype(name, seed):
    seconds, plan = planned(problem_of(name, seed), ALL)
    assert seconds <= GOALS[name, seed]
    assert token_shares(plan)["a2a+p2p"] > 0.2


def test_one_dominating_sample_gains_most():
    problem = problem_of("real_github_bal_pp8_n32_128k", 0)
    (flat_s, flat), (seconds, plan) = planned(problem, RING), planned(problem, ALL)
    assert seconds <= SHARE_GOAL * flat_s
    assert max(flat.cp_histogram) == 8 < max(plan.cp_histogram) == 32
    longest = max(plan.buckets, key=lambda bucket: max((one.seqlen for one in bucket.samples), default=0))
    assert (longest.cp_size, longest.cp_comm_type, longest.inner_cp_size) == (32, "a2a+p2p", 8)


@pytest.mark.parametrize(
    ("exchanges", "kv_groups", "widest"), [(RING, 40, 8), (RING, 8, 32), (ALL, 40, 32), (ALL, 8, 32)]
)
def test_blocks_are_as_wide_as_the_largest_group_that_pays(exchanges, kv_groups, widest):
    problem = with_exchanges(problem_of("github_pp8_n32_128k", 0), exchanges)
    problem = replace(problem, model=replace(problem.model, num_query_groups=kv_groups))
    longest = np.sort(problem.seqlens)[-1:]
    durations = durations_of(problem.cost_model.table, problem.topology.num_lanes)
    widths = [1 << k for k in widths_of(alone_ns(causal(longest), durations, 6)[:, 0], 1)]
    assert widths[0] == widest
    assert min(widths) >= 8, "the longest sample does not fit narrower blocks"
