"""What a barrier of all servers in every layer costs where each server takes a little longer or shorter each time."""

from __future__ import annotations

import numpy as np

from benchmarks.planner.report import percent, table

_LAYERS, _STEPS = 32, 200


def barrier_shares(servers: int, jitter: float) -> tuple[float, float]:
    """Return by which share steps get longer with a barrier in every layer, and with one at the end of a step.

    Args:
        servers: that wait for each other.
        jitter: standard deviation of the logarithm of the seconds of a server in a layer, independent of all others.
    """
    drawn = np.exp(np.random.default_rng(0).normal(-jitter * jitter / 2, jitter, (_STEPS, _LAYERS, servers)))
    return float(drawn.max(axis=2).mean() - 1), float(drawn.mean(axis=1).max(axis=1).mean() - 1)


def markdown() -> str:
    lines = []
    for jitter in (0.01, 0.02, 0.05):
        cells = [barrier_shares(servers, jitter) for servers in (8, 64, 256)]
        lines.append((percent(jitter), *(f"{percent(layer, 1)} / {percent(step, 1)}" for layer, step in cells)))
    return table("jitter | 8 servers | 64 | 256", lines)
