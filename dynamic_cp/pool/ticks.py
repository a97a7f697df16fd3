"""Ticks: all pipeline stages in the same phase, so that all of them can compute attention for each other.

In a tick a stage runs one *unit*, one model chunk of one micro-batch, or it only serves: it computes attention for the
others. With one chunk on each stage:

    2 stages, 3 micro-batches        F0 F1 B0 F2 B1 F3 B2 B3
    stage 0                          F0 F1  - F2 B0  - B1 B2
    stage 1                           - F0 B0 F1 B1 F2 B2  -

With two, ticks are half as long, and so is the time in which the pipeline fills:

    2 stages of 2 chunks, 2 micro-batches    F0  F1  F2  F3  B0  F4  B1  B2  B3  B4
    stage 0                                 0F0 0F1 1F0 1F1   -   - 1B0 1B1 0B0 0B1
    stage 1                                   - 0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1   -

Micro-batches go through the chunks in groups of pp_size: all of a group through chunk 0, then through chunk 1, and so
on; backward the last chunk comes first. The last group may have fewer, its other places are empty. In a forward tick f,
stage s runs unit f - s of this list; in a backward tick b, unit b - (pp_size - 1 - s). So a micro-batch leaves a chunk
of the last stage in the tick before the first stage takes its next chunk. With one chunk, unit k is micro-batch k.

Every layer of a tick has an exchange of all stages, so all have to run the same ticks in the same order. Stage s keeps
(vp_size + 1) * pp_size - 1 - 2 * s chunks of micro-batches between forward and backward, each of 1 / vp_size of its
layers, where 1F1B keeps pp_size - s whole ones.

A tick begins when its slowest stage is ready: it has ended the tick before, its input has come, and its work ahead of
the first layer (embedding forward, head backward) is done. From there on every layer keeps all stages together. After
the last layer a stage does the rest (head forward, embedding backward) alone. Times are whole nanoseconds, the same on
every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamic_cp.pipeline.schedule import KINDS, Kind, Operation, needed_operation
from dynamic_cp.pricing.edges import Edges
from dynamic_cp.types import Topology


class Unit(NamedTuple):
    """What a stage runs in a tick: a model chunk of a micro-batch."""

    micro_batch: int
    chunk: int = 0


class Tick(NamedTuple):
    """A phase of all stages; prints as `F3`."""

    kind: Kind
    number: int

    def __str__(self) -> str:
        return f"{self.kind}{self.number}"

    def unit(self, stage: int, pp_size: int, vp_size: int, num_microbatches: int) -> Unit | None:
        """Return what `stage` runs in it; None: it only serves."""
        is_forward = self.kind == KINDS[0]
        place = self.number - (stage if is_forward else pp_size - 1 - stage)
        group, in_group = divmod(place, pp_size * vp_size)
        chunk, member = divmod(in_group, pp_size)
        micro_batch = group * pp_size + member
        if not 0 <= micro_batch < num_microbatches:
            return None
        return Unit(micro_batch, chunk if is_forward else vp_size - 1 - chunk)


def num_ticks(pp_size: int, vp_size: int, num_microbatches: int) -> int:
    """Return the number of ticks of each kind, until the last stage in turn has run its last unit: m * vp_size +
    pp_size - 1 if pp_size divides the number of micro-batches m or vp_size is 1."""
    group, member = divmod(num_microbatches - 1, pp_size)
    last = (group * vp_size + vp_size - 1) * pp_size + member
    return last + pp_size


def tick_order(pp_size: int, vp_size: int, num_microbatches: int) -> tuple[Tick, ...]:
    """Return all ticks in the order in which they run: forward ones until the last stage ends its last chunk of the
    first micro-batch (pp_size * vp_size), then backward and forward in turn."""
    count = num_ticks(pp_size, vp_size, num_microbatches)
    forwards, backwards = ([Tick(kind, number) for number in range(count)] for kind in KINDS)
    ahead = pp_size * vp_size
    alternating = [tick for pair in zip(backwards, forwards[ahead:], strict=False) for tick in pair]
    return (*forwards[:ahead], *alternating, *backwards[count - ahead :])


def stage_ticks(pp_size: int, vp_size: int, num_microbatches: int) -> list[list[Operation | None]]:
    """Return what each stage runs in each tick, in order."""
    order = tick_order(pp_size, vp_size, num_microbatches)
    found: list[list[Operation | None]] = []
    for stage in range(pp_size):
        units = [tick.unit(stage, pp_size, vp_size, num_microbatches) for tick in order]
        found.append(
            [None if unit is None else Operation(tick.kind, *unit) for tick, unit in zip(order, units, strict=True)]
        )
    return found


class TickTime(NamedTuple):
    """Nanoseconds of a tick: of its layers, from the first to the last of all stages; [stage] embedding and head,
    before and after the layers; [stage] until its output is at the next stage."""

    tick: Tick
    layers_ns: int
    ahead_ns: tuple[int, ...]
    behind_ns: tuple[int, ...]
    hop_ns: tuple[int, ...]


class TickSpan(NamedTuple):
    """When all stages compute the layers of a tick, and until when each is busy with it."""

    tick: Tick
    start_ns: int
    end_ns: int
    stage_ends_ns: tuple[int, ...]


def tick_timeline(times: Sequence[TickTime], pp_size: int, vp_size: int, num_microbatches: int) -> list[TickSpan]:
    """Return when each tick runs; `times` are in the order in which ticks run."""
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
