"""All prices of one cost model as arrays: what packers, judges and bounds read, and compiled loops evaluate.

The *terms* of a price, on one stage and in one direction, stand for

    max(host, constant + per_token * T + per_token2 * Q + sum over k of weight_k * max(0, a_k + b_k * T - c_k * Q))

with T = sum of the padded lengths of a bucket and Q = sum of their squares (`stage_attention.Convex` is the same as a
formula). Only this file knows what stands where in such a row. Everyone else asks for the price itself (`price`, or
`prices_of` for many rows at once), its tangent, a line below it, its linear part or its kinks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Bools, Floats, Ints
from dynamic_cp.mechanisms.stage_attention import Convex, Kink, Linear, merged

NUM_KINKS = 4
"""Kinks of one direction: two of its own (first and later steps) and two of the forward pass that it repeats."""
CONSTANT, PER_TOKEN, PER_TOKEN2, HOST, _FIRST_KINK = range(5)
_NUMBERS_OF_KINK = 4
NUM_TERMS = _FIRST_KINK + _NUMBERS_OF_KINK * NUM_KINKS + 1
"""CONSTANT, PER_TOKEN, PER_TOKEN2, HOST, then (weight, a, b, c) of every kink; a weight of 0 ends them, always."""
NUM_TERMS_OF_BOTH = _FIRST_KINK + _NUMBERS_OF_KINK * 2 * NUM_KINKS + 1
"""The same for forward and backward together."""


def terms_of(convex: Convex, num_terms: int = NUM_TERMS) -> list[float]:
    """Return the row of numbers of `convex`."""
    numbers = [*convex.linear, convex.host_s]
    for weight, inner in convex.kinks:
        numbers += (weight, inner.constant, inner.per_token, -inner.per_token2)
    return numbers + [0.0] * (num_terms - len(numbers))


def convex_of(terms: Floats) -> Convex:
    """Return what `terms_of` made into the row `terms`."""
    numbers = terms.tolist()
    kinks = []
    at = _FIRST_KINK
    while numbers[at] != 0.0:
        weight, constant, per_token, per_token2 = numbers[at : at + _NUMBERS_OF_KINK]
        kinks.append(Kink(weight, Linear(constant, per_token, -per_token2)))
        at += _NUMBERS_OF_KINK
    return Convex(Linear(*numbers[:HOST]), tuple(kinks), numbers[HOST])


def without_host(terms: Floats) -> Floats:
    """Return [..., terms] of what the GPU takes.

    Its prices of samples nearly add up, those of a slow host do not: short samples seem to cost nothing.
    """
    terms = terms.copy()
    terms[..., HOST] = 0.0
    return terms


def both_ns(terms: Floats, more_s_per_token: float) -> list[float]:
    """Return the NUM_TERMS_OF_BOTH numbers of forward and backward together on the GPU, in nanoseconds.

    Args:
        terms: [forward or backward, NUM_TERMS] seconds.
        more_s_per_token: what a token costs besides.
    """
    forward, backward = convex_of(terms[0]), convex_of(terms[1])
    constant, per_token, per_token2 = forward.linear.plus(backward.linear)
    linear = Linear(1e9 * constant, 1e9 * per_token + 1e9 * more_s_per_token, 1e9 * per_token2)
    kinks = tuple(Kink(1e9 * weight, inner) for weight, inner in merged(forward.kinks + backward.kinks))
    return terms_of(Convex(linear, kinks), NUM_TERMS_OF_BOTH)


def linear_parts(terms: Floats) -> Floats:
    """Return [..., (constant, per token, per token squared)] of [..., terms]: the GPU while every exchange hides."""
    return terms[..., :HOST]


def kinks_of(terms: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return weight, a, b and c of [..., terms], each [..., kink]."""
    kinks = terms[..., _FIRST_KINK:-1].reshape(*terms.shape[:-1], -1, _NUMBERS_OF_KINK)
    return kinks[..., 0], kinks[..., 1], kinks[..., 2], kinks[..., 3]


def prices_of(terms: Floats, tokens: Floats, squares: Floats) -> Floats:
    """Return `price` of many rows at once.

    Args:
        terms: [..., terms].
        tokens, squares: [...], or what broadcasts to it.
    """
    constant, per_token, per_token2 = np.moveaxis(linear_parts(terms), -1, 0)
    total = constant + per_token * tokens + per_token2 * squares
    for weight, a, b, c in zip(*(np.moveaxis(part, -1, 0) for part in kinks_of(terms)), strict=True):
        total += weight * np.maximum(0.0, a + b * tokens - c * squares)
    return np.asarray(np.maximum(total, terms[..., HOST]))


