"""Traces of a pool: ticks in which all stages are in one phase, and whose attention a lane computes in each.

A process is a pipeline stage, a thread a lane, as in `trace`. A slice is a tick on a lane, from its first layer, at
which all stages meet, to the end of what the stage does behind the last one. It is named after what the stage runs, a
model chunk of a micro-batch as in "0F3", or "serves".
"""

from __future__ import annotations

import numpy as np

from dynamic_cp.disaggregation.search import PlannedTasks
from dynamic_cp.pipeline.schedule import Operation
from dynamic_cp.report.trace import Event, in_time, mark, name_events, shown_lanes, slice_event
from dynamic_cp.types.tasks import HOLDER, SERVER


def tick_events(
    planned: PlannedTasks, *, label: str = "", first_process: int = 0, lanes: range | None = None
) -> list[Event]:
    """Return the events of an iteration in ticks; arguments as of `trace.trace_events`.

    Raises:
        InvalidInputError: lanes that are not there.
    """
    plan = planned.plan
    topology, name = plan.topology, label or plan.policy
    lanes = shown_lanes(lanes, topology.num_lanes)
    events = name_events(label, first_process, {stage: list(lanes) for stage in range(topology.pp_size)})
    for (tick, tasks), span, seconds in zip(plan.ticks(), planned.spans, planned.seconds, strict=True):
        of_servers = (
            np.bincount(tasks.rows[rows, column], tasks.tokens[rows], plan.num_servers)
            for rows, column in (
                (slice(None), HOLDER),
                (slice(None), SERVER),
                (tasks.rows[:, HOLDER] != tasks.rows[:, SERVER], SERVER),
            )
        )
        held, computed, of_others = (one.astype(np.int64).tolist() for one in of_servers)
        for stage in range(topology.pp_size):
            unit = tick.unit(stage, topology.pp_size, topology.vp_size, plan.num_microbatches)
            runs = {} if unit is None else unit._asdict()
            for lane in lanes:
                server = stage * topology.num_lanes + lane
                args = {
                    "tick": str(tick),
                    **runs,
                    "tokens": held[server],
                    "queries": computed[server],
                    "queries_of_others": of_others[server],
                    "exposed_s": seconds.exposed_s,
                }
                what = "serves" if unit is None else str(Operation(tick.kind, *unit))
                times_ns = span.start_ns, span.stage_ends_ns[stage]
                events.append(slice_event(what, tick.kind, times_ns, (first_process + stage, lane), args))
    args = {"makespan_s": planned.makespan_s, "policy": plan.policy}
    events.append(mark(f"end of {name}", max(planned.spans[-1].stage_ends_ns), first_process, args))
    return in_time(events)
