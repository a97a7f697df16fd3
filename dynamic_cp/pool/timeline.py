"""When each tick begins and ends: a chain of whole nanoseconds, the same on every machine.

A tick begins when its slowest stage is ready: it has ended the tick before, its input has come, and what it does ahead
of its first layer (embedding forward, head backward) is done. From there on every layer keeps all stages together.
After its last layer a stage does what comes behind it (head forward, embedding backward) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamic_cp.pipeline.graph import needed_operation
from dynamic_cp.pipeline.schedule import KINDS, Operation
from dynamic_cp.pool.ticks import Tick
from dynamic_cp.pricing.reduction import Edges
from dynamic_cp.types import Topology


class TickTime(NamedTuple):
    """What a tick takes, in nanoseconds.

    Attributes:
        tick: which.
        layers_ns: from its first layer to its last one, of all stages.
        ahead_ns, behind_ns: [stage] embedding and head, before and after the layers.
        hop_ns: [stage] until what it computed is at the next stage.
    """

    tick: Tick
    layers_ns: int
    ahead_ns: tuple[int, ...]
    behind_ns: tuple[int, ...]
    hop_ns: tuple[int, ...]


class TickSpan(NamedTuple):
    """A node of kind "tick": when all stages compute its layers, and until when each is busy with it."""

    tick: Tick
    start_ns: int
    end_ns: int
    stage_ends_ns: tuple[int, ...]


def tick_timeline(times: Sequence[TickTime], pp_size: int, vp_size: int, num_microbatches: int) -> list[TickSpan]:
    """Return when each tick runs.

    Args:
        times: in the order in which they run.
        pp_size, vp_size, num_microbatches: of the plan.
    """
    free = [0] * pp_size
    arrives: dict[tuple[int, Operation], int] = {}
    spans = []
    for one in times:
        ready, running = [], []
        for stage in range(pp_size):
            unit = one.tick.unit(stage, pp_size, vp_size, num_microbatches)
            operation = None if unit is None else Operation(one.tick.kind, *unit)
            need = None if operation is None else needed_operation(stage, operation, pp_size, vp_size)
            input_ns = 0
            if need is not None and need.by_hop:
                input_ns = arrives[need.stage, need.operation]
            running.append(operation)
            ready.append(max(free[stage], input_ns) + one.ahead_ns[stage])
        start = max(ready)
        end = start + one.layers_ns
        free = [end + behind for behind in one.behind_ns]
        for stage, operation in enumerate(running):
            if operation is not None:
                arrives[stage, operation] = free[stage] + one.hop_ns[stage]
        spans.append(TickSpan(one.tick, start, end, tuple(free)))
    return spans


def edges_of_ticks(spans: Sequence[TickSpan], topology: Topology, num_microbatches: int) -> Edges:
    """Return the first forward and the last backward pass of every model chunk."""
    edges = Edges(*np.zeros((4, topology.pp_size, topology.vp_size, 1)))
    for span in spans:
        for stage in range(topology.pp_size):
            unit = span.tick.unit(stage, topology.pp_size, topology.vp_size, num_microbatches)
            if unit is None:
                continue
            place = stage, unit.chunk
            if span.tick.kind == KINDS[0] and unit.micro_batch == 0:
                edges.first_start_s[place] = span.start_ns / 1e9
                edges.first_s[place] = (span.end_ns - span.start_ns) / 1e9
            if span.tick.kind == KINDS[1] and unit.micro_batch == num_microbatches - 1:
                edges.last_end_s[place] = span.stage_ends_ns[stage] / 1e9
                edges.last_s[place] = edges.last_end_s[place] - span.start_ns / 1e9
    return edges
