"""Tasks from homes and from what a rule makes of each nano-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Ints
from dynamic_cp.pool.tasks import Tasks


def tasks_of(homes: Ints, tasks: Sequence[Ints]) -> Tasks:
    """Return the tasks of each nano-batch, cut where homes are.

    Args:
        homes: int64 [home, (sample, start, stop, holder)], by sample and start.
        tasks: [nano-batch] -> int64 [task, (sample, start, stop, server)], of all nano-batches each token once.
    """
    with_nano_batch = np.concatenate(
        [np.insert(of_nano_batch, 4, nano_batch, axis=1) for nano_batch, of_nano_batch in enumerate(tasks)]
    )
    with_nano_batch = with_nano_batch[np.lexsort((with_nano_batch[:, 1], with_nano_batch[:, 0]))]
    return Tasks(_overlaid(homes, with_nano_batch).astype(np.int32))


@compiled
def _overlaid(homes: Ints, tasks: Ints) -> Ints:
    """Return [row, 6] of both tilings of the samples, in the order of samples and tokens."""
    rows = np.empty((len(homes) + len(tasks), 6), np.int64)
    count, home, task = 0, 0, 0
    while home < len(homes) and task < len(tasks):
        start, stop = max(homes[home, 1], tasks[task, 1]), min(homes[home, 2], tasks[task, 2])
        rows[count] = homes[home, 0], start, stop, homes[home, 3], tasks[task, 3], tasks[task, 4]
        count += 1
        if homes[home, 2] == stop:
            home += 1
        if tasks[task, 2] == stop:
            task += 1
    return rows[:count]
