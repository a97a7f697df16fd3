"""Our cost model and simulator reproduce the frozen prices and plans of benchmarks/planner_cases."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from dynamic_cp.pipeline.simulator import makespan_ns, simulate
from dynamic_cp.types import Bucket
from tests.unit.support import CASES, frozen_cost_model, plan_of_buckets, samples_of

PLANS = sorted((CASES / "plans").glob("*.json"))


def test_bucket_prices():
    with (CASES / "bucket_prices.csv").open() as file:
        rows = list(csv.DictReader(file))
    kinds = set()
    for row in rows:
        cp, pp, vp, tp = (int(row[name]) for name in ("cp", "pp", "vpp", "tp"))
        model = frozen_cost_model(10**6, num_lanes=cp, tp_size=tp, pp_size=pp, vp_size=vp if pp > 1 else 1)
        topology = model.topology
        assert topology.lanes_per_node == int(row["lanes_per_node"])
        cost = model.cost(cp, 0, int(row["T"]), int(row["Q"]))
        assert cost.forward_s == pytest.approx(float(row["forward_s"]), rel=1e-9)
        assert cost.backward_s == pytest.approx(float(row["backward_s"]), rel=1e-9)
        assert cost.p2p_s == pytest.approx(float(row["p2p_s"]), rel=1e-9)
        kinds.add((cp > 1, tp > 1, pp > 1, topology.spans_nodes(0, cp)))
    assert len(rows) == 200
    assert len(kinds) >= 8, "the rows should cover rings in and across nodes, with and without TP and PP"


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_makespan_of_frozen_plan(path):
    case = json.loads(path.read_text())
    lengths = case["lengths"] if "lengths" in case else np.load(CASES / case["lengths_file"]).tolist()
    sizes = {"num_lanes": case["lanes"], "tp_size": case["tp"], "pp_size": case["pp"], "vp_size": case["vpp"]}
    model = frozen_cost_model(case["max_tokens_per_rank"], **sizes)
    samples = samples_of(lengths)
    rows = [
        [Bucket(first_lane=lane, cp_size=cp, samples=tuple(samples[one] for one in held)) for lane, cp, held in row]
        for row in case["microbatches"]
    ]
    plan = plan_of_buckets(*rows, topology=model.topology, max_tokens_per_rank=case["max_tokens_per_rank"])
    timeline = simulate(plan, model)
    assert timeline.makespan_s == pytest.approx(case["makespan_s"], rel=1e-6)
    assert timeline.lane_busy_s == pytest.approx(case["lane_busy_s"], rel=1e-6)
    assert makespan_ns(plan, model) == timeline.makespan_ns
    end_of_lane = dict.fromkeys(range(case["lanes"]), 0.0)
    for span in timeline.spans:
        if span.stage == 0:
            end_of_lane |= {lane: max(end_of_lane[lane], span.end_ns / 1e9) for lane in span.bucket.lanes}
    assert list(end_of_lane.values()) == pytest.approx(case["lane_end_stage0_s"], rel=1e-6)


def test_all_frozen_plans_are_there():
    assert len(PLANS) == 8
