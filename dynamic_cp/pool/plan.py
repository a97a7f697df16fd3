"""What a plan with a pool says of its ticks."""

from __future__ import annotations

from collections.abc import Iterator

from dynamic_cp.pipeline.schedule import KINDS
from dynamic_cp.pool.tasks import PoolTasks, Tasks
from dynamic_cp.pool.ticks import Tick, tick_order
from dynamic_cp.types import Plan, Sample


def pool_of(plan: Plan) -> PoolTasks:
    """Return the pool of a plan that has one."""
    assert isinstance(plan.extension, PoolTasks), "the plan has no pool"
    return plan.extension


def ticks_of(plan: Plan) -> Iterator[tuple[Tick, Tasks]]:
    """Yield each tick with its tasks, in the order in which they run."""
    pool, topology = pool_of(plan), plan.topology
    for tick in tick_order(topology.pp_size, topology.vp_size, plan.num_microbatches):
        yield tick, (pool.forward if tick.kind == KINDS[0] else pool.backward)[tick.number]


def micro_batches_of(plan: Plan, tick: Tick) -> list[tuple[int, int]]:
    """Return (stage, micro-batch) of what a tick runs, by stage."""
    pp_size, vp_size = plan.topology.pp_size, plan.topology.vp_size
    units = [tick.unit(stage, pp_size, vp_size, plan.num_microbatches) for stage in range(pp_size)]
    return [(stage, unit.micro_batch) for stage, unit in enumerate(units) if unit is not None]


def samples_of(plan: Plan, tick: Tick) -> list[Sample]:
    """Return the samples of a tick, as its tasks count them."""
    rows = (row for _, row in micro_batches_of(plan, tick))
    return [sample for row in rows for sample in plan.micro_batches[row].buckets[0].samples]
