"""How steps of plans of a kind run (`dynamic_cp.plans.extension`): what data and schedule ask of it.

A kind lies in a package of its own, which is imported where a plan of it comes up. There is one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from dynamic_cp.plans.lane_plan import LanePlan
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.layout.packed_seq_params import ExchangeStats

RunStep = Callable[..., list[dict[str, Any]]]
"""Runs all micro-batches of a step in place of megatron-core's schedules; called as `step.schedule` does."""


class StepKind(NamedTuple):
    """What a kind of plan adds to steps.

    Attributes:
        pack: of a lane's plan, stage, model chunks of a stage and [micro-batch] padded tokens of a rank: what this rank
            does beside its micro-batches. It travels from processes that pack ahead.
        group: whose members exchange the attention of all micro-batches.
        ready: of what was packed, with groups and the counter of the step: what runs the step.
    """

    pack: Callable[[LanePlan, int, int, list[int]], object]
    group: Callable[[DynamicCPGroups], ProcessGroup]
    ready: Callable[[Any, DynamicCPGroups, ExchangeStats], RunStep]


def step_kind(extension: object) -> StepKind | None:
    """Return how steps run whose plan has `extension`, as it came or packed; None: on megatron-core's schedules."""
    if not extension:
        return None
    kind: StepKind = importlib.import_module("megatron.dynamic_cp.pool.kind").KIND
    return kind
