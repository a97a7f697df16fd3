"""Targets of rows for a pipeline: the graph of a lane, its longest path, and how close the profile is to the best."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from dynamic_cp.packing.profile import LaneClasses, Work, _cross, _run, best_profiles
from dynamic_cp.pipeline.longest_path import Grid, longest_path_ns
from dynamic_cp.pipeline.schedule import pipeline_graph

SHAPES = [(2, 1, 1), (2, 5, 1), (4, 3, 1), (4, 9, 1), (2, 4, 2), (3, 6, 2), (4, 8, 3)]


def one_lane(forward, backward):
    shape = (len(forward), 1)
    chunk_ns = np.stack([forward, backward]).reshape(2, *shape).astype(np.int64)
    edges = np.zeros((2, 2, *shape), np.int64)
    return Grid(np.ones(shape, np.int64), chunk_ns, edges, np.zeros(shape, np.int64))


def path(graph, forward, backward):
    """Return (makespan, crossings forward, crossings backward)."""
    durations = np.array([forward, backward], float)[:, :, None]
    ends, makespan, crossed = np.zeros((len(graph.kind) + 1, 1)), np.zeros(1), np.zeros((2, len(forward)))
    _run(graph, durations, ends, makespan)
    _cross(graph, ends, 0, crossed)
    return makespan[0], *crossed


@pytest.mark.parametrize(("pp_size", "num_rows", "vp_size"), SHAPES)
def test_the_longest_path_of_the_graph_is_the_end_of_one_simulated_lane(pp_size, num_rows, vp_size):
    rng = random.Random(pp_size * 100 + num_rows)
    graph = pipeline_graph(pp_size, num_rows, vp_size)
    for _ in range(20):
        forward = np.array([rng.randint(1, 50) for _ in range(num_rows)])
        backward = np.array([rng.randint(1, 99) for _ in range(num_rows)])
        makespan, crossed_forward, crossed_backward = path(graph, forward, backward)
        grid = one_lane(forward, backward)
        assert makespan == longest_path_ns(graph, grid)
        # The path is as long as the operations that it crosses: the counts are its gradient.
        assert makespan == (crossed_forward * forward).sum() + (crossed_backward * backward).sum()


def profile(pp_size, num_rows, vp_size, lanes, total_ns, empty_ns=0.0, ratio=2.0, num_iterations=250):
    makespans, work = profiles(pp_size, num_rows, vp_size, [lanes], total_ns, empty_ns, ratio, num_iterations)
    return makespans[0], work


def profiles(pp_size, num_rows, vp_size, candidates, total_ns, empty_ns=0.0, ratio=2.0, num_iterations=250):
    return best_profiles(
        pipeline_graph(pp_size, num_rows, vp_size),
        LaneClasses(*(np.concatenate(parts) for parts in zip(*candidates, strict=True))),
        np.cumsum([0, *(len(one.num_lanes) for one in candidates)]),
        Work(total_ns, ratio, (empty_ns, 2 * empty_ns), vp_size),
        num_iterations,
    )


def lanes_of(num_lanes, long_ns, ratio=2.0):
    """`long_ns`: [class][row] forward + backward."""
    long_ns = np.array(long_ns, float)
    return LaneClasses(np.array(num_lanes, float), long_ns / (1 + ratio), long_ns * ratio / (1 + ratio))


@pytest.mark.parametrize(("pp_size", "vp_size"), [(2, 1), (4, 1), (2, 2)])
def test_without_long_samples_and_with_many_rows_nothing_beats_the_uniform_profile_by_much(pp_size, vp_size):
    """Uniform rows take (m + (p - 1) / v) W / m; no profile is below the work W itself."""
    num_rows, work_ns = 16 * pp_size, 1e9
    makespan, _ = profile(pp_size, num_rows, vp_size, lanes_of([4.0], [[0.0] * num_rows]), 4 * work_ns)
    uniform = work_ns * (num_rows + (pp_size - 1) / vp_size) / num_rows
    assert work_ns < makespan <= 1.005 * uniform


@pytest.mark.parametrize("pp_size", [2, 3])
def test_one_lane_comes_close_to_the_best_of_all_profiles(pp_size):
    """Brute force over a grid of shares of three rows."""
    num_rows, total_ns, empty_ns = 3, 3e8, 1e6
    graph = pipeline_graph(pp_size, num_rows, 1)
    best = np.inf
    for parts in itertools.product(range(41), repeat=2):
        if sum(parts) <= 40:
            work = np.array([*parts, 40 - sum(parts)]) * total_ns / 40
            best = min(best, path(graph, empty_ns + work / 3, 2 * empty_ns + work * 2 / 3)[0])
    makespan, work = profile(pp_size, num_rows, 1, lanes_of([1.0], [[0.0] * 3]), total_ns, empty_ns)
    assert makespan == pytest.approx(path(graph, empty_ns + work[0] / 3, 2 * empty_ns + work[0] * 2 / 3)[0], rel=1e-6)
    assert makespan <= 1.03 * best


def test_the_work_of_the_long_rows_may_be_all_there_is():
    """One sample alone: other rows are empty, and nothing is divided by zero."""
    for empty_ns in (0.0, 1e4):
        makespan, work = profile(
            3, 9, 1, lanes_of([2.0, 1.0], [[0.0] * 4 + [6e6] + [0.0] * 4, [0.0] * 9]), 1.2e7, empty_ns
        )
        assert np.isfinite(makespan)
        assert np.isfinite(work).all()
        assert makespan >= 3 * 6e6
