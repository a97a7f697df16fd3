"""`--split`: which documents of a source are for training, validation and test."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from dynamic_cp.errors import InvalidInputError

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(split: str) -> tuple[float, float, float]:
    """Return the three shares of a --split such as "969,30,1"; they sum to 1.

    Raises:
        InvalidInputError: not three finite weights >= 0 with a positive sum.
    """
    remedy = 'give three weights for training, validation and test such as --split "969,30,1"'
    try:
        weights = [float(word) for word in split.split(",")]
    except ValueError:
        raise InvalidInputError(f"--split {split!r} holds something that is not a number: {remedy}") from None
    if len(weights) != len(SPLIT_NAMES):
        raise InvalidInputError(f"--split {split!r} has {len(weights)} weights, not {len(SPLIT_NAMES)}: {remedy}")
    if not all(0 <= weight < float("inf") for weight in weights):
        raise InvalidInputError(f"--split {split!r} has a weight below 0 or without bound: {remedy}")
    total = sum(weights)
    if not 0 < total < float("inf"):
        raise InvalidInputError(f"--split {split!r} sums to {total}, more than 0 is needed: {remedy}")
    train, valid, test = (weight / total for weight in weights)
    return train, valid, test


def document_ranges(shares: Sequence[float], num_documents: int) -> tuple[tuple[int, int], ...]:
    """Return (first, last + 1) of each share's documents: contiguous, in order, all documents in exactly one.

    Boundaries are the rounded cumulative shares, as in megatron-core, so that both split a data set the same way.
    """
    bounds = [round(share * num_documents) for share in accumulate(shares, initial=0.0)]
    return tuple(pairwise(bounds))
