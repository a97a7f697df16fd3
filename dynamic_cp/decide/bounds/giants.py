"""Seconds that several very long samples cost at least: some lane must hold many of them, one after the other.

Take the `count` longest samples, of at least s tokens and so much attention work each, and plans of less than x
seconds. A bucket with any of them passes all stages, so pp_size * (forward + backward) is below x. That leaves some
ways to run one, and says how many a bucket of each way may hold: at most r samples per lane. Then the lanes of their
buckets are count / r in sum, and some lane has K = ceil(count / (r * num_lanes)) of these buckets. Each takes at least
t, what s alone takes at best. On the last stage this lane runs all of them, after a first forward and before a last
backward on the others:

    seconds >= min(x, (K + (pp_size - 1) / vp_size) * t),

for every x and every count. Other samples in these buckets and other micro-batches between them only add to it.
"""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.decide.bounds.ways import Ways
from dynamic_cp.pricing.table import price
from dynamic_cp.pricing.work import Lengths
from dynamic_cp.types import Topology

_MAX_COUNTS = 64
_BISECTIONS = 12
_UP_TO = 8.0
"""x is searched up to this multiple of the bound that holds without it."""


def giants_s(lengths: Lengths, ways: Ways, topology: Topology) -> float:
    """Return the seconds that every plan takes because of its longest samples; 0 where one of them has no way.

    Args:
        lengths: the samples, true tokens.
        ways: the prices.
        topology: lanes and stages.
    """
    counts = np.unique(np.geomspace(1, len(lengths.seqlens), _MAX_COUNTS).astype(np.int64))
    least_squares = np.minimum.accumulate(lengths.squares)
    return float(
        _most_s(lengths.seqlens, least_squares, counts, ways, topology.num_lanes, topology.pp_size, topology.vp_size)
    )


@compiled
def _most_s(
    seqlens: Ints, least_squares: Floats, counts: Ints, ways: Ways, num_lanes: int, pp_size: int, vp_size: int
) -> float:
    best_s = 0.0
    for count in counts:
        tokens, square = float(seqlens[count - 1]), least_squares[count - 1]
        free_s = _at_most_s(tokens, square, count, ways, np.inf, num_lanes, pp_size, vp_size)
        if free_s == np.inf:
            return 0.0
        low_s, high_s = max(best_s, free_s), _UP_TO * max(best_s, free_s)
        best_s = low_s
        for _ in range(_BISECTIONS):
            limit_s = 0.5 * (low_s + high_s)
            least_s = _at_most_s(tokens, square, count, ways, limit_s, num_lanes, pp_size, vp_size)
            best_s = max(best_s, min(limit_s, least_s))
            if least_s >= limit_s:
                low_s = limit_s
            else:
                high_s = limit_s
    return best_s


@compiled
def _at_most_s(
    tokens: float, square: float, count: int, ways: Ways, limit_s: float, num_lanes: int, pp_size: int, vp_size: int
) -> float:
    """Return (K + (pp_size - 1) / vp_size) * t of plans below `limit_s`; infinite where there are none."""
    terms, cp_sizes, longest, capacities = ways.terms, ways.cp_sizes, ways.longest, ways.capacities
    forward_s, backward_s, per_lane = np.inf, np.inf, 0.0
    for way in range(len(cp_sizes)):
        if tokens > longest[way]:
            continue
        fitting, too_many = 0, int(capacities[way] // tokens) + 1
        while too_many - fitting > 1:  # by ones at first: mostly few fit
            held = fitting + 1 if fitting < 4 else (fitting + too_many) // 2
            both_s = price(terms, way, 0, held * tokens, held * square)
            both_s += price(terms, way, 1, held * tokens, held * square)
            # 1e-6 s: prices are rounded to nanoseconds.
            if pp_size * both_s <= limit_s + 1e-6:
                fitting = held
            else:
                too_many = held
        if fitting:
            per_lane = max(per_lane, fitting / cp_sizes[way])
            forward_s = min(forward_s, price(terms, way, 0, tokens, square))
            backward_s = min(backward_s, price(terms, way, 1, tokens, square))
    if per_lane == 0.0:
        return np.inf
    held = np.ceil(count / (per_lane * num_lanes) - 1e-9)
    times = held + (pp_size - 1) / vp_size
    # Every operation is rounded to whole nanoseconds.
    return times * (forward_s + backward_s) - 1e-9 * (held * vp_size + pp_size)  # type: ignore[no-any-return]
