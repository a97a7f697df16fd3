"""Blocks simulated alone, and what the critical path of each crosses."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dynamic_cp.packing.profile import simulate_blocks
from dynamic_cp.pipeline.longest_path import Grid, longest_path_ns
from dynamic_cp.pipeline.schedule import BACKWARD, FORWARD, pipeline_graph

BLOCKS = np.array([0, 4, 6]), np.array([4, 2, 1])


def random_grid(rng: random.Random, num_rows: int) -> Grid:
    """Return random durations of groups that stay inside their block."""
    sizes = np.ones((num_rows, 7), np.int64)
    values = np.zeros((7, num_rows, 7), np.int64)
    for row in range(num_rows):
        for start, width in zip(*BLOCKS, strict=True):
            size = rng.choice([one for one in (1, 2, 4) if one <= width])
            for first in range(start, start + width, size):
                sizes[row, first : first + size] = size
                for which, largest in enumerate((9000, 20000, 300, 500, 2000, 4000, 700)):
                    values[which, row, first : first + size] = rng.randint(1, largest)
    return Grid(sizes, values[:2].copy(), values[2:6].reshape(2, 2, num_rows, 7).copy(), values[6].copy())


def simulated(grid: Grid, pp_size: int, vp_size: int, backward_over_forward: float):
    graph = pipeline_graph(pp_size, grid.sizes.shape[0], vp_size)
    return simulate_blocks(graph, vp_size, grid, *BLOCKS, backward_over_forward)


def block_of(grid: Grid, block: int) -> Grid:
    lanes = slice(BLOCKS[0][block], BLOCKS[0][block] + BLOCKS[1][block])
    return Grid(*(np.ascontiguousarray(part[..., lanes]) for part in grid))


@pytest.mark.parametrize(("pp_size", "vp_size", "num_rows"), [(2, 1, 5), (3, 1, 2), (4, 1, 9), (2, 2, 4), (3, 2, 6)])
def test_a_longer_row_delays_its_block_once_for_each_crossing(pp_size, vp_size, num_rows):
    rng = random.Random(num_rows)
    graph = pipeline_graph(pp_size, num_rows, vp_size)
    crossed = np.zeros(3)
    for _ in range(5):
        grid = random_grid(rng, num_rows)
        # A backward that takes 0 or ever so many times as long counts only one direction.
        for kind, ratio in ((FORWARD, 0.0), (BACKWARD, 1e30)):
            ends_ns, row_ns, crossings = simulated(grid, pp_size, vp_size, ratio)
            assert ends_ns.max() == longest_path_ns(graph, grid)
            crossed += crossings.sum(axis=1)
            for block in range(3):
                part = block_of(grid, block)
                assert ends_ns[block] == longest_path_ns(graph, part)
                assert row_ns[block].tolist() == (vp_size * part.chunk_ns.sum(axis=0).max(axis=1)).tolist()
                for row in range(num_rows):
                    longer = part._replace(chunk_ns=part.chunk_ns.copy())
                    longer.chunk_ns[kind, row] += 1000
                    later_ns = longest_path_ns(graph, longer)
                    assert later_ns >= ends_ns[block] + 1000 * crossings[block, row]
    # A path goes forward and back through all virtual stages, at least.
    assert (crossed >= 5 * 2 * pp_size * vp_size).all()
