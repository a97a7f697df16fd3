"""What of the gradient reduction and the gathering of parameters no computation hides, by hand and by events."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.edges import Edges, Reduction, ddp_bucket_size
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import DataParallel, Topology
from tests.unit.support import CURVED_HARDWARE, TINY_MODEL, problem_of, samples_of

OVERLAPPED = DataParallel(overlap_grad_reduce=True, overlap_param_gather=True)
FAST_COLLECTIVES = replace(CURVED_HARDWARE, collective_bandwidth_in_node_bytes_per_s=1e9)


def edges(last_s: float, end_s: float = 10.0, first_s: float = 1.0) -> Edges:
    """Return the edges of one stage with one chunk on one lane."""
    return Edges(*(np.full((1, 1, 1), value) for value in (0.0, first_s, end_s, last_s)))


def of(reduce_s: float, gather_s: float = 0.0, num_buckets: int = 4, *, hides: bool = True) -> Reduction:
    return Reduction(np.array([reduce_s]), np.array([gather_s]), num_buckets, hides, hides)


@pytest.mark.parametrize(
    ("reduction", "last_s", "exposed_s"),
    [(of(2.0, hides=False), 8.0, 2.0), (of(2.0), 8.0, 0.5), (of(2.0), 1.0, 1.25), (of(2.0, num_buckets=1), 8.0, 2.0)],
)
def test_what_the_last_backward_pass_hides_by_hand(reduction: Reduction, last_s: float, exposed_s: float) -> None:
    assert reduction.exposed_s(edges(last_s), 10.0) == pytest.approx(exposed_s)


def test_bucket_size_does_not_follow_the_lanes_of_a_static_group() -> None:
    assert [ddp_bucket_size(*sizes) for sizes in ((16, 1), (128, 1), (128, 4))] == [40_000_000, 128_000_000, 40_000_000]


def test_parameters_are_awaited_by_the_first_forward_pass() -> None:
    assert of(0.0, 2.0).exposed_s(edges(1.0, first_s=8.0), 10.0) == pytest.approx(0.5)
    assert of(0.0, 2.0).exposed_s(edges(1.0, first_s=1.0), 10.0) == pytest.approx(1.25)


def bucket_by_bucket_s(reduction: Reduction, found: Edges) -> float:
    """Return when the last bucket of each stage is reduced, one event after the other."""
    ends = []
    num_stages, num_chunks, _ = found.last_s.shape
    for stage in range(num_stages):
        now = 0.0
        for chunk in reversed(range(num_chunks)):
            buckets = reduction.num_buckets if stage == chunk == 0 else 1
            for bucket in range(1, buckets + 1):
                left = found.last_s[stage, chunk] * (1 - bucket / buckets)
                ready = (found.last_end_s[stage, chunk] - left).max()
                now = max(now, ready) + reduction.reduce_s[stage] / num_chunks / buckets
        ends.append(now)
    return max(ends)


@pytest.mark.parametrize("seed", range(20))
def test_the_closed_form_is_what_events_give(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 5, 3))
    last_s = rng.uniform(0.1, 1.0, shape)
    # Chunks of a stage end one after the other, the first one last.
    last_end_s = (
        5.0 + rng.uniform(0.0, 1.0, (shape[0], 1, 1)) - np.arange(shape[1])[None, :, None] * rng.uniform(0.5, 2)
    )
    found = Edges(np.zeros(shape), last_s, np.broadcast_to(last_end_s, shape), last_s)
    reduce_s = rng.uniform(0.0, 3.0, shape[0])
    reduction = Reduction(reduce_s, np.zeros(shape[0]), int(rng.integers(1, 9)), True, True)
    makespan_s = float(found.last_end_s.max())
    assert makespan_s + reduction.exposed_s(found, makespan_s) == pytest.approx(bucket_by_bucket_s(reduction, found))


@pytest.mark.parametrize(("pp_size", "vp_size"), [(1, 1), (2, 1), (2, 2)])
def test_overlapping_shortens_a_step_and_changes_no_plan(pp_size: int, vp_size: int) -> None:
    topology, model = Topology(num_lanes=4, pp_size=pp_size, vp_size=vp_size), replace(TINY_MODEL, vocab_size=10**7)
    problem = problem_of(topology, model, FAST_COLLECTIVES, max_tokens_per_rank=4096)
    samples = samples_of([4000, 3000, 900, 800, 700, 600] * 3)
    exposed = plan_problem(replace(problem, data_parallel=DataParallel()), samples)
    overlapped = plan_problem(replace(problem, data_parallel=OVERLAPPED), samples)
    assert overlapped.plan == exposed.plan
    assert overlapped.predicted_s < exposed.predicted_s
    prices = CostModel(replace(problem, data_parallel=OVERLAPPED))
    timeline = simulate(overlapped.plan, prices)
    assert overlapped.predicted_s == timeline.iteration_s >= timeline.makespan_s + prices.reduction.least_s


def test_an_optimizer_that_lanes_do_not_share_reduces_whole_gradients_and_gathers_nothing() -> None:
    """An all-reduce is a reduce-scatter and an all-gather of gradients, and hides as they do."""
    problem = problem_of(Topology(num_lanes=4), hardware=FAST_COLLECTIVES)
    shared = Reduction.of(problem)
    whole = DataParallel(distributed_optimizer=False, overlap_grad_reduce=True)
    alone = Reduction.of(replace(problem, data_parallel=whole))
    assert shared.gather_s[0] > 0
    assert alone.reduce_s[0] == 2 * shared.reduce_s[0]
    assert alone.gather_s[0] == alone.least_s == 0
