"""The ways in which a bucket can run, and what their prices have in common."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.pricing import table as of_prices
from dynamic_cp.pricing.table import CONSTANT, NUM_KINKS, NUM_TERMS, PER_TOKEN, PriceTable, kink_at, linear_parts, price


class Ways(NamedTuple):
    """The ways in which a bucket can run: CP size, link and exchange.

    Attributes:
        cp_sizes: [way] lanes.
        longest: [way] tokens of the longest sample that may run so.
        capacities: [way] true tokens that a bucket may hold.
        terms: [way, forward or backward, NUM_TERMS] seconds, of `pricing.table.price`: at least so much it takes.
        level_terms: the same of a bucket in a mean over all lanes of a plan, with all that its tokens cost at experts
            that other lanes share; `terms` have only what it brings by itself.
        floors_s: [forward or backward] what every bucket pays at least.
        is_even: whether the lanes of a bucket always take the same time; otherwise `terms` are those of their mean.
        expert_ratios: least and largest backward / forward of what tokens cost at such experts; (inf, 0): there are
            none.
        expert_s: [forward or backward] what a token of a lane costs there, in a mean over all lanes.
    """

    cp_sizes: Ints
    longest: Ints
    capacities: Ints
    terms: Floats
    level_terms: Floats
    floors_s: Floats
    is_even: bool
    expert_ratios: tuple[float, float]
    expert_s: Floats


def ways_of(table: PriceTable, max_tokens_per_rank: int) -> Ways:
    """Return all ways that `table` allows; CP size 1 is always there, because empty places run so."""
    rows: dict[tuple[int, bool, bytes], tuple[Floats, Floats]] = {}
    for size, allowed, floor, level in zip(
        table.floor_lanes.tolist(), table.floor_allowed.tolist(), table.floors, table.level_floors, strict=True
    ):
        if size == 1 or allowed:
            rows[size, allowed, floor.tobytes()] = floor, level
    terms, level_terms = np.array(list(rows.values())).reshape(-1, 2, 2, NUM_TERMS).swapaxes(0, 1).copy()
    ratios, expert_s = (np.inf, 0.0), np.zeros(2)
    if table.expert_lanes > 1:
        each = table.expert_terms[:, 1:]
        backward_over_forward = each[1, each[0] > 0.0] / each[0, each[0] > 0.0]
        ratios = float(backward_over_forward.min(initial=np.inf)), float(backward_over_forward.max(initial=0.0))
        expert_s = each @ (1.0, table.imbalance)
    sizes = np.array([size for size, _, _ in rows], np.int64)
    capacities = sizes * max_tokens_per_rank
    longest = np.where([allowed for _, allowed, _ in rows], capacities, 0)
    floors_s = linear_parts(terms)[:, :, CONSTANT].min(axis=0)
    return Ways(sizes, longest, capacities, terms, level_terms, floors_s, table.is_even, ratios, expert_s)


def without_experts(ways: Ways) -> Ways:
    """Return the ways with nothing of what tokens cost at experts that other lanes share."""
    terms = ways.level_terms.copy()
    terms[:, :, PER_TOKEN] -= ways.expert_s / ways.cp_sizes[:, None]
    return ways._replace(terms=terms)


@compiled
def longest_within(ways: Ways, times: float, edge_s_per_token: float, limit_s: float, least_density: float) -> Ints:
    """Return [way] -> the longest sample whose bucket may take at most `limit_s`.

    A bucket takes `times` * (forward + backward) + edge_s_per_token * tokens of a rank; no sample is less dense than
    `least_density`.
    """
    longest = ways.longest.copy()
    for way in range(longest.shape[0]):
        low, high = 0, longest[way] + 1  # low fits, high does not
        while high - low > 1:
            tokens = (low + high) // 2
            square = least_density * float(tokens) * tokens
            both = price(ways.terms, way, 0, tokens, square)
            both += price(ways.terms, way, 1, tokens, square)
            if times * both + edge_s_per_token * tokens / ways.cp_sizes[way] <= limit_s:
                low = tokens
            else:
                high = tokens
        longest[way] = low
    return longest  # type: ignore[no-any-return]


def ratio_range(ways: Ways, longest: float, least_density: float, largest_density: float) -> tuple[float, float]:
    """Return the least and the largest backward / forward above the floors, over all buckets of all ways.

    Where the host is slower in one direction only, the ratio lies between that of the GPU and that of the host.

    Args:
        ways: the prices.
        longest: padded tokens of the longest sample.
        least_density, largest_density: of all samples.
    """
    of_gpu = ways._replace(terms=of_prices.without_host(ways.terms))
    least, largest = _ratio_range(of_gpu, longest, least_density, largest_density)
    for forward, backward in np.maximum(0.0, ways.terms[..., of_prices.HOST] - ways.floors_s).tolist():
        if forward > 0.0:
            least, largest = min(least, backward / forward), max(largest, backward / forward)
        elif backward > 0.0:
            largest = np.inf
    return least, largest


@compiled
def _ratio_range(ways: Ways, longest: float, least_density: float, largest_density: float) -> tuple[float, float]:
    """Return `ratio_range` of the GPU.

    Both prices are linear in (tokens, tokens squared) between the lines where an exchange begins to show, so the
    ratio is least and largest at a crossing of two of these lines or of the borders of what a bucket can hold.
    """
    least, largest = np.inf, 0.0
    for way in range(ways.cp_sizes.shape[0]):
        capacity = float(ways.capacities[way])
        close = 1e-9 * capacity
        lines = _lines_of(ways, way, least_density, largest_density * longest)
        for first in range(lines.shape[0]):
            for second in range(first):
                tokens, squares = _crossing(lines[first], lines[second])
                if not -close <= tokens <= capacity + close:  # also where there is none
                    continue
                if squares < least_density * tokens - close or squares > largest_density * longest * (tokens + close):
                    continue
                forward = price(ways.terms, way, 0, tokens, squares) - ways.floors_s[0]
                backward = price(ways.terms, way, 1, tokens, squares) - ways.floors_s[1]
                if forward > 1e-12:
                    least, largest = min(least, backward / forward), max(largest, backward / forward)
                elif backward > 1e-12:
                    largest = np.inf
    return least, largest


@compiled
def _lines_of(ways: Ways, way: int, least_square: float, largest_square: float) -> Floats:
    """Return [line] (constant, per_token, per_token2) where constant + per_token * T + per_token2 * Q is 0.

    The lines where an exchange of the way begins to show, then four borders; a token's square lies between the two.
    """
    lines = np.zeros((2 * NUM_KINKS + 4, 3))
    for direction in range(2):
        for kink in range(NUM_KINKS):
            weight, constant, per_token, per_token2 = kink_at(ways.terms, way, direction, kink)
            if weight > 0.0:
                line = lines[direction * NUM_KINKS + kink]
                line[0], line[1], line[2] = constant, per_token, -per_token2
    lines[-4] = np.array([0.0, 1.0, 0.0])  # no tokens
    lines[-3] = np.array([-float(ways.capacities[way]), 1.0, 0.0])
    lines[-2] = np.array([0.0, least_square, -1.0])  # samples of one token
    lines[-1] = np.array([0.0, largest_square, -1.0])  # longest samples only
    return lines


@inlined
def _crossing(a: Floats, b: Floats) -> tuple[float, float]:
    """Return (tokens, tokens squared) where two lines cross, NaN where they are parallel."""
    determinant = a[1] * b[2] - a[2] * b[1]
    if abs(determinant) <= 1e-14 * (abs(a[1] * b[2]) + abs(a[2] * b[1])):
        return np.nan, np.nan
    return (a[2] * b[0] - a[0] * b[2]) / determinant, (a[0] * b[1] - a[1] * b[0]) / determinant
