"""What tasks take: the kernels of `mechanisms.placed_seconds`, without going through their many tiles."""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.mechanisms.placed_seconds import add_launches, kernel_rates, tile_s
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.pool.tasks import NANO_BATCH, SERVER, Tasks
from dynamic_cp.types.placement import START, STOP


def task_seconds(stage: StageAttention, tasks: Tasks, num_servers: int) -> Floats:
    """Return [forward or backward, nano-batch, server] seconds of kernels, as `kernel_seconds` of `Tasks.placement`.

    A row of tasks is a causal square and all keys before it, so tiles need not be gone through.
    """
    return _tasks_s(tasks.rows.astype(np.int64), *kernel_rates(stage), tasks.num_nano_batches, num_servers)


@compiled
def _tasks_s(rows: Ints, rates: Floats, overheads_s: Floats, num_nano_batches: int, num_servers: int) -> Floats:
    """Return [direction, nano-batch, server] seconds of tasks.

    Args:
        rows: of `Tasks`; rates, overheads_s: as of `placed_seconds._attention_s`.
    """
    seconds = np.zeros((2, num_nano_batches, num_servers))
    is_launched = np.zeros((num_nano_batches, num_servers), np.bool_)
    for row in range(len(rows)):
        start, server, nano_batch = float(rows[row, START]), rows[row, SERVER], rows[row, NANO_BATCH]
        queries = rows[row, STOP] - start
        is_launched[nano_batch, server] = True
        for direction in range(2):
            seconds[direction, nano_batch, server] += tile_s(rates[direction], 0, queries * (queries + 1.0), queries)
            if start:
                seconds[direction, nano_batch, server] += tile_s(rates[direction], 2, 2.0 * queries * start, queries)
    add_launches(seconds, is_launched, overheads_s)
    return seconds
