"""DistCA's own scheduler, from its description, to compare with.

Documents fill one lane after the other. A lane's share of one is an *annulus*: tokens [u, v) from its head and as many,
mirrored, from its tail. All rows of an annulus have the same work per token. Servers with least work receive first; an
annulus, or the inner part of one, moves where its bytes per work are least. Bytes are overestimated: the keys of the
whole document, wherever they are.

Source: arXiv 2510.18121, section 4, and what its released planner adds to that: tolerance 0.10, cuts at multiples of 64
tokens on either side, queries counted as work / (document + 1).
"""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Ints
from dynamic_cp.loops import ascending

_CUT_TOKENS = 64
"""An annulus is cut at multiples of this many tokens of its head, with as many of its tail: tiles of 128."""


def annuli_in_order(seqlens: Ints, num_lanes: int, capacity: int) -> Ints:
    """Return annuli, int64 [annulus, (document, u, v, lane)], of documents that fill one lane after the other.

    Args:
        seqlens: int64 [document].
        num_lanes: that there are; capacity: tokens that a lane holds, with documents rounded up to whole tiles.
    """
    halves = -(-seqlens // (2 * _CUT_TOKENS)) * _CUT_TOKENS
    ends = np.cumsum(halves)
    starts = ends - halves
    of_lane = -(-max(int(capacity), -(-2 * int(ends[-1]) // num_lanes)) // (2 * _CUT_TOKENS)) * _CUT_TOKENS
    cuts = np.unique(np.concatenate([starts, np.arange(num_lanes) * of_lane]))
    cuts = cuts[cuts < ends[-1]]
    document = np.searchsorted(ends, cuts, side="right")
    stops = np.append(cuts[1:], ends[-1])
    annuli = np.stack([document, cuts - starts[document], stops - starts[document], cuts // of_lane], axis=1)
    return annuli.astype(np.int64)


def homes_in_order(seqlens: Ints, num_lanes: int, capacity: int) -> Ints:
    """Return homes where documents fill one lane after the other, as packing at a fixed length does.

    Args:
        seqlens: int64 [document], in the order in which they come.
        num_lanes: any number; capacity: tokens that a lane may hold, as many as all need together.
    """
    ends = np.cumsum(seqlens)
    starts = ends - seqlens
    cuts = np.unique(np.concatenate([starts, np.arange(num_lanes) * capacity]))
    cuts = cuts[cuts < ends[-1]]
    document = np.searchsorted(ends, cuts, side="right")
    stops = np.append(cuts[1:], ends[-1])
    homes = np.stack([document, cuts - starts[document], stops - starts[document], cuts // capacity], axis=1)
    return homes.astype(np.int64)


def ranges_of(annuli: Ints, seqlens: Ints) -> Ints:
    """Return the token ranges of annuli, int64 [range, (document, start, stop, server)], by document and start."""
    document, u, v, server = annuli.T
    whole = -(-seqlens[document] // (2 * _CUT_TOKENS)) * 2 * _CUT_TOKENS
    heads = np.stack([document, u, v, server], axis=1)
    tails = np.stack([document, whole - v, whole - u, server], axis=1)
    ranges = np.concatenate([heads, tails])
    ranges[:, 2] = np.minimum(ranges[:, 2], seqlens[ranges[:, 0]])
    ranges = ranges[ranges[:, 2] > ranges[:, 1]]
    return ranges[np.lexsort((ranges[:, 1], ranges[:, 0]))]


@compiled
def schedule_as_paper(
    annuli: Ints, seqlens: Ints, num_servers: int, tolerance: float, query_bytes: float, kv_bytes: float
) -> Ints:
    """Return annuli [annulus, (document, u, v, server)] after all moves.

    Args:
        annuli: as they lie.
        seqlens: int64 [document].
        num_servers: that there are.
        tolerance: share of the mean by which a server may miss it.
        query_bytes: per token, there and back; kv_bytes: per token.
    """
    most = len(annuli) + 16 * num_servers + 64
    items = np.zeros((most, 4), np.int64)
    items[: len(annuli)] = annuli
    count = len(annuli)
    load = np.zeros(num_servers)
    for item in range(count):
        load[items[item, 3]] += float(items[item, 2] - items[item, 1]) * seqlens[items[item, 0]]
    mean = load.mean()
    slack = tolerance * mean
    for receiver in ascending(load):
        while mean - load[receiver] > slack + 1.0 and count < most:
            best, best_price, best_work = -1, np.inf, 0.0
            for item in range(count):
                server, seqlen = items[item, 3], float(seqlens[items[item, 0]])
                surplus = load[server] - mean
                work = (items[item, 2] - items[item, 1]) * seqlen
                moved = min(work, surplus, mean - load[receiver])
                if surplus <= slack or server == receiver or moved <= 0.0:
                    continue
                price = query_bytes / (seqlen + 1.0) + seqlen * kv_bytes / moved
                if price < best_price:
                    best, best_price, best_work = item, price, moved
            if best < 0:
                break
            document, stop = items[best, 0], items[best, 2]
            work = float(stop - items[best, 1]) * seqlens[document]
            tokens = stop - items[best, 1]
            if best_work < 0.9999 * work:
                tokens = int(best_work / seqlens[document]) // _CUT_TOKENS * _CUT_TOKENS
                if tokens <= 0:
                    break
                items[count] = document, stop - tokens, stop, receiver
                count += 1
                items[best, 2] -= tokens
            else:
                load[items[best, 3]] -= work
                load[receiver] += work
                items[best, 3] = receiver
                continue
            load[items[best, 3]] -= float(tokens) * seqlens[document]
            load[receiver] += float(tokens) * seqlens[document]
    return items[:count]
