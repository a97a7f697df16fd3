"""Small timelines that the tests of pictures, traces and pages share."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from dynamic_cp.decide.comparison import Comparison, compare_policies
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.pipeline.timeline import Timeline
from dynamic_cp.placement.legal import tiles_between
from dynamic_cp.placement.sent import Sent, TokenBytes, sent_by_lanes
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import CAUSAL, Bucket, Lambda, Placement, PlanOptions, Sample, Topology
from dynamic_cp.types.placement import Lanes
from tests.unit.support import TINY_HARDWARE, TINY_MODEL, plan_of, problem_of, samples_of, tiny_cost_model

LENGTHS = (900, 500, 310, 250, 200, 130, 90, 64, 33, 20, 11, 7, 5, 3, 2, 1)
CASES = ("usual", "one", "pp8-vp2", "4096-lanes", "mostly-empty", "many-micro-batches")


@cache
def timelines(case: str) -> tuple[tuple[str, Timeline], ...]:
    if case == "4096-lanes":
        topology = Topology(num_lanes=4096)
        rows = [[(lane, 1) for lane in range(4096)], [(lane, 256) for lane in range(0, 4096, 256)]]
        plan = plan_of([*rows, [(0, 4096)]], topology)
        cost_model = tiny_cost_model(topology)
        return ("static", simulate(plan_of(rows, topology), cost_model)), ("dynamic", simulate(plan, cost_model))
    topology, seqlens = {
        "usual": (Topology(num_lanes=8, pp_size=2), LENGTHS),
        "one": (Topology(num_lanes=1), (100,)),
        "pp8-vp2": (Topology(num_lanes=8, pp_size=8, vp_size=2), LENGTHS * 2),
        "mostly-empty": (Topology(num_lanes=16), (900, 3)),
        "many-micro-batches": (Topology(num_lanes=2, pp_size=4), (250,) * 300),
    }[case]
    problem = problem_of(topology, hardware=TINY_HARDWARE, bytes_per_element=4)
    policies = {name: replace(problem, policy=name) for name in ("static", "dynamic")}
    plans = {name: plan_problem(one, samples_of(seqlens)).plan for name, one in policies.items()}
    return tuple((name, simulate(plan, tiny_cost_model(topology))) for name, plan in plans.items())


class PlacedCase(NamedTuple):
    """A placed bucket, what its lanes send, and on which nodes they are."""

    bucket: Bucket
    sent: Sent
    nodes: np.ndarray


@cache
def placed(num_lanes: int, seqlens: tuple[int, ...], home_tokens: int, node_lanes: int = 2) -> PlacedCase:
    """Return samples, causal or with a window, in equal homes on lanes in turn, with tiles anywhere, in two
    divisions."""
    masks = (None, Lambda(home_tokens // 4, home_tokens))
    samples = tuple(Sample(sample_id=i, seqlen=n, mask=masks[i % 2]) for i, n in enumerate(seqlens))
    homes = [
        (number, start, min(start + home_tokens, seqlen))
        for number, seqlen in enumerate(seqlens)
        for start in range(0, seqlen, home_tokens)
    ]
    with_lanes = np.array([(*home, index % num_lanes) for index, home in enumerate(homes)], np.int32)
    wanted = tiles_between(Placement(with_lanes, np.zeros((0, 4), np.int32)), samples, CAUSAL)
    is_own = wanted.rows == wanted.columns
    lanes = (wanted.rows + 2 * wanted.columns) % num_lanes
    tiles = np.column_stack([wanted.rows, wanted.columns, lanes, np.where(is_own, 0, 1)])
    placement = Placement(with_lanes, tiles.astype(np.int32))
    bucket = Bucket(first_lane=0, cp_size=num_lanes, cp_comm_type="blocks", samples=samples, placement=placement)
    nodes = np.arange(num_lanes) // node_lanes
    sent = sent_by_lanes(placement, Lanes(num_lanes, 0, node_lanes), TokenBytes(512.0, 256.0, 32.0))
    return PlacedCase(bucket, sent, nodes)


@cache
def comparison(
    num_batches: int = 3, model_name: str = "tiny", policies: tuple[str, ...] = (), exchange: str = "p2p"
) -> Comparison:
    """Return a comparison of batches that differ."""
    generator = np.random.default_rng(0)
    batches = [
        samples_of(np.minimum(1000, generator.lognormal(4, 1.2, 24).astype(int) + 1)) for _ in range(num_batches)
    ]
    return compare_policies(
        batches, topology=Topology(num_lanes=8, pp_size=2), model=TINY_MODEL, hardware=TINY_HARDWARE,
        options=PlanOptions(max_tokens_per_rank=256, bytes_per_element=4, cp_comm_types=(exchange,)),
        policies=policies or ("dynamic", "static", "balanced"),
        model_name=model_name,
        hardware_name="tiny",
    )  # fmt: skip
