"""What tests of packers share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from dynamic_cp.packing.durations import Durations, Packing
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import Topology
from tests.unit.support import TINY_HARDWARE, TINY_MODEL, problem_of

DEEP_MODEL = replace(TINY_MODEL, num_layers=24)
"""Enough layers for any pipeline of the tests: every chunk needs one."""


def deep_cost_model(topology: Topology, **options: object) -> CostModel:
    return CostModel(problem_of(topology, DEEP_MODEL, TINY_HARDWARE, **{"bytes_per_element": 4, **options}))


def descending(seqlens: Iterable[int]) -> np.ndarray:
    """Return the lengths as packers take them."""
    return np.array(sorted(map(int, seqlens), reverse=True), np.int64)


def contents(packing: Packing, seqlens: np.ndarray) -> list[list[list[int]]]:
    """Return rows of non-empty buckets, by first lane, of lengths."""
    rows: list[list[list[int]]] = [[] for _ in range(packing.num_rows)]
    for bucket in np.lexsort((packing.first_lanes, packing.rows)):
        inside = seqlens[packing.bucket_of_sample == bucket].tolist()
        if inside:
            rows[packing.rows[bucket]].append(inside)
    return rows


def check_packing(packing: Packing, seqlens: np.ndarray, durations: Durations, num_lanes: int) -> None:
    """Assert what every packer promises: all samples, room, alignment, no lane twice in a row."""
    assert len(packing.bucket_of_sample) == len(seqlens)
    tokens = np.zeros(len(packing.rows), np.int64)
    for sample, bucket in enumerate(packing.bucket_of_sample):
        assert 0 <= bucket < len(packing.rows)
        multiple = durations.multiples[packing.log2_cp_sizes[bucket]]
        tokens[bucket] += -(-seqlens[sample] // multiple) * multiple
    busy = np.zeros((packing.num_rows, num_lanes), np.int64)
    for bucket in np.flatnonzero(tokens):
        cp_size, first = 1 << packing.log2_cp_sizes[bucket], packing.first_lanes[bucket]
        assert tokens[bucket] <= durations.capacities[packing.log2_cp_sizes[bucket]]
        assert first % cp_size == 0
        assert 0 <= first <= num_lanes - cp_size
        busy[packing.rows[bucket], first : first + cp_size] += 1
    assert busy.max() == 1
