"""Heat map of the CP sizes of plans: lanes × micro-batches. A CP group is one tile over its lanes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.decide.report.drawing import (
    MEDIUM_IN,
    Rectangle,
    add_legend,
    add_rectangles,
    frame_map,
    name_cells,
    stacked,
)
from dynamic_cp.decide.report.gantt import cp_legend
from dynamic_cp.decide.report.theme import Theme
from dynamic_cp.types import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_LANES, _MAX_MICRO_BATCHES = 64, 96


def cp_map(plans: Sequence[tuple[str, Plan]], theme: Theme, *, width_in: float = MEDIUM_IN) -> Figure:
    """Return the picture of (policy, plan) pairs, one above the other. In large plans a tile shows the largest CP size
    of several lanes or micro-batches. Micro-batches of padding alone are left out. The picture says so."""
    sizes_of = [_cp_sizes(plan) for _, plan in plans]
    used = [np.flatnonzero(one.any(axis=0)) for one in sizes_of]
    grids = [_reduced(one[:, columns]) for one, columns in zip(sizes_of, used, strict=True)]
    heights = [min(1.9, max(0.5, 0.07 * len(grid))) for grid in grids]
    figure, panels = stacked(width_in, heights, each_in=0.62, rest_in=0.75)
    sizes: set[int] = set()
    for panel, grid, columns, (name, plan) in zip(panels, grids, used, plans, strict=True):
        _draw(panel, grid, -(-plan.topology.num_lanes // _MAX_LANES), theme)
        sizes |= set(np.unique(grid).tolist())
        _describe(panel, name, plan, columns.tolist())
    entries = cp_legend(sizes - {0}, theme) + [("only padding", theme.empty)] * (0 in sizes)
    add_legend(figure, entries, width_in=width_in, title="CP size")
    return figure


def _cp_sizes(plan: Plan) -> Ints:
    """Return [lane, micro-batch] -> CP size, 0 for a place with padding alone."""
    sizes = np.zeros((plan.topology.num_lanes, plan.num_microbatches), np.int64)
    for column, micro_batch in enumerate(plan.micro_batches):
        for bucket in micro_batch.buckets:
            if bucket.samples:
                sizes[bucket.first_lane : bucket.lanes.stop, column] = bucket.cp_size
    return sizes


def _reduced(sizes: Ints) -> Ints:
    """Return the largest CP size of every block of lanes and micro-batches, at most _MAX_LANES x _MAX_MICRO_BATCHES."""
    lanes, columns = (-(-n // most) for n, most in zip(sizes.shape, (_MAX_LANES, _MAX_MICRO_BATCHES), strict=True))
    sizes = np.maximum.reduceat(sizes, np.arange(0, sizes.shape[0], lanes), axis=0)
    reduced: Ints = np.maximum.reduceat(sizes, np.arange(0, sizes.shape[1], columns), axis=1)
    return reduced


def _draw(panel: Axes, grid: Ints, lanes_per_row: int, theme: Theme) -> None:
    tiles: dict[int, list[Rectangle]] = defaultdict(list)
    for column, sizes in enumerate(grid.T.tolist()):
        row = 0
        while row < len(sizes):
            size = sizes[row]
            run = next((i for i, other in enumerate(sizes[row:]) if other != size), len(sizes) - row)
            # Each group of this size is a tile of its own; padding, which needs no group, is one tile.
            height = min(run, max(1, size // lanes_per_row)) if size else run
            tiles[size].append(Rectangle(column, column + 1, row, row + height))
            row += height
    for size, rectangles in sorted(tiles.items()):
        color = theme.cp_color(size) if size else theme.empty
        add_rectangles(panel, rectangles, color, edgecolor=theme.background, linewidth=0.5)
    frame_map(panel, last_x=grid.shape[1], last_y=len(grid))


def _describe(panel: Axes, name: str, plan: Plan, used: Sequence[int]) -> None:
    """Name the axes; `used` are the micro-batches that are drawn."""
    num_lanes = plan.topology.num_lanes
    lanes, columns = -(-num_lanes // _MAX_LANES), -(-len(used) // _MAX_MICRO_BATCHES)
    panel.set_title(name, fontweight="bold", pad=4)
    notes = [f"each column the largest of {columns}"] * (columns > 1)
    if len(used) < plan.num_microbatches:
        notes.append(f"without {plan.num_microbatches - len(used)} of padding")
    panel.set_xlabel("micro-batch" + (f" ({', '.join(notes)})" if notes else ""))
    panel.set_ylabel(f"lane (rows of {lanes})" if lanes > 1 else "lane")
    named = (list(used[::columns]), list(range(0, num_lanes, lanes)))
    for axis, names in zip((panel.xaxis, panel.yaxis), named, strict=True):
        step = max(1, -(-len(names) // (12 if axis is panel.xaxis else 4)))
        name_cells(axis, names, 1 << (step - 1).bit_length())
