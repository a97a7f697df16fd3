"""Fits seconds as a sum of non-negative amounts, by relative errors, so that outliers count little."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_HUBER = 1.345
"""Tuning constant, in robust standard deviations of the residuals (Huber 1964)."""
_MAD_TO_SIGMA = 1.4826
_SMALLEST_SPREAD = 0.002
_ROUNDS = 20


def fit_seconds(columns: Floats, seconds: Floats) -> Floats:
    """Return x >= 0 [columns] for which columns @ x is near `seconds` (> 0), by relative errors: a row of microseconds
    counts as much as one of a second. Outliers count less.

    Source: iteratively reweighted least squares with Huber's weights. All subsets of the (few) columns are tried. That
    is exact, because the best x >= 0 solves the unconstrained problem of the columns in which it is above 0.
    """
    relative = columns / seconds[:, None]
    weights = np.ones(len(seconds))
    found = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        previous, found = found, _best_subset(relative * np.sqrt(weights)[:, None], np.sqrt(weights))
        residuals = relative @ found - 1.0
        spread = max(_SMALLEST_SPREAD, _MAD_TO_SIGMA * float(np.median(np.abs(residuals))))
        weights = 1 / np.maximum(1.0, np.abs(residuals) / (_HUBER * spread))
        if np.allclose(found, previous, rtol=1e-6, atol=0.0):
            break
    return found


def _best_subset(columns: Floats, ones: Floats) -> Floats:
    num = columns.shape[1]
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = columns / scale
    best, best_error = np.zeros(num), float(ones @ ones)
    for size in range(1, num + 1):
        for subset in combinations(range(num), size):
            chosen = list(subset)
            solved = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)[0]
            error = float(np.square(scaled[:, chosen] @ solved - ones).sum())
            if (solved >= 0).all() and error < best_error:
                best = np.zeros(num)
                best[chosen] = solved / scale[chosen]
                best_error = error
    return best
