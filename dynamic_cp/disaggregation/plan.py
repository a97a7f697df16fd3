"""A global batch whose attention is tasks: homes of every micro-batch, and who computes what in every tick.

With scope "stage" the lanes of a stage compute the tasks of one micro-batch, on any schedule: `TaskPlan.placed` is the
same as a plan of placed attention. With scope "pool" all stages compute those of all micro-batches of a tick, and only
the order of `pipeline.ticks` has such ticks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.disaggregation.tasks import HOLDER, Tasks
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.pipeline.ticks import Tick, tick_order
from dynamic_cp.placement.transport import divide
from dynamic_cp.types import PLACED, Bucket, MicroBatch, Placement, Plan, Sample, Topology, counted

Scope = Literal["stage", "pool"]
SCOPES: tuple[str, ...] = get_args(Scope)
NOT_RUN = "its ticks are planned and priced, nothing runs them yet"
"""Why the pool is not for training."""


@dataclass(frozen=True, slots=True, eq=False)
class HomedBatch:
    """One micro-batch and who holds it on every stage.

    Attributes:
        samples: of the micro-batch.
        homes: int32 [home, 4]: sample by its number in `samples`, first token, token after the last, lane; in the order
            of samples and tokens.
    """

    samples: tuple[Sample, ...]
    homes: NDArray[np.int32]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HomedBatch):
            return NotImplemented
        return self.samples == other.samples and np.array_equal(self.homes, other.homes)

    def __hash__(self) -> int:
        return hash((self.samples, self.homes.tobytes()))

    def lane_tokens(self, num_lanes: int) -> list[int]:
        """Return how many tokens each lane holds, without padding."""
        return [
            int(tokens)
            for tokens in np.bincount(self.homes[:, 3], self.homes[:, 2] - self.homes[:, 1], minlength=num_lanes)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """Homes and tasks of one global batch.

    Attributes:
        topology: the ranks that it is for.
        max_tokens_per_rank: limit of padded tokens of a rank in one micro-batch.
        tile_tokens: tasks are cut at multiples of it.
        scope: whose lanes compute the attention of a micro-batch.
        micro_batches: in the order in which every lane runs them.
        forward, backward: scope "pool": the tasks of each tick, by its number, over servers stage * num_lanes + lane;
            samples are counted over the micro-batches of the tick, by stage. Scope "stage": the tasks of each
            micro-batch, over lanes, the same in both.
        policy: name of the method that made it.
    """

    topology: Topology
    max_tokens_per_rank: int
    tile_tokens: int
    scope: Scope
    micro_batches: tuple[HomedBatch, ...]
    forward: tuple[Tasks, ...]
    backward: tuple[Tasks, ...]
    policy: str = "pool"

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise InvalidInputError(f"scope {self.scope!r} is unknown: use one of {', '.join(SCOPES)}")
        if len(self.policy.split()) != 1:
            raise InvalidInputError(f"policy {self.policy!r} is not one word: the text form of a plan needs that")

    def __repr__(self) -> str:
        return f"<TaskPlan: {self.describe()}, policy {self.policy}>"

    def describe(self) -> str:
        """Return in some words how large it is."""
        tasks = sum(one.num_tasks for one in self.forward)
        return (
            f"{counted(len(list(self.samples)), 'sample')} in {counted(self.num_microbatches, 'micro-batch')}, "
            f"{counted(tasks, 'task')} forward on {counted(self.num_servers, 'server')}, scope {self.scope}"
        )

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches, the same on every lane."""
        return len(self.micro_batches)

    @property
    def num_servers(self) -> int:
        """Servers that share a tick, or a micro-batch."""
        return self.topology.num_lanes * (self.topology.pp_size if self.scope == "pool" else 1)

    @property
    def num_halves(self) -> int:
        """1, or 2 where layers run in two halves."""
        return max(one.num_halves for one in (*self.forward, *self.backward))

    @property
    def samples(self) -> Iterator[Sample]:
        """All samples, micro-batch by micro-batch."""
        return (sample for batch in self.micro_batches for sample in batch.samples)

    @property
    def num_tokens(self) -> int:
        """Unpadded tokens of the global batch."""
        return sum(sample.seqlen for sample in self.samples)

    def ticks(self) -> Iterator[tuple[Tick, Tasks]]:
        """Yield each tick of a pool with its tasks, in the order in which they run."""
        for tick in tick_order(self.topology.pp_size, self.num_microbatches):
            yield tick, (self.forward if tick.kind == "F" else self.backward)[tick.number]

    def micro_batches_of(self, tick: Tick) -> list[tuple[int, int]]:
        """Return (stage, micro-batch) of what a tick of a pool runs, by stage."""
        pp_size = self.topology.pp_size
        rows = [(stage, tick.micro_batch(stage, pp_size, self.num_microbatches)) for stage in range(pp_size)]
        return [(stage, row) for stage, row in rows if row is not None]

    def placed(self, num_divisions: int = 1, node_lanes: int = 1) -> Plan:
        """Return the plan of placed attention that computes the same.

        Args:
            num_divisions: in which attention of a layer is computed, each hiding what the next one fetches.
            node_lanes: lanes of a node, for the order in which is fetched.

        Raises:
            UnsupportedFeatureError: the scope is "pool".
        """
        if self.scope == "pool":
            raise UnsupportedFeatureError(
                f"a pool of {self.topology.pp_size} stages is no plan of 1 stage ({NOT_RUN}): plan scope stage"
            )
        rows = []
        for batch, tasks in zip(self.micro_batches, self.forward, strict=True):
            lanes = self.topology.num_lanes
            if lanes == 1:
                buckets: tuple[Bucket, ...] = (Bucket(first_lane=0, samples=batch.samples),)
            else:
                buckets = (
                    Bucket(
                        first_lane=0,
                        cp_size=lanes,
                        samples=batch.samples,
                        cp_comm_type=PLACED[0],
                        placement=_divided(tasks, num_divisions, lanes, node_lanes),
                    ),
                )
            rows.append(MicroBatch(buckets=buckets))
        return Plan(
            topology=self.topology,
            max_tokens_per_rank=self.max_tokens_per_rank,
            micro_batches=tuple(rows),
            policy=self.policy,
        )


def _divided(tasks: Tasks, num_divisions: int, num_lanes: int, node_lanes: int) -> Placement:
    """Return the placement of tasks, in so many divisions."""
    placement = tasks.placement()
    tiles = placement.tiles.astype(np.int64)
    tiles[:, 3] = divide(
        tasks.rows[:, HOLDER].astype(np.int64), tasks.tokens, tiles, np.ones(2), num_divisions, num_lanes, node_lanes
    )
    return Placement(placement.homes, tiles.astype(np.int32))
