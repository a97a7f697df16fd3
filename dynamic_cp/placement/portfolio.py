"""Ways to place a micro-batch, by name, and the few settings of them among which simulation chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.documents import Caps, Held, emptiest
from dynamic_cp.placement.levels import Effort, place_graph
from dynamic_cp.placement.placed import Placed, placed_of
from dynamic_cp.placement.problem import PlacementProblem
from dynamic_cp.placement.runs import SUB_TILE
from dynamic_cp.placement.token_graph import Blocks, blocks_of
from dynamic_cp.types.counts import MAX_COUNT, largest_power_of_two
from dynamic_cp.types.plan import Sample

_NUM_STARTS = 4
_NUM_SWEEPS = 20
_NUM_ROUNDS = 3


def place_whole(samples: Sequence[Sample], problem: PlacementProblem) -> Placed:
    """Return whole samples on lanes, longest first, each on the lane that is least full: nothing travels."""
    blocks = blocks_of(samples, MAX_COUNT, problem.row_bytes, problem.column_bytes, share_bins=False)
    lanes = _least_full(blocks.graph.tokens, blocks.graph.work.astype(np.float64), problem.num_lanes)
    return placed_of(blocks, lanes, lanes, problem, is_even=False)


def place_zigzag(samples: Sequence[Sample], problem: PlacementProblem, block_size: int) -> Placed:
    """Return blocks dealt to lanes 0, 1, ..., K - 1, K - 1, ..., 0 and so on; a tile is where its queries are."""
    return _zigzag(_blocks(samples, problem, block_size), problem)


def place_greedily(samples: Sequence[Sample], problem: PlacementProblem, block_size: int) -> Placed:
    """Return whole documents where they fit, the others split over few nodes and lanes; nothing is moved any more."""
    return _greedy(_blocks(samples, problem, block_size), problem)


def search_placement(
    samples: Sequence[Sample], problem: PlacementProblem, block_size: int, *, moves_rows: bool = True
) -> Placed:
    """Return what a local search over rows (with `moves_rows`) and then over tiles makes of such a beginning."""
    return (_search if moves_rows else _search_tiles)(_blocks(samples, problem, block_size), problem)


class Maker(NamedTuple):
    """A way to place a micro-batch.

    Attributes:
        name: of the way, and of how many tokens blocks are.
        make: what makes a placement; where it `takes_seed`, from a seed.
        takes_seed: another seed, another placement.
    """

    name: str
    make: Callable[..., Placed]
    takes_seed: bool = False

    def __call__(self, seed: int = 0) -> Placed:
        return self.make(seed) if self.takes_seed else self.make()


def candidates(samples: Sequence[Sample], problem: PlacementProblem) -> Iterator[Maker]:
    """Yield ways to place, first what takes little to find, then best guess first: simulation says what is best.

    Blocks have an eighth, a quarter or half of the tokens of a lane, rounded down to powers of two, and at least a
    sub-tile's. Works are even to the problem's tolerance, less so (fewer bytes: mostly best under sparse masks), or
    more.
    """
    mean = max(1, sum(sample.seqlen for sample in samples) // problem.num_lanes)
    eighth, quarter, half = (max(SUB_TILE, largest_power_of_two(max(1, mean // parts))) for parts in (8, 4, 2))
    uneven, even = (replace(problem, work_tolerance=times * problem.work_tolerance) for times in (4.0, 0.3))

    @lru_cache
    def blocks(block_size: int) -> Blocks:
        return _blocks(samples, problem, block_size)

    # Small batches have blocks of one size only.
    for name, way, size, of_work in dict.fromkeys(
        (
            ("greedy", _greedy, half, problem),
            ("search", _search, quarter, uneven),
            ("tiles", _search_tiles, half, problem),
            ("zigzag", _zigzag, quarter, problem),
            ("search", _search, eighth, uneven),
            ("search", _search, quarter, even),
            ("search", _search, eighth, problem),
            ("search", _search, half, uneven),
            ("search", _search, quarter, problem),
            ("search", _search, half, problem),
        )
    ):
        yield Maker(f"{name} {size}", partial(way, blocks(size), of_work), takes_seed=way is _search)
    yield Maker("documents", partial(place_whole, samples, problem))


def _blocks(samples: Sequence[Sample], problem: PlacementProblem, block_size: int) -> Blocks:
    return blocks_of(samples, block_size, problem.row_bytes, problem.column_bytes)


def _zigzag(blocks: Blocks, problem: PlacementProblem) -> Placed:
    graph = blocks.graph
    turns = np.arange(len(graph.tokens)) % (2 * problem.num_lanes)
    homes = np.minimum(turns, 2 * problem.num_lanes - 1 - turns)
    return placed_of(blocks, homes, homes[graph.ends[0]], problem)


def _greedy(blocks: Blocks, problem: PlacementProblem) -> Placed:
    return _placed(blocks, problem, Effort(_NUM_STARTS, 0, 0, 0))


def _search_tiles(blocks: Blocks, problem: PlacementProblem) -> Placed:
    return _placed(blocks, problem, Effort(_NUM_STARTS, 0, _NUM_ROUNDS, 0))


def _search(blocks: Blocks, problem: PlacementProblem, seed: int = 0) -> Placed:
    return _placed(blocks, problem, Effort(_NUM_STARTS, _NUM_SWEEPS, _NUM_ROUNDS, seed))


def _placed(blocks: Blocks, problem: PlacementProblem, effort: Effort) -> Placed:
    homes, lanes = place_graph(
        blocks.graph, problem.num_lanes, problem.node_lanes, problem.token_tolerance, problem.work_tolerance, effort
    )
    return placed_of(blocks, homes, lanes, problem)


@compiled
def _least_full(sample_tokens: Ints, sample_work: Floats, num_lanes: int) -> Ints:
    """Return [sample] -> lane; samples are descending by length."""
    lanes = np.empty(len(sample_tokens), np.int64)
    held = Held(np.zeros(num_lanes), np.zeros(num_lanes))
    caps = Caps(np.full(num_lanes, float(sample_tokens.sum())), np.full(num_lanes, sample_work.sum()))
    for sample in range(len(lanes)):
        lane, _ = emptiest(float(sample_tokens[sample]), sample_work[sample], held, caps)
        lanes[sample] = lane
        held.tokens[lane] += sample_tokens[sample]
        held.work[lane] += sample_work[sample]
    return lanes
