"""Which samples share a micro-batch, and where they lie on the lanes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamic_cp.arrays import Ints
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
    lengths = np.array([sample.seqlen for sample in samples], np.float64)
    mean = lengths.sum() / num_rows
    for limit in (*(min(uneven * mean, most_tokens) for uneven in _UNEVEN), most_tokens):
        rows: list[list[Sample]] = [[] for _ in range(num_rows)]
        tokens, work = np.zeros(num_rows), np.zeros(num_rows)
        for sample, length in zip(samples, lengths.tolist(), strict=True):
            fits = tokens + length <= limit
            if not fits.any():
                # An empty row takes a sample that is longer than the mean.
                fits = (tokens == 0) & (length <= most_tokens)
                if not fits.any():
                    break
            row = int(np.where(fits, work, np.inf).argmin())
            rows[row].append(sample)
            tokens[row] += length
            work[row] += length * length
        else:
            if all(rows):
                order = np.argsort(-work, kind="stable").tolist()
                return [rows[place] for place in (*order[::-2], *order[len(order) % 2 :: 2])]
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
