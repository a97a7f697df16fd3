"""Homes cut in parts, and layers with a window between the homes of layers without.

Homes are cut where lanes use only some of what they would fetch, and where one lane has to send too much. Parts stay
where the home was, or go to other lanes of its node; tiles of parts stay on the lane of the home's tile. So lanes
compute what they did, and fetch less, or from more lanes. If only some layers have a window, homes and tiles are placed
for the layers without, which take longer. A layer with a window keeps the homes and computes each tile where its
queries are: homes hold equal numbers of tokens, so the work in the window is even, and only keys travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Bools, Floats, Ints
from dynamic_cp.loops import ascending, sorted_by
from dynamic_cp.placement.divisions import COMMON, LinkRates, Schedule, divided
from dynamic_cp.placement.legal import tiles_between, with_masks
from dynamic_cp.placement.runs import FIRST_ROW, ROW_STOP, RowRuns, runs_of, seen_in_run
from dynamic_cp.types import Lambda, Mask, Placement, Sample
from dynamic_cp.types.placement import COLUMN, HOLDER, LANE, ROW, SAMPLE, START, STOP, Lanes

_NUM_STEPS = 32
"""Homes are cut at multiples of a step, of which a home has this many."""
_STRIDES = (1, 4, 16)
"""Strides in steps; the first that keeps the number of homes within _MOST_TIMES is taken."""
_MOST_TIMES = 4
"""Most homes after cutting, over those before: each costs planning and transfer time."""
_MUCH, _LARGE = 1.3, 0.5
"""A home is shared out if its lane sends more than _MUCH, and the home alone more than _LARGE, times its node's
mean."""
_FEWEST_TOKENS = 16
"""Fewest tokens of a part that another lane holds."""


class Cut(NamedTuple):
    """A placement, and the pairs that kernels compute for each of its tiles."""

    placement: Placement
    touched: Ints


class _Points(NamedTuple):
    """Where homes are cut: [point] -> home, token; ascending, none twice, none at an end."""

    home: Ints
    token: Ints


def trimmed(whole: Cut, samples: Sequence[Sample], mask: Mask) -> Cut:
    """Return a placement (with the tiles that masks allow) with its homes cut about where each lane's use of them
    begins and ends; `mask` is that of samples that bring none."""
    homes, tiles = _as_ints(whole.placement)
    steps = np.maximum(1, (homes[:, STOP] - homes[:, START]) // _NUM_STEPS)
    is_cut = _ends_of_use(runs_of(with_masks(samples, mask)), homes, tiles, steps)
    few = np.flatnonzero(is_cut.sum(axis=(1, 2)) <= (_MOST_TIMES - 1) * len(homes))
    if not len(few):
        return whole
    home, step = np.nonzero(is_cut[few[0]])
    return _cut(whole, _Points(home, homes[home, START] + step * steps[home]), samples, mask)[0]


def spread(whole: Cut, samples: Sequence[Sample], mask: Mask, lanes: Lanes, rates: LinkRates, most_tokens: int) -> Cut:
    """Return a placement in which lanes of a node share homes that many lanes fetch. Otherwise a lane that holds what
    all need, such as the last rows of a blockwise mask, sends it to all. No lane gets more than `most_tokens`."""
    homes, tiles = _as_ints(whole.placement)
    sent_s = _sent_s(homes, tiles, lanes, rates)
    num_parts = _parts_of_hubs(homes, sent_s, lanes)
    cut, parents = _cut(whole, _Points(*_even_points(homes, num_parts)), samples, mask)
    if cut is whole:
        return whole
    parts, _ = _as_ints(cut.placement)
    parts[:, HOLDER] = _shared_out(homes, parts, parents, num_parts, sent_s, lanes, most_tokens)
    return cut._replace(placement=Placement(parts.astype(np.int32), cut.placement.tiles, cut.placement.layer_masks))


def _as_ints(placement: Placement) -> tuple[Ints, Ints]:
    return np.ascontiguousarray(placement.homes, np.int64), np.ascontiguousarray(placement.tiles, np.int64)


def _cut(whole: Cut, points: _Points, samples: Sequence[Sample], mask: Mask) -> tuple[Cut, Ints]:
    """Return the placement cut at `points`, tiles on the lane and in the division of their homes', and [part] ->
    home."""
    homes, tiles = _as_ints(whole.placement)
    if not len(points.home):
        return whole, np.arange(len(homes))
    parts, parents = _parts(homes, points)
    found = tiles_between(Placement(parts.astype(np.int32), whole.placement.tiles[:0]), samples, mask)
    old = _tiles_of(tiles, parents[found.rows], parents[found.columns], len(homes))
    of_parts = np.column_stack([found.rows, found.columns, tiles[old, 2:]]).astype(np.int32)
    return Cut(Placement(parts.astype(np.int32), of_parts, whole.placement.layer_masks), found.touched), parents


@compiled
def _parts(homes: Ints, points: _Points) -> tuple[Ints, Ints]:
    """Return the parts that homes become, and [part] -> home."""
    num_parts = len(homes) + len(points.home)
    parts, parents = np.empty((num_parts, 4), np.int64), np.empty(num_parts, np.int64)
    part, point = 0, 0
    for home in range(len(homes)):
        start = homes[home, START]
        while True:
            is_last = point == len(points.home) or points.home[point] != home
            stop = homes[home, STOP] if is_last else points.token[point]
            parts[part] = (homes[home, SAMPLE], start, stop, homes[home, HOLDER])
            parents[part] = home
            part += 1
            if is_last:
                break
            start = stop
            point += 1
    return parts, parents


@compiled
def _tiles_of(tiles: Ints, rows: Ints, columns: Ints, num_homes: int) -> Ints:
    """Return the tile of each pair of homes; pairs ascend by row."""
    by_row, firsts = sorted_by(tiles[:, ROW], num_homes)
    tile_of = np.full(num_homes, -1)  # [column] of the current row
    found = np.empty(len(rows), np.int64)
    row = -1
    for pair in range(len(rows)):
        if rows[pair] != row:
            row = rows[pair]
            for place in range(firsts[row], firsts[row + 1]):
                tile_of[tiles[by_row[place], COLUMN]] = by_row[place]
        found[pair] = tile_of[columns[pair]]
    return found


@compiled
def _ends_of_use(runs: RowRuns, homes: Ints, tiles: Ints, steps: Ints) -> Bools:
    """Return [stride, home, step] where a lane's use of a fetched home begins or ends; `steps`: [home] tokens."""
    num_homes, num_tiles = len(homes), len(tiles)
    first_runs = _first_runs(runs, homes)
    # A step is rounded down: there are less than twice as many.
    is_cut = np.zeros((len(_STRIDES), num_homes, 2 * _NUM_STEPS), np.bool_)
    is_used = np.empty(2 * _NUM_STEPS, np.bool_)
    num_lanes = 0
    for tile in range(num_tiles):
        num_lanes = max(num_lanes, tiles[tile, LANE] + 1)
    for side in range(2):
        in_order, _ = sorted_by(tiles[:, LANE], num_lanes)
        in_order = in_order[sorted_by(tiles[in_order, side], num_homes)[0]]
        place = 0
        while place < num_tiles:
            home, lane = tiles[in_order[place], side], tiles[in_order[place], LANE]
            start, step = homes[home, START], steps[home]
            count = -(-(homes[home, STOP] - start) // step)
            is_used[:count] = False
            while place < num_tiles and tiles[in_order[place], side] == home and tiles[in_order[place], LANE] == lane:
                row, column = tiles[in_order[place], ROW], tiles[in_order[place], COLUMN]
                for run in range(first_runs[row], runs.starts[homes[row, SAMPLE] + 1]):
                    if runs.table[run, FIRST_ROW] >= homes[row, STOP] or homes[home, HOLDER] == lane:
                        break
                    seen = seen_in_run(
                        runs.table[run], homes[row, START], homes[row, STOP], homes[column, START], homes[column, STOP]
                    )
                    if seen[0] < seen[1]:
                        is_used[(seen[2 * side] - start) // step : -(-(seen[2 * side + 1] - start) // step)] = True
                place += 1
            if homes[home, HOLDER] != lane:
                _add_ends(is_used[:count], is_cut[:, home])
    return is_cut


@compiled
def _first_runs(runs: RowRuns, homes: Ints) -> Ints:
    """Return [home] the first run with rows in it."""
    first_runs = np.empty(len(homes), np.int64)
    run = 0
    for home in range(len(homes)):
        run = max(run, runs.starts[homes[home, SAMPLE]])
        while runs.table[run, ROW_STOP] <= homes[home, START]:
            run += 1
        first_runs[home] = run
    return first_runs


@compiled
def _add_ends(is_used: Bools, is_cut: Bools) -> None:
    """Mark in `is_cut` [stride, step] where use of the steps of a home begins or ends, in strides of several steps."""
    count = len(is_used)
    for number, stride in enumerate(_STRIDES):
        before = is_used[:stride].any()
        for step in range(stride, count, stride):
            now = is_used[step : min(step + stride, count)].any()
            is_cut[number, step] |= now != before
            before = now


@compiled
def _sent_s(homes: Ints, tiles: Ints, lanes: Lanes, rates: LinkRates) -> Floats:
    """Return [home] seconds of sending it to each lane of the node that uses it, and once to each other node."""
    num_homes = len(homes)
    seconds = np.zeros(num_homes)
    for side in range(2):
        of_token = rates.column_bytes if side else rates.row_bytes
        in_order, _ = sorted_by(tiles[:, LANE], lanes.number)
        in_order = in_order[sorted_by(tiles[in_order, side], num_homes)[0]]
        before, lane_before, node_before = -1, -1, -1
        for tile in in_order:
            home, lane = tiles[tile, side], tiles[tile, LANE]
            node, own = (lanes.first + lane) // lanes.of_node, (lanes.first + homes[home, HOLDER]) // lanes.of_node
            num_bytes = of_token * (homes[home, STOP] - homes[home, START])
            if home != before:
                lane_before, node_before = -1, -1
            if node != own:
                if node != node_before:
                    seconds[home] += num_bytes / rates.across_bytes_per_s
            elif lane not in (lane_before, homes[home, HOLDER]):
                seconds[home] += num_bytes / rates.inside_bytes_per_s
            before, lane_before, node_before = home, lane, node
    return seconds


@compiled
def _parts_of_hubs(homes: Ints, sent_s: Floats, lanes: Lanes) -> Ints:
    """Return [home] the number of its parts: several if its lane sends far more than the other lanes of its node."""
    num_nodes = (lanes.first + lanes.number - 1) // lanes.of_node + 1
    of_lane, of_node = np.zeros(lanes.number), np.zeros(num_nodes)
    first_of, lanes_of = np.full(num_nodes, lanes.number), np.zeros(num_nodes, np.int64)
    for lane in range(lanes.number):
        node = (lanes.first + lane) // lanes.of_node
        first_of[node] = min(first_of[node], lane)
        lanes_of[node] += 1
    for home in range(len(homes)):
        of_lane[homes[home, HOLDER]] += sent_s[home]
        of_node[(lanes.first + homes[home, HOLDER]) // lanes.of_node] += sent_s[home]
    num_parts = np.ones(len(homes), np.int64)
    for home in ascending(-sent_s):
        lane = homes[home, HOLDER]
        node = (lanes.first + lane) // lanes.of_node
        mean_s = of_node[node] / lanes_of[node]
        if of_lane[lane] <= _MUCH * mean_s or sent_s[home] <= _LARGE * mean_s:
            continue
        wanted = int(np.ceil(sent_s[home] / (_LARGE * mean_s)))
        most = (homes[home, STOP] - homes[home, START]) // _FEWEST_TOKENS
        number = min(min(wanted, most), lanes_of[node])
        if number > 1:
            num_parts[home] = number
            of_lane[lane] -= sent_s[home]
            for other in range(first_of[node], first_of[node] + lanes_of[node]):
                of_lane[other] += sent_s[home] / lanes_of[node]
    return num_parts


@compiled
def _even_points(homes: Ints, num_parts: Ints) -> tuple[Ints, Ints]:
    """Return `_Points` that cut each home in equal parts."""
    owner, token = np.empty(num_parts.sum(), np.int64), np.empty(num_parts.sum(), np.int64)
    count = 0
    for home in range(len(homes)):
        size = homes[home, STOP] - homes[home, START]
        step = -(-size // num_parts[home])
        for offset in range(step, size, step):
            owner[count], token[count] = home, homes[home, START] + offset
            count += 1
    return owner[:count].copy(), token[:count].copy()


@compiled
def _shared_out(
    homes: Ints, parts: Ints, parents: Ints, num_parts: Ints, sent_s: Floats, lanes: Lanes, most_tokens: int
) -> Ints:
    """Return [part] -> lane: parts of a home that was cut go to the lanes of its node that send least; `parents`:
    [part] -> home, `num_parts` and `sent_s`: [home] its parts and the seconds of sending it."""
    holder = parts[:, HOLDER].copy()
    of_lane, tokens = np.zeros(lanes.number), np.zeros(lanes.number, np.int64)
    for home in range(len(homes)):
        tokens[homes[home, HOLDER]] += homes[home, STOP] - homes[home, START]
        if num_parts[home] == 1:
            of_lane[homes[home, HOLDER]] += sent_s[home]
    by_home, firsts = sorted_by(parents, len(homes))
    for home in ascending(-sent_s):
        if num_parts[home] == 1:
            continue
        node = (lanes.first + homes[home, HOLDER]) // lanes.of_node
        low = max(node * lanes.of_node - lanes.first, 0)
        high = min((node + 1) * lanes.of_node - lanes.first, lanes.number)
        for part in by_home[firsts[home] : firsts[home + 1]]:
            size = parts[part, STOP] - parts[part, START]
            best = homes[home, HOLDER]
            tokens[best] -= size
            for lane in range(low, high):
                if tokens[lane] + size <= most_tokens and of_lane[lane] < of_lane[best]:
                    best = lane
            holder[part] = best
            of_lane[best] += sent_s[home] * size / (homes[home, STOP] - homes[home, START])
            tokens[best] += size
    return holder  # type: ignore[no-any-return]


def placement_under(placement: Placement, samples: Sequence[Sample], mask: Mask, lanes: Lanes) -> Placement:
    """Return the placement of layers with `mask`, one of `layer_masks` if there are any: itself, or its homes with
    other tiles."""
    if not placement.layer_masks or mask == placement.layer_masks[0]:
        return placement
    assert isinstance(mask, Lambda)
    return narrowed(placement, samples, mask, lanes)


def narrowed(placement: Placement, samples: Sequence[Sample], mask: Lambda, lanes: Lanes) -> Placement:
    """Return the placement of layers with a window, from one of layers that see more."""
    found = tiles_between(Placement(placement.homes, placement.tiles[:0]), samples, mask)
    holder = placement.homes[:, HOLDER]
    tiles = np.column_stack([found.rows, found.columns, holder[found.rows], np.zeros(len(found.rows), np.int64)])
    whole = Cut(Placement(placement.homes, tiles.astype(np.int32), (mask,)), found.touched)
    cut = trimmed(whole, samples, mask)
    return divided(cut.placement, cut.touched, lanes, COMMON, Schedule.of(placement.num_divisions))
