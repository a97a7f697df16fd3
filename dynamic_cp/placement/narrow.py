"""Placements under windows: what is fetched is cut to what a window shows, and layers with a window keep homes.

A home that another lane reads is seen through the window of the rows there: only its last keys, and the first ones of
the sample, the sink. So homes are cut where windows begin and end; their parts stay where they were, and a lane
fetches the parts that its tiles use.

Where only some layers have a window, homes and tiles are placed for those without, which take longer. A layer with a
window then has the same homes, and each tile where its queries are: homes hold equal numbers of tokens, so the work in
the window is as even, and only keys travel, a window for each stretch of neighbouring homes.
"""

from __future__ import annotations

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.placement.legal import tiles_between
from dynamic_cp.placement.transport import divide
from dynamic_cp.types import Lambda, Mask, Placement, Sample

_MOST_PARTS = 32
"""Parts of equal length that a home is cut into at most."""


def placement_under(placement: Placement, mask: Mask, num_lanes: int, node_lanes: int) -> Placement:
    """Return what layers with `mask` compute of a placement: it itself, or with their own tiles between its homes.

    Args:
        mask: one of its `layer_masks`; any mask where it has none.
        num_lanes: of the bucket; node_lanes: of a node.
    """
    if not placement.layer_masks or mask == placement.layer_masks[0]:
        return placement
    assert isinstance(mask, Lambda)
    return narrowed(placement, mask, num_lanes, node_lanes)


def narrowed(placement: Placement, mask: Lambda, num_lanes: int, node_lanes: int) -> Placement:
    """Return the placement of layers with a window, from one of layers that see more; arguments as above."""
    without_tiles = Placement(placement.homes, placement.tiles[:0])
    found = tiles_between(without_tiles, _samples_in(placement, mask), mask)
    holder = placement.homes[:, 3]
    tiles = np.column_stack([found.rows, found.columns, holder[found.rows], np.zeros(len(found.rows), np.int64)])
    cut = trimmed(Placement(placement.homes, tiles.astype(np.int32)), mask)
    homes = cut.homes.astype(np.int64)
    division = divide(
        homes[:, 3], homes[:, 2] - homes[:, 1], cut.tiles.astype(np.int64), np.ones(2), placement.num_divisions,
        num_lanes, node_lanes,
    )  # fmt: skip
    cut.tiles[:, 3] = division
    return Placement(cut.homes, cut.tiles, (mask,))


def trimmed(placement: Placement, mask: Lambda) -> Placement:
    """Return a placement of the same tokens and work, whose homes are cut so that lanes fetch little that they do not
    use; tiles of parts are those of the home, as far as the mask allows them.

    Args:
        placement: with the tiles that `mask` allows, or more; samples bring no masks.
    """
    homes, tiles = placement.homes.astype(np.int64), placement.tiles.astype(np.int64)
    start, stop, holder = homes[:, 1], homes[:, 2], homes[:, 3]
    row, column, lane = tiles[:, 0], tiles[:, 1], tiles[:, 2]
    away = np.flatnonzero((holder[column] != lane) & (column != row))
    # Keys from the first that a row sees on, and the sink before them.
    begins, sinks = start[row[away]] - mask.window + 1, np.full(len(away), mask.sink)
    owners, points = [column[away], column[away]], [begins, sinks]
    # Queries up to the last that sees a key; all of them see the sink.
    away = np.flatnonzero((holder[row] != lane) & (column != row) & (start[column] >= mask.sink))
    owners.append(row[away])
    points.append(stop[column[away]] + mask.window - 1)
    owner, point = np.concatenate(owners), np.concatenate(points)
    # What is needed is rounded up: it begins earlier, or ends later.
    step = np.maximum(1, (stop - start) // _MOST_PARTS)[owner]
    offset = point - start[owner]
    offset = np.where(np.arange(len(owner)) < len(begins), offset // step, -(-offset // step)) * step
    inside = (offset > 0) & (offset < (stop - start)[owner])
    width = int(stop.max()) + 1
    cuts = np.unique(owner[inside] * width + start[owner[inside]] + offset[inside])
    if not len(cuts):
        return placement
    begin = np.sort(np.concatenate([np.arange(len(homes)) * width + start, cuts]))
    parent, first = begin // width, begin % width
    last = np.append(first[1:], 0)
    is_end = np.append(parent[1:] != parent[:-1], True)
    parts = np.column_stack([homes[parent, 0], first, np.where(is_end, stop[parent], last), holder[parent]])
    pieces = Placement(parts.astype(np.int32), placement.tiles[:0])
    found = tiles_between(pieces, _samples_in(placement, mask), mask)
    keys = row * len(homes) + column
    order = np.argsort(keys)
    old = order[np.searchsorted(keys[order], parent[found.rows] * len(homes) + parent[found.columns])]
    of_parts = np.column_stack([found.rows, found.columns, tiles[old, 2:]])
    return Placement(pieces.homes, of_parts.astype(np.int32), placement.layer_masks)


def _samples_in(placement: Placement, mask: Mask) -> list[Sample]:
    """Return the samples whose tokens the homes hold, with `mask`."""
    ends = np.append(np.diff(placement.homes[:, 0]) != 0, True)
    seqlens: Ints = placement.homes[ends, 2]
    return [Sample(sample_id=index, seqlen=seqlen, mask=mask) for index, seqlen in enumerate(seqlens.tolist())]
