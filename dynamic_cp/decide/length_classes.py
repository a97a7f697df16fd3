"""Shares of samples, tokens and work by class of lengths; the classes are powers of two."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dynamic_cp.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthClass:
    """Samples of more than `above_tokens` and at most `up_to_tokens` tokens.

    Attributes:
        num_samples: how many there are.
        samples, tokens, tokens_squared: their share of all samples, all tokens and the sum of squares; the last is
            nearly their share of the attention work.
    """

    above_tokens: int
    up_to_tokens: int
    num_samples: int
    samples: float
    tokens: float
    tokens_squared: float


def length_classes(lengths: ArrayLike) -> tuple[LengthClass, ...]:
    """Return the classes of `lengths` (integers >= 1, tokens, [samples]), from that of the shortest to the longest.

    Raises:
        InvalidInputError: there are no lengths.
    """
    values = np.asarray(lengths, dtype=np.int64)
    if not values.size or values.min() < 1:
        raise InvalidInputError(f"cannot classify {values.size} lengths: give at least 1 whole number >= 1")
    exponents = np.array([int(value - 1).bit_length() for value in np.unique(values)])
    of_value = exponents[np.searchsorted(np.unique(values), values)]
    squares = values.astype(np.float64) ** 2
    classes = []
    for exponent in range(int(of_value.min()), int(of_value.max()) + 1):
        here = of_value == exponent
        classes.append(
            LengthClass(
                above_tokens=0 if exponent == 0 else 1 << (exponent - 1),
                up_to_tokens=1 << exponent,
                num_samples=int(here.sum()),
                samples=float(here.mean()),
                tokens=float(values[here].sum() / values.sum()),
                tokens_squared=float(squares[here].sum() / squares.sum()),
            )
        )
    return tuple(classes)
