"""The helpers of the inner loops, against sorted lists and linear search."""

from __future__ import annotations

import heapq
import random

import numpy as np
import pytest

from dynamic_cp.loops import sift_down, sift_up
from dynamic_cp.packing.durations import bucket_ns, durations_of, padded_seqlen
from dynamic_cp.packing.rows import first_unused, longest_that_fits, next_unused, skip
from dynamic_cp.types import Topology
from tests.unit.packing.packings import descending
from tests.unit.support import causal, tiny_cost_model


@pytest.mark.parametrize("seed", range(20))
def test_the_heap_gives_items_by_key_then_number(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 40)
    keys = np.array([float(rng.randint(0, 6)) for _ in range(count)])
    items = np.zeros(count, np.int64)
    for size, item in enumerate(rng.sample(range(count), count)):
        items[size] = item
        sift_up(keys, items, size)
    reference = [(key, item) for item, key in enumerate(keys.tolist())]
    heapq.heapify(reference)
    for _ in range(100):
        key, item = reference[0]
        assert items[0] == item
        keys[item] = key + rng.randint(0, 4)
        heapq.heapreplace(reference, (keys[item], item))
        sift_down(keys, items, count)
    for size in range(count, 0, -1):
        assert items[0] == heapq.heappop(reference)[1]
        items[0] = items[size - 1]
        sift_down(keys, items, size - 1)


def test_equal_keys_come_by_number_from_any_start():
    keys = np.zeros(7)
    items = np.arange(7)
    for at in range(6, -1, -1):
        taken = items[0]
        assert taken == 6 - at
        items[0] = items[at]
        sift_down(keys, items, at)


def test_used_samples_are_skipped():
    unused = next_unused(6, 2)
    assert [first_unused(unused, sample) for sample in range(7)] == [2, 2, 2, 3, 4, 5, 6]
    for sample in (3, 2, 5):
        skip(unused, sample)
    assert [first_unused(unused, sample) for sample in range(7)] == [4, 4, 4, 4, 4, 6, 6]
    skip(unused, 4)
    assert first_unused(unused, 0) == 6


@pytest.mark.parametrize("exchange", ["p2p", "all_gather"])
@pytest.mark.parametrize("tp_size", [1, 3])
def test_the_longest_that_fits_is_what_a_linear_search_finds(exchange, tp_size):
    rng = random.Random(tp_size)
    topology = Topology(num_lanes=4, tp_size=tp_size, sequence_parallel=True, ranks_per_node=2)
    model = tiny_cost_model(topology, max_tokens_per_rank=96, cp_comm_types=(exchange,))
    durations = durations_of(model.table, 4)
    kinds = set()
    for _ in range(400):
        seqlens = descending(rng.randint(1, 120) for _ in range(rng.randint(1, 12)))
        unused = next_unused(len(seqlens), 0)
        used = [sample for sample in range(len(seqlens)) if rng.random() < 0.3]
        for sample in used:
            skip(unused, sample)
        k, start = rng.randrange(3), rng.randint(0, len(seqlens))
        inside = [float(rng.randint(1, 20) * durations.multiples[k]) for _ in range(rng.randint(0, 3))]
        tokens, squares = sum(inside), sum(n * n for n in inside)
        limit_ns = rng.choice([np.inf, bucket_ns(durations, k, 100.0, 5000.0) + 0.25, 0.0])

        def fits(sample, k=k, tokens=tokens, squares=squares, limit_ns=limit_ns, seqlens=seqlens):
            padded = float(padded_seqlen(seqlens[sample], durations.multiples[k]))
            room = tokens + padded <= durations.capacities[k]
            return room and bucket_ns(durations, k, tokens + padded, squares + padded**2) <= limit_ns

        expected = next((one for one in range(start, len(seqlens)) if one not in used and fits(one)), len(seqlens))
        found = longest_that_fits(causal(seqlens), durations, unused, start, k, tokens, squares, limit_ns)
        assert found == expected
        kinds.add((k, limit_ns == np.inf, expected == len(seqlens)))
    assert len(kinds) == 12
