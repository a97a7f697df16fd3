"""Which samples share a micro-batch, and where they lie on the lanes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.packing.dealing import deal
from dynamic_cp.pool.homes import quota_homes
from dynamic_cp.types import Sample

_UNEVEN = (1.01, 1.03, 1.1, 1.3)
"""Tokens of a row over the mean of rows, or of a lane over that of lanes: the least with which all have room."""


def longest_first(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples by descending length, then by ascending sample_id: plans do not depend on their order."""
    return sorted(samples, key=lambda sample: (-sample.seqlen, sample.sample_id))


def even_rows(samples: Sequence[Sample], num_rows: int, most_tokens: int) -> list[list[Sample]] | None:
    """Return rows with as many tokens each, as far as whole samples allow, and attention as even as that leaves it.

    Rows with little attention come first and last, where fewer stages have a row of the tick; None: no room.

    Args:
        samples: longest first.
        num_rows: micro-batches, at most as many as samples.
        most_tokens: of a row.
    """
    if any(sample.seqlen > most_tokens for sample in samples):
        return None
    items = [(sample.seqlen, float(sample.seqlen) * sample.seqlen) for sample in samples]
    mean = sum(tokens for tokens, _ in items) / num_rows
    for limit in (*(min(uneven * mean, most_tokens) for uneven in _UNEVEN), most_tokens):
        dealt = deal(items, num_rows, limit)
        if dealt is not None and all(dealt[0]):
            rows, work = dealt
            order = np.argsort(-work, kind="stable").tolist()
            middle_last = (*order[::-2], *order[len(order) % 2 :: 2])
            return [[samples[place] for place in rows[row]] for row in middle_last]
    return None


def even_homes(
    row: Sequence[Sample], num_lanes: int, most_tokens: int, tile: int, num_nano_batches: int
) -> Ints | None:
    """Return the homes of a row, lanes as even in tokens as whole tiles and documents allow; None: there is no room.

    Args:
        row: longest first.
        num_lanes: any number; most_tokens: of a lane.
        tile, num_nano_batches: as of `quota_homes`.
    """
    seqlens = np.array([sample.seqlen for sample in row], np.int64)
    mean = -(-int(seqlens.sum()) // num_lanes)
    for uneven in (*_UNEVEN, 2.0):
        capacity = min(int(uneven * mean) + 2 * num_nano_batches * tile, most_tokens)
        homes = quota_homes(seqlens, num_lanes, capacity, tile, num_nano_batches)
        if len(homes):
            return homes
    homes = quota_homes(seqlens, num_lanes, most_tokens, tile, num_nano_batches, is_last_attempt=True)
    return homes if len(homes) else None
