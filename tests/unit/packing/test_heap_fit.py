"""The helpers of the inner loops, against sorted lists and linear search."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dynamic_cp.packing.durations import bucket_ns, durations_of, padded_seqlen
from dynamic_cp.packing.rows import longest_that_fits, next_unused, skip
from dynamic_cp.types import Topology
from tests.unit.packing.packings import descending
from tests.unit.support import causal, tiny_cost_model


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