@compiled
def price(terms: Floats, row: int, column: int, tokens: float, squares: float) -> float:
    """Return the price of `terms[row, column]` in its unit; in a price table the column is forward or backward.

    A view of the terms would be easier to read, but in compiled code its references are counted: that costs more than
    the price.
    """
    return price_inlined(terms, row, column, tokens, squares)


@inlined
def price_inlined(terms: Floats, row: int, column: int, tokens: float, squares: float) -> float:
    """Return `price`; for the innermost loops, in which a call would take longer than the price."""
    total = terms[row, column, CONSTANT] + terms[row, column, PER_TOKEN] * tokens
    total += terms[row, column, PER_TOKEN2] * squares
    at = _FIRST_KINK
    while terms[row, column, at] != 0.0:
        exposed = (
            terms[row, column, at + 1] + terms[row, column, at + 2] * tokens - terms[row, column, at + 3] * squares
        )
        if exposed > 0.0:
            total += terms[row, column, at] * exposed
        at += _NUMBERS_OF_KINK
    return max(total, terms[row, column, HOST])  # type: ignore[no-any-return]


@inlined
def tangent(terms: Floats, row: int, column: int, tokens: float, squares: float) -> tuple[float, float, float, bool]:
    """Return (price, slope per token, slope per token squared, whether it has kinks) of `terms[row, column]` on a GPU.

    The slopes are those of a bucket in which what hides now goes on hiding.
    """
    per_token, per_token2 = terms[row, column, PER_TOKEN], terms[row, column, PER_TOKEN2]
    total = terms[row, column, CONSTANT] + per_token * tokens + per_token2 * squares
    at = _FIRST_KINK
    while terms[row, column, at] != 0.0:
        exposed = (
            terms[row, column, at + 1] + terms[row, column, at + 2] * tokens - terms[row, column, at + 3] * squares
        )
        if exposed > 0.0:
            total += terms[row, column, at] * exposed
            per_token += terms[row, column, at] * terms[row, column, at + 2]
            per_token2 -= terms[row, column, at] * terms[row, column, at + 3]
        at += _NUMBERS_OF_KINK
    return total, per_token, per_token2, at > _FIRST_KINK


@inlined
def growth_while_hidden(terms: Floats, row: int, column: int, padded: float, square: float) -> float:
    """Return what a sample of `padded` tokens adds to a bucket of `terms[row, column]` whose exchange stays hidden.

    Args:
        terms, row, column: of the price.
        padded, square: its tokens, and their square by its density.
    """
    return terms[row, column, PER_TOKEN] * padded + terms[row, column, PER_TOKEN2] * square  # type: ignore[no-any-return]


@inlined
def kink_at(terms: Floats, row: int, column: int, kink: int) -> tuple[float, float, float, float]:
    """Return (weight, a, b, c) of a kink of `terms[row, column]`; a weight of 0: there is none."""
    at = _FIRST_KINK + _NUMBERS_OF_KINK * kink
    return terms[row, column, at], terms[row, column, at + 1], terms[row, column, at + 2], terms[row, column, at + 3]


@inlined
def line_below(terms: Floats, row: int, column: int, shares: Floats, floor: float) -> tuple[float, float, float]:
    """Return (constant, per token, per token squared) of a line that the price of `terms[row, column]` is never below.

    Args:
        terms, row, column: of the price.
        shares: [kink] in [0, 1]: max(0, x) is never below share * x.
        floor: is taken off the constant.
    """
    constant = terms[row, column, CONSTANT] - floor
    per_token, per_token2 = terms[row, column, PER_TOKEN], terms[row, column, PER_TOKEN2]
    for kink in range(NUM_KINKS):
        weight, a, b, c = kink_at(terms, row, column, kink)
        weight *= shares[kink]
        constant += weight * a
        per_token += weight * b
        per_token2 -= weight * c
    return constant, per_token, per_token2


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
        expert_host_s: [forward or backward] seconds that their host takes at least, which no row or floor has.
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
    expert_host_s: Floats
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
