"""CP groups of every power-of-two size, built once at start over the data-parallel lanes.

megatron-core is built with `context_parallel_size=1`, so its data-parallel group of a (TP, PP) position *is* the list
of lanes. A group is an aligned block of 1, 2, 4, ... lanes inside [0, N), for any N >= 1: 6 lanes have a block of 4 at
lane 0 only. (megatron-core's own builder has no size 1 and fails for odd N.)

a2a+p2p has two levels. Inner groups are neighbouring lanes, so blocks themselves. Outer groups, lanes with equal index
in the inner groups of a block, are built for every (block, inner size) that plans may use. On 8 lanes with inner sizes
2 and 4 lane 1 is in the outer groups 1 3 (of block 0-3), 1 3 5 7 and 1 5 (of block 0-7).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.mechanisms.mechanism import Sharing
from dynamic_cp.mechanisms.registry import chosen_inner_sizes
from dynamic_cp.types import BY_PLACEMENT, TRAITS, Attention, CpCommType, ModelShape, PlanOptions, Topology, is_placed
from megatron.dynamic_cp.agreement.verify import collective_device
from megatron.dynamic_cp.attention.mechanisms.transfers import Transfer
from megatron.dynamic_cp.groups.first_exchange import possible_attentions, warm_up
from megatron.dynamic_cp.packed_seq_params import ExchangeStats, Levels


def lane_blocks(lane: int, num_lanes: int, min_size: int = 1, max_size: int | None = None) -> list[tuple[int, int]]:
    """Return (first lane, size) of every CP group that holds `lane`, ascending; size 1 always, for empty places."""
    blocks = []
    size = 1
    while size <= (max_size or num_lanes):
        first = lane - lane % size
        if first + size <= num_lanes and (size >= min_size or size == 1):
            blocks.append((first, size))
        size *= 2
    return blocks


def two_level_blocks(
    lane: int, blocks: Iterable[tuple[int, int]], inner_sizes: Iterable[int]
) -> dict[tuple[int, int, int], range]:
    """Return (first lane, size, inner size) -> the lanes of `lane`'s outer group, where 1 < inner size < size."""
    return {
        (first, size, inner): range(first + (lane - first) % inner, first + size, inner)
        for first, size in blocks
        for inner in sorted(inner_sizes)
        if 1 < inner < size
    }


def _new_group(lane_ranks: Sequence[int], timeout_s: float, lanes: range) -> dist.ProcessGroup:
    step = f"_step_{lanes.step}" if lanes.step > 1 else ""
    return dist.new_group(
        [lane_ranks[member] for member in lanes],
        timeout=timedelta(seconds=timeout_s),
        use_local_synchronization=True,
        group_desc=f"dynamic_cp_lanes_{lanes[0]}_to_{lanes[-1]}{step}",
    )


