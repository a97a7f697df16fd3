"""Ways to place a micro-batch, by name, and the few settings of them among which simulation chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.blocks import Blocks, blocks_of
from dynamic_cp.placement.documents import Caps, emptiest
from dynamic_cp.placement.levels import Effort, place_graph
from dynamic_cp.placement.placed import Placed, placed_of
from dynamic_cp.placement.problem import PlacementProblem
from dynamic_cp.placement.runs import SUB_TILE
from dynamic_cp.types.counts import MAX_COUNT, largest_power_of_two
from dynamic_cp.types.plan import Sample

_NUM_STARTS = 4
_NUM_SWEEPS = 20
_NUM_ROUNDS = 3


def place_whole(samples: Sequence[Sample], problem: PlacementProblem) -> Placed:
    """Return whole samples on lanes, longest first, each on the lane that is least full: nothing travels."""
    blocks = blocks_of(samples, MAX_COUNT, problem.row_bytes, problem.column_bytes, share_bins=False)
    lanes = _least_full(blocks.graph.tokens, blocks.graph.work.astype(np.float64), problem.num_lanes)
    return placed_of("documents", blocks, lanes, lanes, problem, is_even=False)


def place_zigzag(samples: Sequence[Sample], problem: PlacementProblem, block_size: int) -> Placed:
    """Return blocks dealt to lanes 0, 1, ..., K - 1, K - 1, ..., 0 and so on; a tile is where its queries are."""
    return _zigzag(_Cut.of(samples, problem, block_size), problem)


def place_greedily(samples: Sequence[Sample], problem: PlacementProblem, block_size: int) -> Placed:
    """Return whole documents where they fit, the others split over few nodes and lanes; nothing is moved any more."""
    return _greedy(_Cut.of(samples, problem, block_size), problem)


def search_placement(
    samples: Sequence[Sample], problem: PlacementProblem, block_size: int, *, moves_rows: bool = True
) -> Placed:
    """Return what a local search over rows (with `moves_rows`) and then over tiles makes of such a beginning."""
    return _search(_Cut.of(samples, problem, block_size), problem, problem.seed, moves_rows=moves_rows)


Maker = Callable[[int], Placed]
"""Seed -> placement; some are the same with every seed."""


def candidates(samples: Sequence[Sample], problem: PlacementProblem) -> Iterator[Maker]:
    """Yield ways to place, best guess first: what is best depends on what is simulated.

    Blocks have an eighth, a quarter or half of the tokens of a lane, rounded down to powers of two, and at least a
    sub-tile's. Works are even to the problem's tolerance, less so (fewer bytes: mostly best under sparse masks), or
    more.
    """
    mean = max(1, sum(sample.seqlen for sample in samples) // problem.num_lanes)
    eighth, quarter, half = (max(SUB_TILE, largest_power_of_two(max(1, mean // parts))) for parts in (8, 4, 2))
    uneven, even = (replace(problem, work_tolerance=times * problem.work_tolerance) for times in (4.0, 0.3))

    @lru_cache
    def cut(block_size: int) -> _Cut:
        return _Cut.of(samples, problem, block_size)

    yield lambda seed: _greedy(cut(half), problem)
    yield partial(_search, cut(quarter), uneven)
    yield partial(_search, cut(half), problem, moves_rows=False)
    yield lambda seed: _zigzag(cut(quarter), problem)
    for size, of_work in ((eighth, uneven), (quarter, even), (eighth, problem), (half, uneven), (quarter, problem)):
        yield partial(_search, cut(size), of_work)
    yield lambda seed: place_whole(samples, problem)
    yield partial(_search, cut(half), problem)


class _Cut(NamedTuple):
    """A micro-batch cut into blocks of at most so many tokens."""

    block_size: int
    blocks: Blocks

    @classmethod
    def of(cls, samples: Sequence[Sample], problem: PlacementProblem, block_size: int) -> _Cut:
        return cls(block_size, blocks_of(samples, block_size, problem.row_bytes, problem.column_bytes))


def _zigzag(cut: _Cut, problem: PlacementProblem) -> Placed:
    graph = cut.blocks.graph
    turns = np.arange(len(graph.tokens)) % (2 * problem.num_lanes)
    homes = np.minimum(turns, 2 * problem.num_lanes - 1 - turns)
    return placed_of(f"zigzag {cut.block_size}", cut.blocks, homes, homes[graph.ends[0]], problem)


def _greedy(cut: _Cut, problem: PlacementProblem) -> Placed:
    return _searched("greedy", cut, problem, Effort(_NUM_STARTS, 0, 0, problem.seed))


def _search(cut: _Cut, problem: PlacementProblem, seed: int, *, moves_rows: bool = True) -> Placed:
    effort = Effort(_NUM_STARTS, _NUM_SWEEPS if moves_rows else 0, _NUM_ROUNDS, seed)
    return _searched("search" if moves_rows else "tiles", cut, problem, effort)


def _searched(name: str, cut: _Cut, problem: PlacementProblem, effort: Effort) -> Placed:
    homes, lanes = place_graph(
        cut.blocks.graph, problem.num_lanes, problem.node_lanes, problem.token_tolerance, problem.work_tolerance, effort
    )
    return placed_of(f"{name} {cut.block_size}", cut.blocks, homes, lanes, problem)


@compiled
def _least_full(sample_tokens: Ints, sample_work: Floats, num_lanes: int) -> Ints:
    """Return [sample] -> lane; samples are descending by length."""
    lanes = np.empty(len(sample_tokens), np.int64)
    tokens, work = np.zeros(num_lanes), np.zeros(num_lanes)
    caps = Caps(np.full(num_lanes, float(sample_tokens.sum())), np.full(num_lanes, sample_work.sum()))
    for sample in range(len(lanes)):
        lane, _ = emptiest(float(sample_tokens[sample]), sample_work[sample], tokens, work, caps)
        lanes[sample] = lane
        tokens[lane] += sample_tokens[sample]
        work[lane] += sample_work[sample]
    return lanes
