"""What packers share: rules of padding, the one price that they compare, and the arrays that they return.

The price is forward + backward of a bucket on the slowest stage. The rules of padding are those of
`dynamic_cp/plans/padding.py`, compiled for inner loops. Samples are always sorted by descending seqlen, then ascending
sample_id; a sample is its index in that order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.plans import padding
from dynamic_cp.pricing.table import (
    NUM_TERMS_OF_BOTH,
    PER_MEAN,
    PER_ROUTED,
    PER_TOKEN,
    PriceTable,
    both_ns,
    price_inlined,
)
from dynamic_cp.pricing.work import Lengths, density_of
from dynamic_cp.types import ACROSS_NODES, IN_NODE

padded_seqlen = inlined(padding.padded_seqlen)
_rank_multiple = inlined(padding.rank_multiple)
_missing_tokens = inlined(padding.missing_tokens)


@compiled
def sums_of_buckets(
    lengths: Lengths, bucket_of_sample: Ints, log2_cp_sizes: Ints, multiples: Ints, rank_token_multiple: int
) -> tuple[Floats, Floats]:
    """Return [bucket] -> (sum, sum of squares) of padded lengths, with what the last sample takes for the rank.

    Args:
        lengths: the samples; a square counts by its density.
        bucket_of_sample: [sample].
        log2_cp_sizes: [bucket].
        multiples, rank_token_multiple: of the price table.
    """
    seqlens, densities = lengths
    num_buckets = len(log2_cp_sizes)
    tokens, squares = np.zeros(num_buckets), np.zeros(num_buckets)
    last, last_density = np.zeros(num_buckets), np.zeros(num_buckets)
    for sample in range(len(seqlens)):
        bucket = bucket_of_sample[sample]
        padded = float(padded_seqlen(seqlens[sample], multiples[log2_cp_sizes[bucket]]))
        tokens[bucket] += padded
        squares[bucket] += last_density[bucket] * last[bucket] * last[bucket]
        last[bucket], last_density[bucket] = padded, density_of(densities, sample)
    for bucket in range(num_buckets):
        cp_size = 1 << log2_cp_sizes[bucket]
        unit = _rank_multiple(cp_size, rank_token_multiple)
        missing = float(_missing_tokens(int(tokens[bucket]), cp_size, unit))
        tokens[bucket] += missing
        squares[bucket] += last_density[bucket] * (last[bucket] + missing) * (last[bucket] + missing)
    return tokens, squares


class Durations(NamedTuple):
    """What a packer needs to know of a price table.

    A packer does not know yet on which lanes a bucket will lie, so a CP size whose groups partly span nodes is priced
    as if all did; the simulator then prices each bucket by its own lanes. Nor does it know what other lanes of a block
    that shares experts will hold: as many tokens each. What the host takes is left to the simulator, too: by it, short
    samples seem to cost nothing.

    Attributes:
        terms: [log2 of CP size, exchange, NUM_TERMS_OF_BOTH] nanoseconds of forward and backward together, of
            `pricing.table.both_ns`.
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
    links = [ACROSS_NODES if row.max() else IN_NODE for row in links_of(table, num_lanes)]
    first = [int(table.first_option[k, link]) for k, link in enumerate(links)]
    num_exchanges = np.array([table.end_option[k, link] - first[k] for k, link in enumerate(links)], np.int64)
    terms = np.zeros((num_sizes, max(1, num_exchanges.max()), NUM_TERMS_OF_BOTH))
    for k in range(num_sizes):
        for exchange in range(num_exchanges[k]):
            terms[k, exchange] = both_ns(table.level_terms[first[k] + exchange], table.slowest_s_per_token / (1 << k))
    return Durations(terms, num_exchanges, table.multiples[:num_sizes], table.capacities[:num_sizes])


def links_of(table: PriceTable, num_lanes: int) -> list[Ints]:
    """Return [log2 of CP size] -> links of the groups that `num_lanes` lanes hold."""
    return [row[: num_lanes >> k] for k, row in enumerate(table.links[: num_lanes.bit_length()])]


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


class Packing(NamedTuple):
    """Samples in buckets, buckets in rows; a row becomes one micro-batch. Lanes that no bucket covers stay empty.

    Attributes:
        num_rows: rows, in the order in which lanes run them.
        bucket_of_sample: [sample] -> bucket.
        rows, first_lanes, log2_cp_sizes: [bucket] -> row, first lane (a multiple of the CP size), log2 of the CP size.
    """

    num_rows: int
    bucket_of_sample: Ints
    rows: Ints
    first_lanes: Ints
    log2_cp_sizes: Ints


def reordered(packing: Packing, order: Ints) -> Packing:
    """Return `packing` with its rows in another order: `order` is [new position] -> row."""
    position = np.empty(packing.num_rows, np.int64)
    position[order] = np.arange(packing.num_rows)
    return packing._replace(rows=position[packing.rows])


def without_empty_rows(packing: Packing) -> Packing:
    """Return `packing` without the buckets and the rows that hold no sample."""
    used, bucket_of_sample = np.unique(packing.bucket_of_sample, return_inverse=True)
    rows, position = np.unique(packing.rows[used], return_inverse=True)
    return Packing(len(rows), bucket_of_sample, position, packing.first_lanes[used], packing.log2_cp_sizes[used])


def pyramid(row_ns: Floats) -> Ints:
    """Return the order short - long - short of rows with these durations, the best one for a pipeline.

    Random order costs 1.2 to 2.1 times the step time at 8 stages, descending 1.03 to 1.07, ascending 1.02 to 1.05
    (planner experiments on the frozen cost model, 2026-11-20).
    """
    ascending = np.argsort(row_ns, kind="stable")
    return np.concatenate([ascending[::2], ascending[1::2][::-1]])
