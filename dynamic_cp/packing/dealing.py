"""Deals samples to rows one after the other, each to the row with the least work that has room."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dynamic_cp.arrays import Floats


def deal(
    items: Iterable[tuple[int, float]], num_rows: int, most_tokens: float
) -> tuple[list[list[int]], Floats] | None:
    """Return ([row] -> positions of its items, [row] its work); None: one has no room. An empty row has room for any.

    Args:
        items: (tokens, work) of each, in the order in which they are dealt.
        num_rows: rows, some of which may stay empty.
        most_tokens: of a row with more than one item.
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    held, load = np.zeros(num_rows), np.zeros(num_rows)
    for position, (tokens, work) in enumerate(items):
        fits = (held + tokens <= most_tokens) | (held == 0)
        if not fits.any():
            return None
        row = int(np.where(fits, load, np.inf).argmin())
        rows[row].append(position)
        held[row] += tokens
        load[row] += work
    return rows, load
