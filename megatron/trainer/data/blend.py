"""Which dataset fills which position of a blended stream, in closed form: any position costs the same."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

MAX_PERIOD = 1 << 16


def whole_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return whole numbers >= 1 in proportion to `weights` (> 0).

    Exact when their sum is at most MAX_PERIOD; otherwise rounded to that sum, with a line in the log.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    period = lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return tuple(int(share * period) for share in shares)
    rounded = [max(1, round(share * MAX_PERIOD)) for share in shares]
    rounded[rounded.index(max(rounded))] += MAX_PERIOD - sum(rounded)
    worst = max(abs(share - Fraction(whole, MAX_PERIOD)) for share, whole in zip(shares, rounded, strict=True))
    logger.info("blend weights rounded to 1/%d, the largest change of a share is %.2g", MAX_PERIOD, float(worst))
    return tuple(rounded)


@lru_cache(maxsize=8)
def interleave(shares: tuple[int, ...]) -> NDArray[np.int64]:
    """Return one period of the blend: the dataset of each position, int64 [sum(shares)].

    At every prefix of p positions each dataset has been used less than one time more or less often than p times its
    share. Draw k of a dataset with share n of P positions must therefore come at positions floor(k P / n) ..
    ceil((k + 1) P / n) - 1; the earliest deadline first meets all of them.

    Source: Baruah, Cohen, Plaxton, Varvel, "Proportionate progress", Algorithmica 1996: its windows, on one processor.
    """
    period = sum(shares)
    draws = sorted(
        (k * period // share, -(-(k + 1) * period // share), dataset)
        for dataset, share in enumerate(shares)
        for k in range(share)
    )
    positions = np.empty(period, dtype=np.int64)
    waiting: list[tuple[int, int]] = []
    released = 0
    for position in range(period):
        while released < period and draws[released][0] <= position:
            heapq.heappush(waiting, draws[released][1:])
            released += 1
        positions[position] = heapq.heappop(waiting)[1]
    return positions


class Blend:
    """An endless sequence of datasets in proportion to weights, which repeats after `sum(whole_shares(weights))`.

    Example:
        Weights 1 and 3 give datasets 1, 1, 0, 1, 1, 1, 0, 1 ... and of those draws 0, 1, 0, 2, 3, 4, 1, 5 ...
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self.shares = np.array(whole_shares(weights), dtype=np.int64)
        self._datasets = interleave(tuple(self.shares.tolist()))
        self._draws = np.empty_like(self._datasets)
        for dataset, share in enumerate(self.shares):
            self._draws[self._datasets == dataset] = np.arange(share)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the dataset of each position and which draw of that dataset it is."""
        periods, places = np.divmod(positions, len(self._datasets))
        datasets = self._datasets[places]
        return datasets, periods * self.shares[datasets] + self._draws[places]
