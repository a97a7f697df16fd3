"""Both ways to count a rank's tokens agree: from the lengths that samples are padded to, and from the bucket alone."""

from __future__ import annotations

import random

import pytest

from dynamic_cp.plans.padding import padded_of, rank_tokens
from dynamic_cp.types import Bucket
from tests.unit.support import samples_of


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rank_token_multiple", [1, 2, 3, 4, 8, 16, 64])
def test_a_rank_holds_its_share_of_the_padded_lengths(cp_size: int, rank_token_multiple: int) -> None:
    rng = random.Random(f"{cp_size} {rank_token_multiple}")
    for number in (0, 1, 1, 2, 5, 9):
        samples = samples_of([rng.randint(1, 70) for _ in range(number)])
        bucket = Bucket(first_lane=0, cp_size=cp_size, samples=tuple(samples))
        padded = padded_of(bucket, rank_token_multiple)
        tokens = rank_tokens(bucket, rank_token_multiple)
        assert tokens * cp_size == sum(padded)
        assert tokens % rank_token_multiple == 0
        assert all(length >= sample.seqlen for length, sample in zip(padded, samples, strict=False))
        if cp_size > 1:
            assert all(length % (2 * cp_size) == 0 for length in padded[:-1])
            assert tokens % 2 == 0
