"""Plans for lanes that share experts are close to what no plan beats; those that do not know of the waits are not."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from benchmarks.planner.experts import GOAL, SETTINGS, problem_of
from dynamic_cp.decide.bounds import lower_bound
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Experts, Topology
from tests.unit import support
from tests.unit.support import TINY_MODEL, samples_of

CASES = tuple(one for one in SETTINGS if one.pp == 1 and one.samples <= 512)


def test_level_rows_are_close_to_what_no_plan_beats():
    over_bound, over_plan = [], []
    for setting in CASES:
        problem = problem_of(setting)
        plan = problem.planned().plan
        check_plan(plan, problem.samples)
        ignorant = problem_of(setting, ep_size=1).planned().plan
        seconds, bound = problem.seconds(plan), lower_bound(problem.samples, problem.cost_model)
        ignorant_s = problem.seconds(replace(ignorant, topology=problem.topology))
        assert bound.seconds <= seconds <= 1.06 * bound.seconds, setting.name
        assert seconds <= 1.001 * ignorant_s, setting.name  # a packer that sees no coupling may be lucky
        over_bound.append(seconds / bound.seconds)
        over_plan.append(ignorant_s / seconds)
    assert len(over_bound) >= 7
    assert fmean(over_bound) <= GOAL
    assert max(over_plan) > 1.1
    assert sum(one > 1.01 for one in over_plan) >= 4


def test_placed_attention_is_refused_where_lanes_share_experts():
    shape = replace(TINY_MODEL, experts=Experts(num_experts=4, topk=1, ffn_hidden_size=64))
    topology = Topology(num_lanes=4, ep_size=4)

    def planned(*exchanges):
        problem = support.problem_of(topology, shape, max_tokens_per_rank=64, cp_comm_types=exchanges)
        return plan_problem(problem, samples_of([100, 40, 9]))

    with pytest.raises(UnsupportedFeatureError, match="blocks may cut blocks of 4 lanes that share experts"):
        planned("blocks")
    assert planned("p2p", "blocks").plan == planned("p2p").plan
