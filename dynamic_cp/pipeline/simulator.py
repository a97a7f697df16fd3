"""Exact times of a plan by `longest_path`, the compiled kernel for Megatron-Core's schedule, which has the rules.

Times are whole nanoseconds, so two candidates compare the same on every CPU. There is no barrier between micro-batches,
nor between lanes that share neither bucket nor experts. Limits: a group's operation is one event (how its lanes wait
for each other inside it is part of its price); a hop takes no time of its sender, and links are not shared.
"""

from __future__ import annotations

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.errors import IllegalPlanError, UnsupportedFeatureError
from dynamic_cp.pipeline.longest_path import Grid, couple_lanes, end_times, longest_path_ns
from dynamic_cp.pipeline.schedule import BACKWARD, FORWARD, Graph, pipeline_graph
from dynamic_cp.pipeline.timeline import Timeline, durations_ns
from dynamic_cp.plans.extension import kind_of
from dynamic_cp.plans.padding import lane_tokens_of
from dynamic_cp.pricing.cost_model import CostModel, lane_costs, nanoseconds
from dynamic_cp.pricing.edges import Edges
from dynamic_cp.types import Plan, Topology


def simulate(plan: Plan, cost_model: CostModel, *, grid: Grid | None = None) -> Timeline:
    """Return the timeline of `plan`.

    Args:
        plan: a plan that passes `check_plan`.
        cost_model: prices of its buckets.
        grid: `grid_of(plan, cost_model)` where the caller has it; pricing takes longer than simulating.
    """
    topology = plan.topology
    grid = grid_of(plan, cost_model) if grid is None else grid
    graph = pipeline_graph(topology.pp_size, plan.num_microbatches, topology.vp_size)
    ends_ns = np.empty((len(graph.kind), topology.num_lanes), np.int64)
    end_times(graph, grid, ends_ns)
    edges = _edges(topology, grid, graph, ends_ns)
    return Timeline(
        plan=plan,
        grid=grid,
        graph=graph,
        ends_ns=ends_ns,
        gradient_reduction_s=cost_model.reduction.exposed_s(edges, float(ends_ns.max()) / 1e9),
    )


def _edges(topology: Topology, grid: Grid, graph: Graph, ends_ns: Ints) -> Edges:
    """Return the first forward and the last backward pass of every model chunk."""
    shape = topology.pp_size, topology.vp_size, topology.num_lanes
    starts_s, ends_s, lasts_s = np.zeros(shape), np.zeros(shape), np.zeros((2, *shape))
    for kind, micro_batch in ((FORWARD, 0), (BACKWARD, graph.micro_batch.max())):
        which = np.flatnonzero((graph.kind == kind) & (graph.micro_batch == micro_batch))
        places = graph.stage[which], graph.chunk[which]
        lasts_s[kind][places] = durations_ns(grid, graph, which) / 1e9
        ends_s[places] = ends_ns[which] / 1e9
        if kind == FORWARD:
            starts_s[places] = ends_s[places] - lasts_s[kind][places]
    return Edges(starts_s, lasts_s[FORWARD], ends_s, lasts_s[BACKWARD])


def makespan_ns(plan: Plan, cost_model: CostModel) -> int:
    """Return only the makespan of `plan` in nanoseconds."""
    topology = plan.topology
    graph = pipeline_graph(topology.pp_size, plan.num_microbatches, topology.vp_size)
    return longest_path_ns(graph, grid_of(plan, cost_model))


def grid_of(plan: Plan, cost_model: CostModel) -> Grid:
    """Return the durations of `plan`: one model chunk takes 1 / vp_size of its stage, edges and hops are whole. Raises
    IllegalPlanError: the buckets of a micro-batch do not tile the lanes; the kernel relies on it. Raises
    UnsupportedFeatureError: a plan of a kind that runs on another schedule."""
    kind = kind_of(plan)
    if kind is not None:
        raise UnsupportedFeatureError(kind.why_no_timeline(plan))
    num_lanes, vp_size = plan.topology.num_lanes, plan.topology.vp_size
    sizes: list[int] = []
    repeats: list[int] = []
    prices_ns: list[tuple[int, ...]] = []
    for index, micro_batch in enumerate(plan.micro_batches):
        lane = 0
        for bucket in micro_batch.buckets:
            if bucket.first_lane != lane:
                break
            lane += bucket.cp_size
            sizes.append(bucket.cp_size)
        if lane != num_lanes:
            raise IllegalPlanError(
                f"micro-batch {index} covers lanes 0 .. {lane - 1} in order, there are {num_lanes} lanes: "
                "list buckets in lane order, each lane exactly once",
                micro_batch=index,
            )
        for num_lanes_alike, cost in lane_costs(micro_batch, cost_model):
            repeats.append(num_lanes_alike)
            prices_ns.append(
                (
                    nanoseconds(cost.forward_s / vp_size),
                    nanoseconds(cost.backward_s / vp_size),
                    nanoseconds(cost.embedding_forward_s),
                    nanoseconds(cost.embedding_backward_s),
                    nanoseconds(cost.head_forward_s),
                    nanoseconds(cost.head_backward_s),
                    nanoseconds(cost.p2p_s),
                )
            )
    of_lane = np.repeat(np.array(prices_ns, np.int64).reshape(-1, 7).T, repeats, axis=1)
    of_lane = np.ascontiguousarray(of_lane).reshape(7, plan.num_microbatches, num_lanes)
    grid = Grid(
        sizes=np.repeat(sizes, sizes).reshape(plan.num_microbatches, num_lanes),
        chunk_ns=of_lane[:2],
        edge_ns=of_lane[2:6].reshape(2, 2, plan.num_microbatches, num_lanes),
        hop_ns=of_lane[6],
    )
    if plan.topology.expert_lanes > 1:
        couple_lanes(grid, lane_tokens_of(plan).astype(np.float64), cost_model.table, vp_size)
    return grid
