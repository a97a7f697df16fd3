"""Layers with a window between the homes of layers without, where only some layers have one.

Homes and tiles are placed for the layers without a window, which take longer. A layer with a window then has the same
homes, and each tile where its queries are: homes hold equal numbers of tokens, so the work in the window is as even,
and only keys travel, a window for each stretch of neighbouring homes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamic_cp.placement.cuts import Cut, trimmed
from dynamic_cp.placement.divisions import COMMON, Schedule, divided
from dynamic_cp.placement.lanes import Lanes
from dynamic_cp.placement.legal import tiles_between
from dynamic_cp.types import Lambda, Mask, Placement, Sample
from dynamic_cp.types.placement import HOLDER


def placement_under(placement: Placement, samples: Sequence[Sample], mask: Mask, lanes: Lanes) -> Placement:
    """Return what layers with `mask` compute of a placement: it itself, or with their own tiles between its homes.

    Args:
        samples: of its bucket.
        mask: one of its `layer_masks`; any mask where it has none.
        lanes: of the placement.
    """
    if not placement.layer_masks or mask == placement.layer_masks[0]:
        return placement
    assert isinstance(mask, Lambda)
    return narrowed(placement, samples, mask, lanes)


def narrowed(placement: Placement, samples: Sequence[Sample], mask: Lambda, lanes: Lanes) -> Placement:
    """Return the placement of layers with a window, from one of layers that see more; arguments as above."""
    found = tiles_between(Placement(placement.homes, placement.tiles[:0]), samples, mask)
    holder = placement.homes[:, HOLDER]
    tiles = np.column_stack([found.rows, found.columns, holder[found.rows], np.zeros(len(found.rows), np.int64)])
    whole = Cut(Placement(placement.homes, tiles.astype(np.int32), (mask,)), found.touched)
    cut = trimmed(whole, samples, mask)
    return divided(cut.placement, cut.touched, lanes, COMMON, Schedule.of(placement.num_divisions))
