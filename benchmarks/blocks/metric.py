"""What a placement moves and how even it is: counted from its homes and tiles alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.placement.placed import Placed
from dynamic_cp.types.placement import HOLDER, LANE, START, STOP, PlacementProblem


class Traffic(NamedTuple):
    """Bytes of one forward pass, and balance.

    Attributes:
        direct_bytes: between nodes, where each lane fetches all that it needs for itself.
        multicast_bytes: between nodes, where a home crosses to a node once, and outputs are summed before they leave.
        node_bytes: within nodes, where each lane fetches all that it needs from lanes of its node for itself.
        work_imbalance: touched pairs of the busiest lane over the mean.
        token_imbalance: tokens of the fullest lane over the mean.
    """

    direct_bytes: int
    multicast_bytes: int
    node_bytes: int
    work_imbalance: float
    token_imbalance: float


def traffic_of(placed: Placed, problem: PlacementProblem) -> Traffic:
    """Return what `placed` moves: `row_bytes` per token of queries used elsewhere, `column_bytes` per token of keys."""
    homes, tiles = placed.homes.astype(np.int64), placed.tiles.astype(np.int64)
    sizes = homes[:, STOP] - homes[:, START]
    direct = multicast = inside = 0
    for side, token_bytes in enumerate((problem.row_bytes, problem.column_bytes)):
        home, lane = _distinct(tiles[:, side], tiles[:, LANE], problem.num_lanes)
        is_away = homes[home, HOLDER] // problem.node_lanes != lane // problem.node_lanes
        direct += token_bytes * int(sizes[home[is_away]].sum())
        inside += token_bytes * int(sizes[home[~is_away & (homes[home, HOLDER] != lane)]].sum())
        home, _ = _distinct(home[is_away], lane[is_away] // problem.node_lanes, problem.num_lanes)
        multicast += token_bytes * int(sizes[home].sum())
    tokens = np.bincount(homes[:, HOLDER], sizes, problem.num_lanes)
    work = np.bincount(tiles[:, LANE], placed.touched, problem.num_lanes)
    return Traffic(direct, multicast, inside, float(work.max() / work.mean()), float(tokens.max() / tokens.mean()))


def _distinct(first: Ints, second: Ints, most: int) -> tuple[Ints, Ints]:
    """Return each pair of numbers once; the second is below `most`."""
    keys = np.unique(first * most + second)
    return keys // most, keys % most
