"""The price of a bucket as numbers in arrays: what the compiled inner loops of packing and simulation read.

A bucket of a given CP size, link and exchange costs, on one stage and in one direction,

    constant + per_token * T + per_token2 * Q + sum over k of weight_k * max(0, a_k + b_k * T - c_k * Q)

with T = sum of its padded lengths and Q = sum of their squares. A kink is a step of the exchange that hides behind the
attention of the whole bucket, so prices are not additive over samples; they are convex, piecewise linear, increasing.
`CostModel` fills the table; it is the only place that knows what the numbers mean.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamic_cp._jit import compiled

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NUM_KINKS = 4
"""Kinks of one direction: two of its own (first and later steps) and two of the forward pass that it repeats."""
NUM_TERMS = 3 + 4 * NUM_KINKS
"""constant, per_token, per_token2, then (weight, a, b, c) of every kink."""

IN_NODE, ACROSS_NODES = 0, 1


class PriceTable(NamedTuple):
    """All prices of one cost model. `k` is log2 of a CP size, `link` IN_NODE or ACROSS_NODES.

    Attributes:
        terms: [exchange option, forward or backward, NUM_TERMS] seconds.
        first_option, end_option: [k, link] -> rows of `terms` that a bucket may choose from.
        links: [k, first_lane >> k] -> link of the group.
        multiples: [k] -> padded lengths are multiples of this.
        capacities: [k] -> padded tokens that a bucket may hold; 0 where the CP size is not allowed.
        rank_token_multiple: tokens of a rank are a multiple of this.
        hop_s_per_token: seconds per token of a rank to the next stage.
        edges_s_per_token: [embedding forward, embedding backward, head forward, head backward], per token of a rank.
        slowest_s_per_token: what the slowest stage pays of the edges, forward + backward, per token of a rank.
    """

    terms: Floats
    first_option: Ints
    end_option: Ints
    links: Ints
    multiples: Ints
    capacities: Ints
    rank_token_multiple: int
    hop_s_per_token: float
    edges_s_per_token: Floats
    slowest_s_per_token: float


@compiled
def seconds(terms: Floats, option: int, direction: int, tokens: float, squares: float) -> float:
    """Return the seconds of one direction of a bucket; `terms`: [option, forward or backward, NUM_TERMS].

    A view of the terms would be easier to read, but in compiled code its references are counted: that costs more than
    the price.
    """
    total = terms[option, direction, 0] + terms[option, direction, 1] * tokens + terms[option, direction, 2] * squares
    for kink in range(NUM_KINKS):
        at = 3 + 4 * kink
        weight = terms[option, direction, at]
        if weight == 0.0:
            break
        exposed = terms[option, direction, at + 1] + terms[option, direction, at + 2] * tokens
        exposed -= terms[option, direction, at + 3] * squares
        if exposed > 0.0:
            total += weight * exposed
    return total  # type: ignore[no-any-return]


@compiled
def best_option(table: PriceTable, k: int, link: int, tokens: float, squares: float) -> int:
    """Return the row of `table.terms` with the least forward + backward seconds; the first of equals."""
    terms, best, end = table.terms, table.first_option[k, link], table.end_option[k, link]
    if end - best == 1:
        return best  # type: ignore[no-any-return]
    least = np.inf
    for option in range(best, end):
        both = seconds(terms, option, 0, tokens, squares) + seconds(terms, option, 1, tokens, squares)
        if both < least:
            best, least = option, both
    return best  # type: ignore[no-any-return]


@compiled
def duration_ns(table: PriceTable, k: int, link: int, tokens: float, squares: float) -> int:
    """Return forward + backward of a bucket on the slowest stage, in whole nanoseconds."""
    option = best_option(table, k, link, tokens, squares)
    both = seconds(table.terms, option, 0, tokens, squares) + seconds(table.terms, option, 1, tokens, squares)
    both += table.slowest_s_per_token * tokens / (1 << k)
    return int(np.rint(both * 1e9))
