"""The price of a bucket as numbers in arrays: what the compiled inner loops of packing and simulation read.

A bucket of a given CP size, link and exchange costs, on one stage and in one direction,

    constant + per_token * T + per_token2 * Q + sum over k of weight_k * max(0, a_k + b_k * T - c_k * Q)

with T = sum of its padded lengths and Q = sum of their squares. A kink is a step of the exchange that hides behind the
attention of the whole bucket, so prices are not additive over samples; they are convex, piecewise linear, increasing.

A price has two forms: `Convex`, which formulas are written in, and its *terms*, a row of numbers that compiled loops
evaluate. Only this file knows what stands where in such a row. Everyone else asks for the price itself (`price`, or
`prices_of` for many rows at once), its tangent, a line below it, its linear part or its kinks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamic_cp._jit import compiled, inlined

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NUM_KINKS = 4
"""Kinks of one direction: two of its own (first and later steps) and two of the forward pass that it repeats."""
_FIRST_KINK, _NUMBERS_OF_KINK = 3, 4
NUM_TERMS = _FIRST_KINK + _NUMBERS_OF_KINK * NUM_KINKS
"""constant, per_token, per_token2, then (weight, a, b, c) of every kink; a weight of 0 ends the kinks."""
NUM_TERMS_OF_BOTH = _FIRST_KINK + _NUMBERS_OF_KINK * 2 * NUM_KINKS
"""The same for forward and backward together."""

IN_NODE, ACROSS_NODES = 0, 1


class Linear(NamedTuple):
    """constant + per_token * T + per_token2 * Q, in seconds."""

    constant: float = 0.0
    per_token: float = 0.0
    per_token2: float = 0.0

    def plus(self, other: Linear, times: float = 1.0) -> Linear:
        """Return self + times * other."""
        return Linear(
            self.constant + times * other.constant,
            self.per_token + times * other.per_token,
            self.per_token2 + times * other.per_token2,
        )


class Kink(NamedTuple):
    """weight * max(0, inner)."""

    weight: float
    inner: Linear


class Convex(NamedTuple):
    """Seconds of one direction: a linear part and what is exposed of hidden exchanges."""

    linear: Linear
    kinks: tuple[Kink, ...] = ()


def merged(kinks: tuple[Kink, ...]) -> tuple[Kink, ...]:
    """Return `kinks` with those of equal numbers added up and without those of weight 0."""
    weights: dict[Linear, float] = {}
    for weight, inner in kinks:
        weights[inner] = weights.get(inner, 0.0) + weight
    return tuple(Kink(weight, inner) for inner, weight in weights.items() if weight)


def terms_of(convex: Convex, num_terms: int = NUM_TERMS) -> list[float]:
    """Return the row of numbers of `convex`."""
    numbers = list(convex.linear)
    for weight, inner in convex.kinks:
        numbers += (weight, inner.constant, inner.per_token, -inner.per_token2)
    return numbers + [0.0] * (num_terms - len(numbers))


def convex_of(terms: Floats) -> Convex:
    """Return what `terms_of` made into the row `terms`."""
    numbers = terms.tolist()
    kinks = []
    for at in range(_FIRST_KINK, len(numbers), _NUMBERS_OF_KINK):
        weight, constant, per_token, per_token2 = numbers[at : at + _NUMBERS_OF_KINK]
        if weight == 0.0:
            break
        kinks.append(Kink(weight, Linear(constant, per_token, -per_token2)))
    return Convex(Linear(*numbers[:_FIRST_KINK]), tuple(kinks))


def both_ns(terms: Floats, more_s_per_token: float) -> list[float]:
    """Return the NUM_TERMS_OF_BOTH numbers of forward and backward together, in nanoseconds.

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
    """Return [..., (constant, per token, per token squared)] of [..., terms]: the price while every exchange hides."""
    return terms[..., :_FIRST_KINK]


def kinks_of(terms: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return weight, a, b and c of [..., terms], each [..., kink]."""
    kinks = terms[..., _FIRST_KINK:].reshape(*terms.shape[:-1], -1, _NUMBERS_OF_KINK)
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
    return np.asarray(total)


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
    total = terms[row, column, 0] + terms[row, column, 1] * tokens + terms[row, column, 2] * squares
    at = _FIRST_KINK
    while at < terms.shape[2] and terms[row, column, at] != 0.0:
        exposed = (
            terms[row, column, at + 1] + terms[row, column, at + 2] * tokens - terms[row, column, at + 3] * squares
        )
        if exposed > 0.0:
            total += terms[row, column, at] * exposed
        at += _NUMBERS_OF_KINK
    return total  # type: ignore[no-any-return]


@inlined
def tangent(terms: Floats, row: int, column: int, tokens: float, squares: float) -> tuple[float, float, float, bool]:
    """Return (price, its slope per token and per token squared, whether it has kinks) of `terms[row, column]`.

    The slopes are those of a bucket in which what hides now goes on hiding.
    """
    per_token, per_token2 = terms[row, column, 1], terms[row, column, 2]
    total = terms[row, column, 0] + per_token * tokens + per_token2 * squares
    at = _FIRST_KINK
    while at < terms.shape[2] and terms[row, column, at] != 0.0:
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
def growth_while_hidden(terms: Floats, row: int, column: int, padded: float) -> float:
    """Return what a sample of `padded` tokens adds to a bucket of `terms[row, column]` whose exchange stays hidden."""
    return terms[row, column, 1] * padded + terms[row, column, 2] * padded * padded  # type: ignore[no-any-return]


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
    constant, per_token, per_token2 = terms[row, column, 0] - floor, terms[row, column, 1], terms[row, column, 2]
    for kink in range(NUM_KINKS):
        weight, a, b, c = kink_at(terms, row, column, kink)
        weight *= shares[kink]
        constant += weight * a
        per_token += weight * b
        per_token2 -= weight * c
    return constant, per_token, per_token2


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


def seconds_of_rows(table: PriceTable, rows: Ints, tokens: Floats, squares: Floats) -> Floats:
    """Return [bucket, forward or backward] -> seconds of buckets that pay `rows` of the table."""
    return prices_of(table.terms[rows], tokens[:, None], squares[:, None])


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
def duration_ns(table: PriceTable, k: int, link: int, tokens: float, squares: float) -> int:
    """Return forward + backward of a bucket on the slowest stage, in whole nanoseconds."""
    option = best_option(table, k, link, tokens, squares)
    both = price(table.terms, option, 0, tokens, squares) + price(table.terms, option, 1, tokens, squares)
    both += table.slowest_s_per_token * tokens / (1 << k)
    return int(np.rint(both * 1e9))
