"""CP groups of every power-of-two size, built once at start over the data-parallel lanes.

megatron-core is built with `context_parallel_size=1`, so its data-parallel group of a (TP, PP) position *is* the list
of lanes. A group is an aligned block of 1, 2, 4, ... lanes that lies fully inside [0, N), for any N >= 1: 6 lanes have
blocks of 4 at lane 0 only. (megatron-core's own builder has no size 1 and fails for odd N.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import Topology
from megatron.dynamic_cp.attention.exchange import ExchangeError, RingShift
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from megatron.dynamic_cp.verify import collective_device


def lane_blocks(lane: int, num_lanes: int, min_size: int = 1, max_size: int | None = None) -> list[tuple[int, int]]:
    """Return (first lane, size) of every CP group that holds `lane`, ascending in size.

    Size 1 is always there: an empty place of a plan runs on a single lane.
    """
    blocks = []
    size = 1
    while size <= (max_size or num_lanes):
        first = lane - lane % size
        if first + size <= num_lanes and (size >= min_size or size == 1):
            blocks.append((first, size))
        size *= 2
    return blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicCPGroups:
    """The CP groups of this rank.

    Attributes:
        lane: this rank's position on the data-parallel axis; num_lanes: how many there are.
        groups: (first lane, cp size) -> process group, for every block that holds `lane`.
        build_s, warm_up_s, warm_up_bytes: what building and the first ring exchange of each group took.
    """

    lane: int
    num_lanes: int
    groups: Mapping[tuple[int, int], dist.ProcessGroup]
    build_s: float
    warm_up_s: float
    warm_up_bytes: int

    @classmethod
    def build(
        cls,
        topology: Topology,
        *,
        timeout_s: float,
        min_cp_size: int = 1,
        max_cp_size: int | None = None,
        device: torch.device | None = None,
    ) -> DynamicCPGroups:
        """Create and warm this rank's groups; call on all ranks, after `parallel_state.initialize_model_parallel`.

        Args:
            topology: must agree with the groups that megatron-core built.
            timeout_s: of every exchange. On gloo its error names the group and the place in the run; NCCL's watchdog
                ends the process and names the group.
            device: where the warm-up exchange happens; default: what the job's backend needs.

        Raises:
            InvalidInputError: megatron-core was built for another number of lanes or another rank order.
        """
        lane_ranks = dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
        _check_lanes(lane_ranks, topology)
        lane = lane_ranks.index(dist.get_rank())
        started = time.perf_counter()
        groups = {
            (first, size): dist.new_group(
                lane_ranks[first : first + size],
                timeout=timedelta(seconds=timeout_s),
                use_local_synchronization=True,
                group_desc=f"dynamic_cp_lanes_{first}_to_{first + size - 1}",
            )
            for first, size in lane_blocks(lane, topology.num_lanes, min_cp_size, max_cp_size)
        }
        built = time.perf_counter()
        stats = ExchangeStats()
        for group in groups.values():
            _warm_up(group, stats, device or collective_device())
        warm = time.perf_counter()
        return cls(
            lane=lane,
            num_lanes=topology.num_lanes,
            groups=groups,
            build_s=built - started,
            warm_up_s=warm - built,
            warm_up_bytes=stats.bytes_sent,
        )

    def group(self, first_lane: int, cp_size: int) -> dist.ProcessGroup:
        """Return the group of the block (first_lane, cp_size).

        Raises:
            InvalidInputError: no such group was built on this rank.
        """
        try:
            return self.groups[first_lane, cp_size]
        except KeyError:
            raise InvalidInputError(
                f"lane {self.lane} has no CP group of {cp_size} lanes at lane {first_lane}; built: "
                f"{sorted(self.groups)}; widen --min-dynamic-cp-size / --max-dynamic-cp-size",
                first_lane=first_lane,
                cp_size=cp_size,
            ) from None

    def describe(self) -> str:
        """Return one line for the log."""
        sizes = ", ".join(str(size) for _, size in self.groups)
        return (
            f"dynamic CP groups over {self.num_lanes} lanes, sizes {sizes}: built in {self.build_s:.2f} s, "
            f"warmed in {self.warm_up_s:.2f} s with {self.warm_up_bytes} bytes sent per rank"
        )


def _check_lanes(lane_ranks: list[int], topology: Topology) -> None:
    if len(lane_ranks) != topology.num_lanes:
        raise InvalidInputError(
            f"megatron-core has {len(lane_ranks)} data-parallel ranks, the topology {topology.num_lanes} lanes: "
            "call initialize_model_parallel with context_parallel_size=1 and the same TP and PP sizes",
            num_ranks=len(lane_ranks),
            num_lanes=topology.num_lanes,
        )
    strides = {second - first for first, second in pairwise(lane_ranks)}
    if strides - {topology.tp_size}:
        raise InvalidInputError(
            f"neighbouring lanes are {sorted(strides)} ranks apart, expected {topology.tp_size} (the TP size): "
            "use megatron-core's default rank order, without --use-tp-pp-dp-mapping",
            strides=sorted(strides),
            expected=topology.tp_size,
        )


def _warm_up(group: dist.ProcessGroup, stats: ExchangeStats, device: torch.device) -> None:
    """Make the group's connections now, by the exchange that attention will do."""
    if group.size() == 1:
        return
    params = DynamicPackedSeqParams.build(
        (2 * group.size(),),
        torch.zeros(2, dtype=torch.int64, device=device),
        group,
        cp_comm_type="p2p",
        label="start-up (warm-up of the group)",
        stats=stats,
    )
    shift = RingShift(torch.full((1,), float(group.rank()), device=device), params)
    received = shift.wait()
    expected = (group.rank() - 1) % group.size()
    if received.item() != expected:
        raise ExchangeError(f"warm-up of {group.group_desc}: received {received.item()}, expected {expected}")
