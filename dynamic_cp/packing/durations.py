"""Forward + backward of a bucket on the slowest stage: the one price that packers compare."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.packing.padded import padded_seqlen
from dynamic_cp.pricing.table import PER_MEAN, PER_ROUTED, PriceTable
from dynamic_cp.pricing.terms import NUM_TERMS_OF_BOTH, PER_TOKEN, both_ns, price_inlined
from dynamic_cp.types import ACROSS_NODES, IN_NODE


class Durations(NamedTuple):
    """What a packer needs to know of a price table.

    A packer does not know yet on which lanes a bucket will lie, so a CP size whose groups partly span nodes is priced
    as if all did; the simulator then prices each bucket by its own lanes. Nor does it know what other lanes of a block
    that shares experts will hold: as many tokens each. What the host takes is left to the simulator, too: by it, short
    samples seem to cost nothing.

    Attributes:
        terms: [log2 of CP size, exchange, NUM_TERMS_OF_BOTH] nanoseconds of forward and backward together, of
            `pricing.terms.both_ns`.
        num_exchanges: [log2 of CP size].
        multiples, capacities: [log2 of CP size], as in the price table; capacity 0 where a CP size is not allowed.
    """

    terms: Floats
    num_exchanges: Ints
    multiples: Ints
    capacities: Ints


def durations_of(table: PriceTable, num_lanes: int) -> Durations:
    """Return the durations of the CP sizes of `table` that `num_lanes` lanes can hold."""
    num_sizes = num_lanes.bit_length()
    links = [ACROSS_NODES if row[: num_lanes >> k].max() else IN_NODE for k, row in enumerate(table.links[:num_sizes])]
    first = [int(table.first_option[k, link]) for k, link in enumerate(links)]
    num_exchanges = np.array([table.end_option[k, link] - first[k] for k, link in enumerate(links)], np.int64)
    terms = np.zeros((num_sizes, max(1, num_exchanges.max()), NUM_TERMS_OF_BOTH))
    for k in range(num_sizes):
        for exchange in range(num_exchanges[k]):
            terms[k, exchange] = both_ns(table.level_terms[first[k] + exchange], table.slowest_s_per_token / (1 << k))
    return Durations(terms, num_exchanges, table.multiples[:num_sizes], table.capacities[:num_sizes])


def apart_durations_of(table: PriceTable, num_lanes: int) -> Durations:
    """Return the durations without what experts that lanes share cost by the mean of their tokens.

    All tokens of a batch pass through experts in any packing. What it decides is how level the rest of a row is: for
    the lanes of a block the longest counts.
    """
    terms = table.level_terms.copy()
    for k in range(len(table.first_option)):
        for row in {*range(*_ends(table, k, IN_NODE)), *range(*_ends(table, k, ACROSS_NODES))}:
            without = table.expert_terms[:, PER_MEAN] + (table.imbalance - 1.0) * table.expert_terms[:, PER_ROUTED]
            terms[row, :, PER_TOKEN] -= without / (1 << k)
    return durations_of(table._replace(level_terms=terms), num_lanes)


def _ends(table: PriceTable, k: int, link: int) -> tuple[int, int]:
    return int(table.first_option[k, link]), int(table.end_option[k, link])


@compiled
def bucket_ns(durations: Durations, k: int, tokens: float, squares: float) -> float:
    """Return whole nanoseconds of a bucket of CP size 2^k at its fastest exchange; sums are of padded lengths."""
    return fastest_ns(durations.terms, durations.num_exchanges, k, tokens, squares)


@compiled
def fastest_ns(terms: Floats, num_exchanges: Ints, k: int, tokens: float, squares: float) -> float:
    """Return `bucket_ns`; for inner loops, which are faster with the arrays themselves than with a tuple of them."""
    least = np.inf
    for e in range(num_exchanges[k]):
        least = min(least, price_inlined(terms, k, e, tokens, squares))
    return np.rint(least)  # type: ignore[no-any-return]


@compiled
def sample_ns(durations: Durations, k: int, seqlen: int, density: float) -> float:
    """Return whole nanoseconds of a sample alone in a bucket of CP size 2^k; infinite where it does not fit."""
    padded = padded_seqlen(seqlen, durations.multiples[k])
    if padded > durations.capacities[k]:
        return np.inf
    return bucket_ns(durations, k, float(padded), density * float(padded) * float(padded))
