"""How the ranks of a job are arranged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import is_power_of_two, largest_power_of_two, require_at_least

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    LaneOrLanes = TypeVar("LaneOrLanes", int, NDArray[np.int64])


MAX_LANES = 2**20
"""Largest number of lanes: arrays have one entry per micro-batch and lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How the ranks of a job are arranged.

    Attributes:
        vp_size: model chunks per pipeline stage (1: no interleaving).
        num_lanes: world size / (tp_size * pp_size); any integer >= 1.
        ranks_per_node: ranks of one node; lanes of a node are adjacent.
        ep_size: neighbouring ranks of a stage that share the routed experts of a layer (--expert-model-parallel-size);
            a power of two. Each expert is whole on its rank (expert TP is 1).
        token_alignment: tokens of a rank (of each share of them, with sequence parallelism) are padded to a multiple of
            this: products in FP8 need 16 or 32, blocks that sequence parallelism gathers 128.
    """

    num_lanes: int
    tp_size: int = 1
    pp_size: int = 1
    vp_size: int = 1
    ranks_per_node: int = 8
    sequence_parallel: bool = False
    ep_size: int = 1
    token_alignment: int = 1

    def __post_init__(self) -> None:
        require_at_least(
            1,
            num_lanes=self.num_lanes,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            vp_size=self.vp_size,
            ranks_per_node=self.ranks_per_node,
            token_alignment=self.token_alignment,
        )
        if self.num_lanes > MAX_LANES:
            raise InvalidInputError(
                f"num_lanes is {self.num_lanes}, at most {MAX_LANES} can be planned: check world size / (TP x PP)"
            )
        if self.vp_size > 1 and self.pp_size == 1:
            raise InvalidInputError(f"vp_size is {self.vp_size} but pp_size is 1: interleaving needs pp_size >= 2")
        if self.ep_size != 1:
            self._check_experts()

    def _check_experts(self) -> None:
        require_at_least(1, ep_size=self.ep_size)
        if not is_power_of_two(self.ep_size):
            raise InvalidInputError(
                f"ep_size {self.ep_size} is not a power of two, so its blocks would cut groups of CP: use 1, 2, 4, ... "
                "(--expert-model-parallel-size)"
            )
        wide, narrow = max(self.ep_size, self.tp_size), min(self.ep_size, self.tp_size)
        if wide % narrow:
            raise InvalidInputError(
                f"ep_size {self.ep_size} and tp_size {self.tp_size}: one must be a multiple of the other, so that "
                "blocks of experts hold whole lanes (--expert-model-parallel-size)"
            )
        if self.num_lanes % self.expert_lanes:
            raise InvalidInputError(
                f"ep_size {self.ep_size} makes blocks of {self.expert_lanes} lanes (TP {self.tp_size}), which do not "
                f"divide the {self.num_lanes} lanes: use an ep_size (--expert-model-parallel-size) that does"
            )

    @property
    def expert_lanes(self) -> int:
        """Lanes of an EP block, which wait for each other in every layer with experts; 1: none waits. Blocks are
        aligned: lanes k * expert_lanes and the following."""
        return max(1, self.ep_size // self.tp_size)

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.num_lanes * self.tp_size * self.pp_size

    @property
    def max_cp_size(self) -> int:
        """Largest context-parallel size: the largest power of two <= num_lanes."""
        return largest_power_of_two(self.num_lanes)

    @property
    def lanes_per_node(self) -> int:
        """Lanes that share a node (at least 1)."""
        return max(1, self.ranks_per_node // self.tp_size)

    @property
    def sequence_shares(self) -> int:
        """Shares into which sequence parallelism cuts the tokens of a rank: tp_size, or 1 without it."""
        return self.tp_size if self.sequence_parallel else 1

    @property
    def rank_token_multiple(self) -> int:
        """Tokens of a rank in one micro-batch are a multiple of this, so that each share is aligned."""
        return self.sequence_shares * self.token_alignment

    @property
    def num_microbatches_multiple(self) -> int:
        """num_microbatches is a multiple of this (the VPP micro-batch group size, pp_size; 1 without VPP)."""
        return self.pp_size if self.vp_size > 1 else 1

    def spans_nodes(self, first_lane: int, cp_size: int) -> bool:
        """Return whether lanes first_lane .. first_lane + cp_size - 1 lie on more than one node, on any stage. Ranks
        are numbered TP first, then lanes, then pipeline stages, as in megatron-core."""
        return cp_size > 1 and any(self.spans_nodes_on(stage, first_lane, cp_size) for stage in self.stages_that_differ)

    @property
    def stages_that_differ(self) -> range:
        """Pipeline stages whose lanes may lie on nodes otherwise than those of the stages before."""
        return range(self.pp_size if self.num_lanes * self.tp_size % self.ranks_per_node else 1)

    def spans_nodes_on(self, stage: int, first_lane: LaneOrLanes, cp_size: int) -> LaneOrLanes:
        """Return whether the ranks of a group lie on several nodes on `stage`; for an array of first lanes, of each."""
        first = (stage * self.num_lanes + first_lane) * self.tp_size
        last = first + cp_size * self.tp_size - 1
        return first // self.ranks_per_node != last // self.ranks_per_node  # type: ignore[no-any-return]
