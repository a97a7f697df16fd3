"""The order of the rows of a packing matters to a pipeline: simulates a few, unless none can be fast enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.packing.judge import grid_of_packing, makespan_of_grid_ns
from dynamic_cp.packing.table import Packing, pyramid, reordered
from dynamic_cp.pipeline.longest_path import Grid
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.lengths import Lengths

ORDERS = ("pyramid", "descending", "ascending")
"""Packers make descending rows."""


def in_orders(
    lengths: Lengths,
    packing: Packing,
    cost_model: CostModel,
    orders: Sequence[str] = ORDERS,
    best_ns: int | None = None,
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
    if best_ns is not None and least_ns(grid, cost_model) >= best_ns:
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
