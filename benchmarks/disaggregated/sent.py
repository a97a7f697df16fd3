"""What tasks of a pool send: bytes counted from plans, to compare with those really sent and between schedulers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamic_cp.arrays import Floats
from dynamic_cp.placement.sent import TokenBytes
from dynamic_cp.pool.tasks import Tasks
from dynamic_cp.pool.traffic import Servers, bytes_of_rounds, fetches_of_tasks


def bytes_of_tasks(
    tasks: Tasks, directions: Sequence[int], servers: Servers, of_token: TokenBytes, *, is_kept: bool = False
) -> Floats:
    """Return [direction, link, sent or received, server] bytes of all layers that `of_token` is of.

    Args:
        tasks: that are sent for.
        directions: forward (0), backward (1), or both.
        servers: that share them.
        of_token: what a token takes; is_kept: backward, as of its `messages`.
    """
    fetches = fetches_of_tasks(tasks, servers.of_relay)
    sides = (
        of_token.messages(fetches, tasks.tokens, backward=direction == 1, is_kept=is_kept and direction == 1)
        for direction in directions
    )
    return np.array([bytes_of_rounds(messages, servers, tasks.num_nano_batches).sum(axis=(0, 1)) for messages in sides])
