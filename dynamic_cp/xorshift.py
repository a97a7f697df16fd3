"""Random numbers for compiled loops: the same ones in every process, with and without numba."""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled


@compiled
def next_state(state: int) -> int:
    """Return the next state of a 64-bit xorshift generator. Source: Marsaglia 2003, "Xorshift RNGs"."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    return state


@compiled
def share(state: int) -> float:
    """Return a number in [0, 1)."""
    return float(state >> np.uint64(11)) / 9007199254740992.0


@compiled
def draw(state: int, bound: int) -> int:
    """Return an integer in 0 .. bound - 1."""
    return int(share(state) * bound)
