"""All prices of one cost model, as arrays: what packers, judges and bounds read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Bools, Floats, Ints
from dynamic_cp.pricing.terms import price

PER_MEAN, PER_ROUTED = 1, 2
"""Columns of `PriceTable.expert_terms`, behind CONSTANT: per mean token, per routed token."""


class PriceTable(NamedTuple):
    """All prices of one cost model. `k` is log2 of a CP size, `link` IN_NODE or ACROSS_NODES.

    Attributes:
        terms: [exchange option, forward or backward, NUM_TERMS] seconds.
        floors: [way to compute attention, forward or backward, NUM_TERMS] seconds that no bucket takes less than.
        floor_lanes: [way] -> lanes of the bucket.
        floor_allowed: [way] -> whether a bucket with samples may run so.
        is_even: whether the lanes of a bucket always take the same time.
        first_option, end_option: [k, link] -> rows of `terms` that a bucket may choose from.
        links: [k, first_lane >> k] -> link of the group.
        multiples: [k] -> padded lengths are multiples of this.
        capacities: [k] -> padded tokens that a bucket may hold; 0 where the CP size is not allowed.
        rank_token_multiple: tokens of a rank are a multiple of this.
        hop_s_per_token: seconds per token of a rank to the next stage.
        edges_s_per_token: [embedding forward, embedding backward, head forward, head backward], per token of a rank.
        slowest_s_per_token: what the slowest stage pays of the edges, forward + backward, per token of a rank.
        expert_lanes: lanes that share experts; where it is 1, experts are part of `terms`.
        expert_terms: [forward or backward, (CONSTANT, PER_MEAN, PER_ROUTED)] seconds that lanes which share experts
            take on top of the longest of their own `terms` (`experts.ExpertPrice`).
        imbalance: tokens routed to the rank that gets most, over their mean.
        level_terms: as `terms`, with what experts cost in a block whose lanes all have as many tokens.
        level_floors: the same of `floors`: the mean over all lanes of a plan is never less.
    """

    terms: Floats
    floors: Floats
    floor_lanes: Ints
    floor_allowed: Bools
    is_even: bool
    first_option: Ints
    end_option: Ints
    links: Ints
    multiples: Ints
    capacities: Ints
    rank_token_multiple: int
    hop_s_per_token: float
    edges_s_per_token: Floats
    slowest_s_per_token: float
    expert_lanes: int
    expert_terms: Floats
    imbalance: float
    level_terms: Floats
    level_floors: Floats


@compiled
def best_option(table: PriceTable, k: int, link: int, tokens: float, squares: float) -> int:
    """Return the row of `table.terms` with the least forward + backward seconds; the first of equals."""
    terms, best, end = table.terms, table.first_option[k, link], table.end_option[k, link]
    if end - best == 1:
        return best  # type: ignore[no-any-return]
    least = np.inf
    for option in range(best, end):
        both = price(terms, option, 0, tokens, squares) + price(terms, option, 1, tokens, squares)
        if both < least:
            best, least = option, both
    return best  # type: ignore[no-any-return]


@compiled
def best_options(table: PriceTable, first_lanes: Ints, log2_cp_sizes: Ints, tokens: Floats, squares: Floats) -> Ints:
    """Return [bucket] -> the row of `table.terms` with the least seconds, for buckets on given lanes."""
    first_option, end_option, links = table.first_option, table.end_option, table.links
    best = np.empty(len(first_lanes), np.int64)
    for bucket in range(len(first_lanes)):
        k = log2_cp_sizes[bucket]
        link = links[k, first_lanes[bucket] >> k]
        best[bucket] = first_option[k, link]
        if end_option[k, link] - best[bucket] > 1:
            best[bucket] = best_option(table, k, link, tokens[bucket], squares[bucket])
    return best


@compiled
def duration_ns(table: PriceTable, k: int, link: int, tokens: float, squares: float) -> int:
    """Return forward + backward of a bucket on the slowest stage and in a level block, in whole nanoseconds."""
    option, terms = best_option(table, k, link, tokens, squares), table.level_terms
    both = price(terms, option, 0, tokens, squares) + price(terms, option, 1, tokens, squares)
    both += table.slowest_s_per_token * tokens / (1 << k)
    return int(np.rint(both * 1e9))
