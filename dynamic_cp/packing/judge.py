"""Prices a packing exactly, tries a few orders of its rows, and makes it a plan.

The array path agrees with `pipeline.simulator` to the nanosecond. The order of rows matters to a pipeline: a few are
simulated, unless none can be fast enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.packing.durations import Packing, pyramid, reordered, sums_of_buckets
from dynamic_cp.pipeline.longest_path import Grid, couple_lanes, longest_path_ns
from dynamic_cp.pipeline.schedule import pipeline_graph
from dynamic_cp.plans.padding import round_up
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import PriceTable, best_options, price
from dynamic_cp.pricing.work import Lengths
from dynamic_cp.types import STATE_EXCHANGES, Bucket, MicroBatch, Plan, Sample


def num_microbatches_of(packing: Packing, cost_model: CostModel) -> int:
    """Return the rows of `packing`, rounded up to what interleaving needs."""
    return round_up(max(1, packing.num_rows), cost_model.topology.num_microbatches_multiple)


class PricedPacking(NamedTuple):
    """A packing and what each of its buckets pays: everything that a grid of durations or a plan is made of.

    Attributes:
        packing: rows of buckets.
        tokens, squares: [bucket] sums of padded lengths and of their squares, by density.
        price_rows: [bucket] -> row of the price table, the fastest way for it to compute attention on its lanes.
    """

    packing: Packing
    tokens: Floats
    squares: Floats
    price_rows: Ints


def price_packing(lengths: Lengths, packing: Packing, cost_model: CostModel) -> PricedPacking:
    """Return `packing` with the sums of its buckets and the fastest way for each to compute attention.

    Args:
        lengths: the samples.
        packing: rows of buckets.
        cost_model: prices.
    """
    table = cost_model.table
    tokens, squares = sums_of_buckets(
        lengths, packing.bucket_of_sample, packing.log2_cp_sizes, table.multiples, table.rank_token_multiple
    )  # fmt: skip
    price_rows = best_options(table, packing.first_lanes, packing.log2_cp_sizes, tokens, squares)
    return PricedPacking(packing, tokens, squares, price_rows)


def grid_of_packing(lengths: Lengths, packing: Packing, cost_model: CostModel) -> Grid:
    """Return `grid_of_priced` of a packing that is not priced yet."""
    return grid_of_priced(price_packing(lengths, packing, cost_model), cost_model)


def grid_of_priced(priced: PricedPacking, cost_model: CostModel) -> Grid:
    """Return the exact durations of a packing; places that no bucket covers hold their minimal padding sequence."""
    topology, packing = cost_model.topology, priced.packing
    shape = (num_microbatches_of(packing, cost_model), topology.num_lanes)
    grid = Grid(
        np.ones(shape, np.int64),
        np.empty((2, *shape), np.int64),
        np.empty((2, 2, *shape), np.int64),
        np.empty(shape, np.int64),
    )
    fill_grid(grid, cost_model.table, topology.vp_size, priced)
    return grid


def makespan_ns(lengths: Lengths, packing: Packing, cost_model: CostModel) -> int:
    """Return the exact makespan of `packing` in nanoseconds."""
    return makespan_of_grid_ns(grid_of_packing(lengths, packing, cost_model), cost_model)


def makespan_of_grid_ns(grid: Grid, cost_model: CostModel) -> int:
    """Return the exact makespan of the packing whose durations are `grid`, in nanoseconds."""
    topology = cost_model.topology
    return longest_path_ns(pipeline_graph(topology.pp_size, len(grid.sizes), topology.vp_size), grid)


def build_plan(samples: Sequence[Sample], priced: PricedPacking, cost_model: CostModel, policy: str) -> Plan:
    """Return the plan of a packing; free lanes get empty places, interleaving its missing micro-batches.

    Args:
        samples: descending by seqlen, ties by ascending sample_id: the order of the packing's indices.
        priced: rows of buckets, and how each computes attention.
        cost_model: of the prices.
        policy: name of the method.
    """
    topology, packing = cost_model.topology, priced.packing
    contents: list[list[Sample]] = [[] for _ in range(len(packing.rows))]
    for sample, bucket in zip(samples, packing.bucket_of_sample.tolist(), strict=True):
        contents[bucket].append(sample)
    num_microbatches = num_microbatches_of(packing, cost_model)
    empty = [Bucket(first_lane=lane) for lane in range(topology.num_lanes)]
    rows: list[dict[int, Bucket]] = [{} for _ in range(num_microbatches)]
    places = zip(
        packing.rows.tolist(), packing.first_lanes.tolist(), packing.log2_cp_sizes.tolist(),
        priced.price_rows.tolist(), contents, strict=True,
    )  # fmt: skip
    for row, first_lane, k, price_row, inside in places:
        if inside:
            cp_comm_type, inner_cp_size = cost_model.attentions[price_row]
            rows[row][first_lane] = Bucket(
                first_lane=first_lane,
                cp_size=1 << k,
                samples=tuple(inside),
                cp_comm_type=cp_comm_type,
                inner_cp_size=inner_cp_size,
                state_exchange=STATE_EXCHANGES[price_row >= cost_model.first_row_of_states],
            )
    micro_batches = []
    for buckets in rows:
        tiles = []
        lane = 0
        while lane < topology.num_lanes:
            tiles.append(buckets.get(lane, empty[lane]))
            lane += tiles[-1].cp_size
        micro_batches.append(MicroBatch(buckets=tuple(tiles)))
    return Plan(
        topology=topology,
        max_tokens_per_rank=cost_model.options.max_tokens_per_rank,
        micro_batches=tuple(micro_batches),
        policy=policy,
    )


@compiled
def fill_grid(grid: Grid, table: PriceTable, vp_size: int, priced: PricedPacking) -> None:
    """Write the durations of all buckets into `grid`, those of an empty place everywhere else; couple what waits."""
    # An array is taken out of its tuple once: compiled code counts references, and that took most of the time.
    (_, _, rows, first_lanes, log2_cp_sizes), tokens, squares, price_rows = priced
    sizes, all_chunk_ns, all_edge_ns, all_hop_ns = grid
    terms, edges_s_per_token = table.terms, table.edges_s_per_token
    empty = float(table.rank_token_multiple)
    is_coupled = table.expert_lanes > 1
    all_tokens = np.full(sizes.shape if is_coupled else (0, 0), empty)
    for bucket in range(-1, len(rows)):  # -1: an empty place
        if bucket < 0:
            row, first_lane, k, total, total2 = 0, 0, 0, empty, empty * empty
            price_row = table.first_option[0, table.links[0, 0]]
        else:
            row, first_lane, k = rows[bucket], first_lanes[bucket], log2_cp_sizes[bucket]
            total, total2, price_row = tokens[bucket], squares[bucket], price_rows[bucket]
            if total == 0.0:
                continue
        lanes = 1 << k
        rank_tokens = total / lanes
        hop_ns = int(np.rint(rank_tokens * table.hop_s_per_token * 1e9))
        for lane in range(first_lane, first_lane + lanes):
            sizes[row, lane], all_hop_ns[row, lane] = lanes, hop_ns
            if is_coupled:
                all_tokens[row, lane] = rank_tokens
        for direction in range(2):
            chunk_ns = int(np.rint(price(terms, price_row, direction, total, total2) / vp_size * 1e9))
            for lane in range(first_lane, first_lane + lanes):
                all_chunk_ns[direction, row, lane] = chunk_ns
            for edge in range(2):
                edge_ns = int(np.rint(rank_tokens * edges_s_per_token[2 * edge + direction] * 1e9))
                for lane in range(first_lane, first_lane + lanes):
                    all_edge_ns[edge, direction, row, lane] = edge_ns
        if bucket < 0:
            _repeat_first(grid)
    if is_coupled:
        couple_lanes(grid, all_tokens, table, vp_size)


@compiled
def _repeat_first(grid: Grid) -> None:
    """Write what the first lane of the first row has everywhere."""
    sizes, chunk_ns, edge_ns, hop_ns = grid
    sizes[:], hop_ns[:] = sizes[0, 0], hop_ns[0, 0]
    for direction in range(2):
        chunk_ns[direction] = chunk_ns[direction, 0, 0]
        for edge in range(2):
            edge_ns[edge, direction] = edge_ns[edge, direction, 0, 0]


ORDERS = ("pyramid", "descending", "ascending")
"""Packers make descending rows."""


def in_orders(
    lengths: Lengths,
    packing: Packing,
    cost_model: CostModel,
    orders: Sequence[str] = ORDERS,
    best_ns: float = np.inf,
) -> Iterator[tuple[int, str, Packing]]:
    """Yield (makespan in nanoseconds, order, packing) of `packing` with its rows in each of `orders`.

    Args:
        lengths: the samples.
        packing: rows of buckets.
        cost_model: prices, lanes and stages; without a pipeline no order is better than another, and only one comes.
        orders: some of `ORDERS`, or "as packed".
        best_ns: nothing comes where no order can be faster than this.
    """
    grid = grid_of_packing(lengths, packing, cost_model)
    if best_ns < np.inf and least_ns(grid, cost_model) >= best_ns:
        return
    if cost_model.topology.pp_size == 1:
        yield makespan_of_grid_ns(grid, cost_model), "as packed", packing
        return
    for order in orders:
        if order in ("as packed", "descending"):
            yield makespan_of_grid_ns(grid, cost_model), order, packing
            continue
        rows = np.arange(packing.num_rows)[::-1]
        if order == "pyramid":
            rows = pyramid(grid.chunk_ns[:, : packing.num_rows].sum(axis=0).max(axis=1))
        yield makespan_of_grid_ns(_reordered(grid, rows), cost_model), order, reordered(packing, rows)


def least_ns(grid: Grid, cost_model: CostModel) -> int:
    """Return nanoseconds that no order of the rows of `grid` stays below, faster than simulating one.

    The last stage computes everything of a lane, after a first forward on every other stage and before a last backward.
    """
    topology = cost_model.topology
    forward_ns, backward_ns = grid.chunk_ns
    lane_ns = topology.vp_size * (forward_ns + backward_ns).sum(axis=0)
    ramps_ns = (topology.pp_size - 1) * (forward_ns.min(axis=0) + backward_ns.min(axis=0))
    return int((lane_ns + ramps_ns).max())


def _reordered(grid: Grid, order: Ints) -> Grid:
    """Return `grid` with its rows in another order, [new position] -> row; those that interleaving adds stay last."""
    rows = np.concatenate([order, np.arange(len(order), len(grid.sizes))])
    return Grid(grid.sizes[rows], grid.chunk_ns[:, rows], grid.edge_ns[:, :, rows], grid.hop_ns[rows])
