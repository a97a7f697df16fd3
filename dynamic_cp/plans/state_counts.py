"""As how many samples or runs the states of linear attention count that lanes keep or pass on."""

from __future__ import annotations

from collections.abc import Iterable

from dynamic_cp.types import Bucket, Sample
from dynamic_cp.types.branches import Branches
from dynamic_cp.types.linear_attention import CHUNKS_PER_LANE

STATES_OF_A_SCAN = 0.5
"""What a lane keeps of a run of a branch that it scans by itself, over what it keeps of one whose states are passed on:
the state before it, and no summary, which is at least as large."""


def runs_of_branches(sample: Sample) -> int:
    """Return how many more runs a sample has than its chunks: a segment cuts one in two."""
    return len(sample.mask.shape()[0]) - 1 if isinstance(sample.mask, Branches) else 0


def scans_of_branches(samples: Iterable[Sample]) -> int:
    """Return the runs of those samples that have several, where one lane has all."""
    return sum(1 + more for more in map(runs_of_branches, samples) if more)


def states_of_sample(sample: Sample, cp_size: int = 1) -> float:
    """Return as how many samples one counts whose states are passed on: branches are more, and spread over lanes.

    With the default their runs may all lie on one lane.
    """
    return 1 + runs_of_branches(sample) / (CHUNKS_PER_LANE * cp_size)


def samples_passed_on(bucket: Bucket) -> float:
    """Return as how many samples those of a bucket count that passes on states; 0 of another."""
    return sum(states_of_sample(one, bucket.cp_size) for one in bucket.samples) if bucket.exchanges_states else 0.0


def room_for_runs(max_tokens_per_rank: int) -> int:
    """Return for the states of how many runs there is room beside so many tokens, where attention may be placed.

    A lane holds at least one run of a sample that fills all lanes, so these may not count as tokens.
    """
    return 4 + max_tokens_per_rank // 1024