def _groups_of_blocks(
    blocks: Sequence[tuple[int, int]], num_lanes: int, has_placed: bool, new_group: Callable[[range], dist.ProcessGroup]
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Return (first lane, size) -> group, ascending in size; for placed buckets also the group of all lanes."""
    # torch names a group by how many groups a rank has, so that of all lanes comes first.
    is_more = has_placed and (0, num_lanes) not in blocks
    every = [(0, num_lanes), *blocks] if is_more else blocks
    groups = {(first, size): new_group(range(first, first + size)) for first, size in every}
    return dict(sorted(groups.items(), key=lambda built: built[0][1]))


def _groups_inside(
    lane: int,
    num_lanes: int,
    sizes: Sequence[int],
    groups: Mapping[tuple[int, int], dist.ProcessGroup],
    new_group: Callable[[range], dist.ProcessGroup],
) -> dict[int, dist.ProcessGroup]:
    firsts = {size: lane - lane % size for size in sizes}
    return {
        size: groups.get((first, size)) or new_group(range(first, first + size))
        for size, first in firsts.items()
        if first + size <= num_lanes
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicCPGroups:
    """The CP groups of this rank.

    Attributes:
        lane, num_lanes: this rank's position on the data-parallel axis, and how many there are.
        groups: (first lane, cp size) -> process group, for every block that holds `lane`.
        inner_groups: inner size -> this lane's inner group of a2a+p2p or blocks; one of `groups` where that size is
            there.
        outer_groups: (first lane, cp size, inner size) -> outer group of a2a+p2p.
        pool: the ranks of all pipeline stages and lanes with this one's tensor-parallel rank, stage after stage; None:
            plans have no pool.
        stage: of the pipeline.
        build_s, warm_up_s, warm_up_bytes: of building, and of the first exchanges of each group.
        num_communicators: groups that have exchanged something, for which NCCL has made a communicator.
    """

    lane: int
    num_lanes: int
    groups: Mapping[tuple[int, int], dist.ProcessGroup]
    inner_groups: Mapping[int, dist.ProcessGroup]
    outer_groups: Mapping[tuple[int, int, int], dist.ProcessGroup]
    build_s: float
    pool: dist.ProcessGroup | None = None
    stage: int = 0
    warm_up_s: float = 0.0
    warm_up_bytes: int = 0
    num_communicators: int = 0

    @classmethod
    def for_plans(
        cls,
        model: ModelShape,
        topology: Topology,
        options: PlanOptions,
        *,
        timeout_s: float,
        device: torch.device | None = None,
        lane_ranks: Sequence[int] | None = None,
    ) -> DynamicCPGroups:
        """Create and warm the groups that plans with these options may use; arguments and errors as of `build`."""
        names, sharing = options.cp_comm_types, Sharing.of(model, topology, options)
        return cls.build(
            topology,
            timeout_s=timeout_s,
            min_cp_size=options.min_cp_size,
            max_cp_size=options.max_cp_size,
            exchanges=names,
            inner_sizes=chosen_inner_sizes(names, options.largest_cp_size(topology), sharing),
            ring_sizes=sharing.ring_sizes,
            query_heads=model.num_attention_heads // topology.tp_size,
            device=device,
            lane_ranks=lane_ranks,
            has_pool=options.pool != "off",
            has_linear_attention=model.linear_attention is not None,
        )

    @classmethod
    def build(
        cls,
        topology: Topology,
        *,
        timeout_s: float,
        min_cp_size: int = 1,
        max_cp_size: int | None = None,
        exchanges: Sequence[CpCommType],
        inner_sizes: Sequence[int] = (),
        ring_sizes: Sequence[int] | None = None,
        query_heads: int | None = None,
        device: torch.device | None = None,
        lane_ranks: Sequence[int] | None = None,
        has_pool: bool = False,
        has_linear_attention: bool = False,
    ) -> DynamicCPGroups:
        """Create and warm this rank's groups; call on all ranks, after `parallel_state.initialize_model_parallel`.

        Args:
            topology: must agree with the groups that megatron-core built.
            timeout_s: of every exchange. On gloo its error names the group and the place in the run; NCCL's watchdog
                ends the process and names the group.
            exchanges: what plans may use (`Problem.options.cp_comm_types`); each group is warmed by those that it will
                do.
            inner_sizes: that plans may choose; nothing is built for them where no exchange leaves a choice.
            ring_sizes: inner sizes around which rings may go (`Sharing.ring_sizes`); None: any of `inner_sizes`.
            query_heads: of a tensor-parallel rank; exchanges are not warmed in groups that cannot share them evenly.
            device: of the warm-up exchanges; default: what the job's backend needs.
            lane_ranks: global ranks of the lanes, in lane order; default: megatron-core's data-parallel group.
            has_pool: plans may have a pool; ranks are then those of megatron-core's default order.
            has_linear_attention: lanes exchange heads or states of such layers by all-to-all, whatever attention does.

        Raises InvalidInputError: megatron-core was built for another number of lanes or another rank order."""
        if lane_ranks is None:
            lane_ranks = _megatron_lane_ranks()
            _check_lanes(lane_ranks, topology)
        lane = lane_ranks.index(dist.get_rank())
        started = time.perf_counter()
        new_group = partial(_new_group, lane_ranks, timeout_s)
        placed = [name for name in exchanges if is_placed(name)]
        has_rings = any(TRAITS[name].inner == "chosen" for name in exchanges)
        blocks = lane_blocks(lane, topology.num_lanes, min_cp_size, max_cp_size)
        rings = (inner_sizes if ring_sizes is None else ring_sizes) if has_rings else ()
        two_levels = two_level_blocks(lane, blocks, rings)
        inner = {size for _, _, size in two_levels} | (set(inner_sizes) if placed else set())
        # All ranks create their groups in one order, (kind, size, inner size), and each waits only for its members.
        with _members_only():
            stage, tp_rank = divmod(dist.get_rank() - lane * topology.tp_size, topology.num_lanes * topology.tp_size)
            pool = _pool(topology, tp_rank, timeout_s) if has_pool else None
            groups = _groups_of_blocks(blocks, topology.num_lanes, bool(placed), new_group)
            inner_groups = _groups_inside(lane, topology.num_lanes, sorted(inner), groups, new_group)
            outer_groups = {place: new_group(lanes) for place, lanes in two_levels.items()}
        cold = cls(
            lane=lane,
            num_lanes=topology.num_lanes,
            groups=groups,
            inner_groups=inner_groups,
            outer_groups=outer_groups,
            build_s=time.perf_counter() - started,
            pool=pool,
            stage=stage,
        )
        connect = partial(
            warm_up,
            device=device or collective_device(),
            ranks_per_node=topology.ranks_per_node,
            more=("all-to-all",) if has_linear_attention else (),
        )
        return cold._warmed(exchanges, blocks, query_heads, connect)

    def _warmed(
        self,
        exchanges: Sequence[CpCommType],
        blocks: Sequence[tuple[int, int]],
        query_heads: int | None,
        connect: Callable[..., None],
    ) -> DynamicCPGroups:
        """Return the groups after the first exchange of each, by `connect`, with the time and bytes that these took.
        Groups outside `blocks` are for placed attention alone."""
        started = time.perf_counter()
        placed = [name for name in exchanges if is_placed(name)]
        # Blocks ascend in size, so all members of a group warm it after the same others.
        stats, done = ExchangeStats(), set[tuple[Transfer, dist.ProcessGroup]]()
        connect = partial(connect, done=done, stats=stats)
        inner_sizes, ring_sizes = tuple(self.inner_groups), tuple({inner for _, _, inner in self.outer_groups})
        for (first, size), group in self.groups.items():
            used = exchanges if (first, size) in blocks else placed
            possible = possible_attentions(used, size, query_heads, inner_sizes, ring_sizes) if size > 1 else ()
            for attention in possible:
                inner_size = attention.inner_cp_size
                if attention.cp_comm_type in placed:
                    levels = self.placed_levels(group, inner_size)
                else:
                    levels = self.levels(first, size, inner_size)
                connect(attention, group, levels)
        if self.pool is not None:  # all of its members have warmed all others by now
            connect(Attention(BY_PLACEMENT), self.pool, (None, self.pool))
        return replace(
            self,
            warm_up_s=time.perf_counter() - started,
            warm_up_bytes=stats.bytes_sent,
            num_communicators=len({group for _, group in done}),
        )

    def group(self, first_lane: int, cp_size: int) -> dist.ProcessGroup:
        """Return the group of the block (first_lane, cp_size). Raises InvalidInputError: no such group was built on
        this rank."""
        try:
            return self.groups[first_lane, cp_size]
        except KeyError:
            raise InvalidInputError(
                f"lane {self.lane} has no CP group of {cp_size} lanes at lane {first_lane}; built: "
                f"{sorted(self.groups)}; widen --min-dynamic-cp-size / --max-dynamic-cp-size",
                first_lane=first_lane,
                cp_size=cp_size,
            ) from None

    def around(self, first_lane: int, num_lanes: int) -> tuple[int, dist.ProcessGroup]:
        """Return the first lane of the smallest group that holds these neighbouring lanes, and the group. Raises
        InvalidInputError: no group does."""
        last = first_lane + num_lanes
        holding = [(size, first) for first, size in self.groups if first <= first_lane and last <= first + size]
        if not holding:
            raise InvalidInputError(
                f"lane {self.lane} has no CP group that holds lanes {first_lane} to {last - 1}; built: "
                f"{sorted(self.groups)}; widen --max-dynamic-cp-size"
            )
        size, first = min(holding)
        return first, self.groups[first, size]

    def placed_levels(self, group: dist.ProcessGroup, inner_cp_size: int) -> Levels:
        """Return this lane's groups of a placed bucket: those who exchange heads, and `group`, which holds all lanes.
        Raises InvalidInputError: no group of that inner size was built on this rank."""
        if inner_cp_size == 1:
            return None, group
        try:
            return self.inner_groups[inner_cp_size], group
        except KeyError:
            raise InvalidInputError(
                f"lane {self.lane} has no group of {inner_cp_size} lanes that exchange heads around blocks; built: "
                f"{sorted(self.inner_groups)}; widen --dynamic-cp-inner-sizes"
            ) from None

    def levels(self, first_lane: int, cp_size: int, inner_cp_size: int) -> Levels:
        """Return this lane's groups of a bucket: those who exchange heads, and those who pass keys and values round.
        Raises InvalidInputError: they were not built on this rank."""
        if inner_cp_size == 1:
            return None, self.group(first_lane, cp_size)
        if inner_cp_size == cp_size:
            return self.group(first_lane, cp_size), None
        try:
            return self.inner_groups[inner_cp_size], self.outer_groups[first_lane, cp_size, inner_cp_size]
        except KeyError:
            raise InvalidInputError(
                f"lane {self.lane} has no groups for a2a+p2p with {inner_cp_size} inner lanes in the {cp_size} lanes "
                f"from lane {first_lane}; built (first lane, size, inner size): {sorted(self.outer_groups)}; widen "
                "--cp-comm-type or --dynamic-cp-inner-sizes"
            ) from None

    def describe(self) -> str:
        """Return one line for the log."""
        sizes = ", ".join(str(size) for _, size in self.groups)
        levels = ", ".join(f"{inner} x {size // inner}" for _, size, inner in self.outer_groups)
        return (
            f"dynamic CP groups over {self.num_lanes} lanes, sizes {sizes}"
            + (f", inner x outer {levels}" if levels else "")
            + (f", a pool of {self.pool.size()} servers" if self.pool is not None else "")
            + f": built in {self.build_s:.2f} s, warmed in {self.warm_up_s:.2f} s with {self.warm_up_bytes} bytes "
            "sent per rank"
        )


def _pool(topology: Topology, tp_rank: int, timeout_s: float) -> dist.ProcessGroup:
    """Return the group of all stages and lanes with this tensor-parallel rank; collective over the job. All ranks make
    all of them: torch names a members-only group by how many a rank has, which differs between stages."""
    made = [
        dist.new_group(
            list(range(first, topology.world_size, topology.tp_size)),
            timeout=timedelta(seconds=timeout_s),
            group_desc=f"dynamic_cp_pool_{first}",
        )
        for first in range(topology.tp_size)
    ]
    return made[tp_rank]


@contextlib.contextmanager
def _members_only() -> Iterator[None]:
    """Let torch connect only the members of new groups. In a job initialized with a `device_id`, torch splits a group
    off the job's communicator, and NCCL then waits for all ranks of the job, also for those that never come."""
    world = dist.group.WORLD
    assert world is not None
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def _megatron_lane_ranks() -> list[int]:
    from megatron.core import parallel_state  # loops outside Megatron do without

    return dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))


def _check_lanes(lane_ranks: list[int], topology: Topology) -> None:
    if len(lane_ranks) != topology.num_lanes:
        raise InvalidInputError(
            f"megatron-core has {len(lane_ranks)} data-parallel ranks, the topology {topology.num_lanes} lanes: "
            "call initialize_model_parallel with context_parallel_size=1 and the same TP and PP sizes"
        )
    strides = {second - first for first, second in pairwise(lane_ranks)}
    if strides - {topology.tp_size}:
        raise InvalidInputError(
            f"neighbouring lanes are {sorted(strides)} ranks apart, expected {topology.tp_size} (the TP size): "
            "use megatron-core's default rank order, without --use-tp-pp-dp-mapping"
        )
