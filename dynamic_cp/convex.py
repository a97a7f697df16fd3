"""Seconds of a bucket as a formula of its tokens T and squared tokens Q: convex, piecewise linear, increasing.

    constant + per_token * T + per_token2 * Q + sum over k of weight_k * max(0, a_k + b_k * T + c_k * Q)

or the host's seconds, if those are more. A kink is a step of an exchange that hides behind the attention of the whole
bucket, so prices are not additive over samples. `pricing/table.py` has the formula as numbers for compiled loops.
"""

from __future__ import annotations

from typing import NamedTuple


class Linear(NamedTuple):
    """constant + per_token * T + per_token2 * Q, in seconds."""

    constant: float = 0.0
    per_token: float = 0.0
    per_token2: float = 0.0

    def plus(self, other: Linear, times: float = 1.0) -> Linear:
        """Return self + times * other."""
        return Linear(
            self.constant + times * other.constant,
            self.per_token + times * other.per_token,
            self.per_token2 + times * other.per_token2,
        )


class Kink(NamedTuple):
    """weight * max(0, inner)."""

    weight: float
    inner: Linear


class Convex(NamedTuple):
    """Seconds of one direction: a linear part and the exposed part of hidden exchanges, or `host_s` if that is more."""

    linear: Linear
    kinks: tuple[Kink, ...] = ()
    host_s: float = 0.0


def merged(kinks: tuple[Kink, ...]) -> tuple[Kink, ...]:
    """Return `kinks` with those of equal numbers added up and without those of weight 0."""
    weights: dict[Linear, float] = {}
    for weight, inner in kinks:
        weights[inner] = weights.get(inner, 0.0) + weight
    return tuple(Kink(weight, inner) for inner, weight in weights.items() if weight)
