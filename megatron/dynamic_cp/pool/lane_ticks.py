"""The attention that this rank computes in every tick, where servers of all pipeline stages compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed import ProcessGroup

from dynamic_cp.errors import DisagreementError, InvalidInputError
from dynamic_cp.pipeline.schedule import KINDS
from dynamic_cp.plans.lane_plan import LanePlan
from dynamic_cp.plans.padding import placed_share
from dynamic_cp.pool.text import decode_ticks
from dynamic_cp.pool.ticks import Tick
from megatron.dynamic_cp.attention.placed_packs import PlacedLane
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import ExchangeStats


class LaneTicks(NamedTuple):
    """[tick] what a rank computes, forward and backward; a lane of a programme is a member of the pool's group. Its own
    tokens are those of its micro-batch, in the same order; none where it has no micro-batch."""

    forward: tuple[PlacedLane, ...]
    backward: tuple[PlacedLane, ...]

    @property
    def num_nano_batches(self) -> int:
        """The divisions of programmes: 2 where layers run in two nano-batches, else 1."""
        return max(len(lane.programme.tiles) for lane in (*self.forward, *self.backward))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """What this rank computes of attention in each tick. `group` has the ranks of all stages and lanes with this one's
    tensor-parallel rank, stage after stage. Without `in_nano_batches`, divisions of programmes are those of one
    exchange."""

    group: ProcessGroup
    ticks: LaneTicks
    stats: ExchangeStats
    in_nano_batches: bool = False

    @classmethod
    def of(cls, ticks: LaneTicks, groups: DynamicCPGroups, stats: ExchangeStats) -> Pool:
        """Return the pool of a step; InvalidInputError if no group was built for it."""
        return cls(group=pool_group(groups), ticks=ticks, stats=stats, in_nano_batches=ticks.num_nano_batches > 1)

    def lane_of(self, tick: Tick) -> PlacedLane:
        return (self.ticks.forward if tick.kind == KINDS[0] else self.ticks.backward)[tick.number]


def pool_group(groups: DynamicCPGroups) -> ProcessGroup:
    """Return the group of servers of all stages; InvalidInputError if it was not built."""
    if groups.pool is None:
        raise InvalidInputError(
            f"the plan has servers of all stages, and 0 groups were built for them on lane {groups.lane}: plan without "
            "a pool (PlanOptions.pool, --dynamic-cp-pool off)"
        )
    return groups.pool


def lane_ticks(plan: LanePlan, stage: int, vp_size: int, rank_tokens: list[int]) -> LaneTicks:
    """Return what the rank of `stage` computes in each tick of a plan with a pool. `vp_size` counts model chunks of a
    stage, `rank_tokens` the lane's tokens in each micro-batch, with padding. Raises DisagreementError: the plan's
    ticks are of other micro-batches."""
    pp_size = len(plan.extension)
    sides = []
    for kind, of_side in zip(KINDS, decode_ticks(plan.extension[stage]), strict=True):
        lanes = []
        for number, one in enumerate(of_side):
            unit = Tick(kind, number).unit(stage, pp_size, vp_size, len(rank_tokens))
            tokens = 0 if unit is None else rank_tokens[unit.micro_batch]
            own = one.programme.num_tokens
            padded = own if unit is None else placed_share(own, 1, plan.facts.rank_token_multiple)
            if padded != tokens:
                row = "none" if unit is None else unit.micro_batch
                raise DisagreementError(
                    f"tick {kind}{number} of lane {plan.lane} on stage {stage} holds {padded} tokens, its micro-batch "
                    f"{row} has {tokens}: the plan has the ticks of other micro-batches; plan this step again"
                )
            lanes.append(PlacedLane(programme=one.programme, samples=one.samples, num_tokens=tokens))
        sides.append(tuple(lanes))
    return LaneTicks(*sides)
