"""Which buckets of a packing pass on states of linear attention instead of exchanging heads.

Packers know the tokens of buckets, and price an exchange of heads. States cost by the sample, so a finished packing is
gone through bucket by bucket. A bucket passes on states if they fit under the token limit and neither direction gets
slower, so no plan gets slower. `--state-exchange states` drops the second condition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Bools, Floats, Ints
from dynamic_cp.memory.activations import tokens_of_states
from dynamic_cp.packing.judge import PricedPacking, grid_of_priced, makespan_of_grid_ns, price_packing
from dynamic_cp.plans.stretches import STATES_OF_A_SCAN, states_of_sample, stretches_of_branches
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import prices_of
from dynamic_cp.pricing.work import Lengths
from dynamic_cp.search.candidates import Batch, Candidate, Judged, as_packed
from dynamic_cp.types import Problem
from dynamic_cp.types.linear_attention import CHUNKS_PER_LANE

_SAVED = 0.1
"""Share of a step that passing on states may save. The fastest candidate of each kind is tried with states if it is
slower by no more than that. Of 32 batches 0.2 found no faster plan in any, 0.05 lost up to 4 %."""


def with_room_for_branches(packers: CostModel, problem: Problem, batch: Batch) -> CostModel:
    """Return prices whose limit leaves room for the states of branches, in the mean of the batch's tokens.

    Packers know tokens alone, and states of linear attention that a lane scans by itself are no tokens. The limit stays
    where the longest sample would not fit under a lower one.
    """
    runs, (longest, *_), options = stretches_of_branches(batch.samples), batch.samples, packers.options
    if not runs:
        return packers
    of_run = STATES_OF_A_SCAN / CHUNKS_PER_LANE * tokens_of_states(packers.model, packers.topology, options)
    lower = int(options.max_tokens_per_rank / (1 + runs * of_run / int(batch.lengths.seqlens.sum())))
    if lower < 1:
        return packers
    with_room = CostModel(replace(problem, options=replace(options, max_tokens_per_rank=lower)))
    return with_room if longest.seqlen <= with_room.table.capacities.max() else packers


def judged(ranking: Sequence[Candidate], batch: Batch, limit: int) -> Judged:
    """Return the fastest candidate, each of whose buckets exchanges heads or states, whichever is faster.

    Args:
        ranking: the fastest first by heads, of lanes that may pass on states.
        limit: of tokens of a rank, states among them; packers may have kept to a lower one.
    """
    lengths = batch.lengths
    prices = ranking[0].cost_model
    tokens_of_sample = tokens_of_states(prices.model, prices.topology, prices.options)
    branches = [0.0 if sample.mask is None else states_of_sample(sample) - 1.0 for sample in batch.samples]
    passing = _Passing(lengths, np.array(branches), tokens_of_sample, limit)
    best, kinds = _with_states(ranking[0], passing), {_kind_of(ranking[0])}
    for candidate in ranking[1:]:
        if candidate.makespan_ns * (1 - _SAVED) >= best.makespan_ns:
            break
        if _kind_of(candidate) not in kinds:
            kinds.add(_kind_of(candidate))
            other = _with_states(candidate, passing)
            best = other if other.rank < best.rank else best
    return best


def _kind_of(candidate: Candidate) -> str:
    """Return how a candidate was packed, without its sizes."""
    return candidate.name.partition("=")[0].partition(" ")[0]


class _Passing(NamedTuple):
    """What passing on states takes.

    Attributes:
        lengths: of the samples.
        branches: [sample] runs of its branches, in samples of one lane.
        tokens_of_sample: tokens of a rank that take as much memory as the states of a sample.
        limit: of tokens and states together.
    """

    lengths: Lengths
    branches: Floats
    tokens_of_sample: float
    limit: int


def _with_states(candidate: Candidate, passing: _Passing) -> Judged:
    """Return a candidate whose buckets pass on states where they may."""
    priced, prices = price_packing(passing.lengths, candidate.packing, candidate.cost_model), candidate.cost_model
    packing = candidate.packing
    shared = np.flatnonzero((packing.log2_cp_sizes > 0) & (priced.tokens > 0))
    if not len(shared):
        return as_packed(candidate, priced)
    k, rows = packing.log2_cp_sizes[shared], priced.price_rows[shared]
    numbers, branches = (
        np.bincount(packing.bucket_of_sample, weights, len(priced.tokens))[shared]
        for weights in (None, passing.branches)
    )
    links = prices.table.links[k, packing.first_lanes[shared] >> k]
    shifts = prices.shifts_of_states(k, links, numbers + branches / (1 << k))
    # All runs of branches may lie on one lane.
    held = priced.tokens[shared] / (1 << k) + (numbers + branches) * passing.tokens_of_sample
    wanted = np.ones(len(shared), np.bool_)
    if prices.options.state_exchange == "auto":
        wanted = _are_faster(prices, priced, shared, shifts)
    chosen = np.logical_and(wanted, held <= passing.limit)
    num_too_large = 0 if prices.options.state_exchange == "auto" else int((~chosen).sum())
    if chosen.any():
        which, terms = rows[chosen], prices.table
        first = len(terms.terms)
        prices = prices.with_rows(
            terms.terms[which] + shifts[chosen],
            terms.level_terms[which] + shifts[chosen],
            [prices.attentions[row] for row in which.tolist()],
        )
        price_rows = priced.price_rows.copy()
        price_rows[shared[chosen]] = first + np.arange(len(which))
        priced = priced._replace(price_rows=price_rows)
    grid = grid_of_priced(priced, prices)
    makespan_ns = makespan_of_grid_ns(grid, prices) if chosen.any() else candidate.makespan_ns
    return Judged(candidate, priced, prices, grid, makespan_ns, int(chosen.sum()), len(shared), num_too_large)


def _are_faster(prices: CostModel, priced: PricedPacking, shared: Ints, shifts: Floats) -> Bools:
    """Return [shared bucket] -> whether states are faster forward or backward, and never slower."""
    tokens, squares = priced.tokens[shared, None], priced.squares[shared, None]
    terms = prices.table.terms[priced.price_rows[shared]]
    by_heads, by_states = prices_of(np.stack([terms, terms + shifts]), tokens, squares)
    are_faster: Bools = (by_states <= by_heads).all(axis=1) & (by_states < by_heads).any(axis=1)
    return are_faster
