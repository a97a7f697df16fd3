"""Seconds of attention over (queries, keys), from the curves of the kernels that hardware files and profiles hold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.types.tasks import Tasks, runs_of


class AttentionProfile(NamedTuple):
    """Attention of all layers of a stage in one direction, for one rank's share of the heads.

    A task of q queries and k keys, the queries being the last of the keys, is a causal square of q tokens and a
    rectangle of q * (k - q) pairs before it:

        causal_s_per_token2 * (q^2 + extra_tokens * q) + full_s_per_token2 * 2 * q * (k - q)

    Attributes:
        causal_s_per_token2, extra_tokens: of the kernel on a causal square.
        full_s_per_token2: of the kernel without a mask, for two squared tokens' worth of pairs.

    Limits: a rectangle pays nothing for being narrow, as all tasks of a server run in one launch and fill the device
        together.
    """

    causal_s_per_token2: float
    extra_tokens: float
    full_s_per_token2: float

    @classmethod
    def of(cls, stage: StageAttention, direction: int) -> AttentionProfile:
        """Return that of a stage, forward (0) or backward (1)."""
        side = stage.sides[direction]
        return cls(side.first.per_token2, side.first.extra_tokens, side.later.per_token2)

    def seconds(self, queries: Ints | Floats, keys: Ints | Floats) -> Floats:
        """Return the seconds of tasks of so many queries and keys."""
        rows, columns = np.asarray(queries, np.float64), np.asarray(keys, np.float64)
        square = self.causal_s_per_token2 * rows * (rows + self.extra_tokens)
        found: Floats = square + self.full_s_per_token2 * 2.0 * rows * (columns - rows)
        return found

    def server_seconds(self, tasks: Tasks, num_servers: int) -> Floats:
        """Return [half, server] seconds."""
        runs = runs_of(tasks.rows)
        seconds = self.seconds(runs[:, 2] - runs[:, 1], runs[:, 2])
        place = runs[:, 4] * num_servers + runs[:, 3]
        total = np.bincount(place, seconds, tasks.num_halves * num_servers).astype(np.float64)
        return total.reshape(tasks.num_halves, num_servers)
