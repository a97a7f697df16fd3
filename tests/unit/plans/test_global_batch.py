"""A global batch as arrays is the same sequence of samples."""

from __future__ import annotations

import numpy as np
import pytest

from dynamic_cp.plans.global_batch import GlobalBatch
from dynamic_cp.types import Sample

SAMPLES = tuple(Sample(sample_id=i, seqlen=n) for i, n in ((7, 30), (2, 1), (9, 512), (3, 8)))


def test_it_is_a_sequence_of_samples():
    batch = GlobalBatch.of(SAMPLES)
    assert len(batch) == 4
    assert tuple(batch) == SAMPLES == (*batch[:2], *batch[2:])
    assert batch == SAMPLES
    assert batch != SAMPLES[:3]
    assert batch[-1] == SAMPLES[-1]
    assert list(reversed(batch)) == list(reversed(SAMPLES))
    assert SAMPLES[2] in batch
    assert GlobalBatch.of(batch) is batch
    with pytest.raises(IndexError):
        batch[4]


def test_lengths_are_found_by_id():
    found = GlobalBatch.of(SAMPLES).seqlens_of(np.array([9, 2, 8, 7, 100, -1]))
    assert found.tolist() == [512, 1, 0, 30, 0, 0]
    assert GlobalBatch.of(()).seqlens_of(np.array([1])).tolist() == [0]
