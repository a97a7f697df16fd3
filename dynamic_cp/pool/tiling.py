"""Tasks from homes and from what a rule makes of each nano-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Ints
from dynamic_cp.pool.tasks import Tasks
from dynamic_cp.types.placement import HOLDER, SAMPLE, START, STOP

_SERVER, _NANO_BATCH = 3, 4
"""Columns of tasks that do not say who holds them, behind SAMPLE, START and STOP."""


def tasks_of(homes: Ints, tasks: Sequence[Ints]) -> Tasks:
    """Return the tasks of each nano-batch, cut where homes are.

    Args:
        homes: int64 [home, (sample, start, stop, holder)], by sample and start.
        tasks: [nano-batch] -> int64 [task, (sample, start, stop, server)], of all nano-batches each token once.
    """
    with_nano_batch = np.concatenate(
        [np.insert(of_nano_batch, 4, nano_batch, axis=1) for nano_batch, of_nano_batch in enumerate(tasks)]
    )
    with_nano_batch = with_nano_batch[np.lexsort((with_nano_batch[:, START], with_nano_batch[:, SAMPLE]))]
    return Tasks(_overlaid(homes, with_nano_batch).astype(np.int32))


@compiled
def _overlaid(homes: Ints, tasks: Ints) -> Ints:
    """Return [row, 6] of both tilings of the samples, in the order of samples and tokens."""
    rows = np.empty((len(homes) + len(tasks), 6), np.int64)
    count, home, task = 0, 0, 0
    while home < len(homes) and task < len(tasks):
        start, stop = max(homes[home, START], tasks[task, START]), min(homes[home, STOP], tasks[task, STOP])
        server, nano_batch = tasks[task, _SERVER], tasks[task, _NANO_BATCH]
        rows[count] = homes[home, SAMPLE], start, stop, homes[home, HOLDER], server, nano_batch
        count += 1
        if homes[home, STOP] == stop:
            home += 1
        if tasks[task, STOP] == stop:
            task += 1
    return rows[:count]
