"""What the pool adds to steps (`data.micro_batches.PoolSteps`)."""

from __future__ import annotations

from functools import partial

from megatron.dynamic_cp.data.micro_batches import PoolSteps, RunStep
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.layout.packed_seq_params import ExchangeStats
from megatron.dynamic_cp.pool.lane_ticks import LaneTicks, Pool, lane_ticks, pool_group
from megatron.dynamic_cp.pool.ticks import run_ticks


def _ready(ticks: LaneTicks, groups: DynamicCPGroups, stats: ExchangeStats) -> RunStep:
    return partial(run_ticks, Pool.of(ticks, groups, stats))


STEPS = PoolSteps(pack=lane_ticks, group=pool_group, ready=_ready)
