"""Plans of attention tasks for a global batch: tries numbers of micro-batches and relays, and simulates each. Documents
lie on as many lanes as they ask for, and `scheduler` evens out all stages of a tick. If servers would fetch too much,
lanes compute their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.errors import InfeasibleSampleError, UnsupportedFeatureError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pipeline.schedule import KINDS, edges_paid
from dynamic_cp.plans.padding import placed_share, round_up
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pool.homes import even_homes, even_rows, homes_in_nano_batches, longest_first
from dynamic_cp.pool.legal import fetched_in_ticks, most_fetched, peak_in_ticks, servers_of
from dynamic_cp.pool.prices import TaskOptions, TickPrices, TickSeconds
from dynamic_cp.pool.scheduler import Rules, schedule
from dynamic_cp.pool.tasks import PoolTasks, Tasks, num_shifts, pool_of, shifted_tasks, tasks_of
from dynamic_cp.pool.ticks import Tick, TickSpan, TickTime, Unit, edges_of_ticks, tick_order, tick_timeline
from dynamic_cp.pool.traffic import Servers
from dynamic_cp.pricing.allowed import capacity_tokens
from dynamic_cp.pricing.cost_model import CostModel, nanoseconds
from dynamic_cp.types import BY_PLACEMENT, Bucket, MicroBatch, Placement, Plan, PlannedBatch, Sample, Topology
from dynamic_cp.types.placement import HOLDER, SAMPLE, START, STOP

_MORE_ROWS = (1.0, 1.25, 1.6, 2.0, 3.0, 4.0)
"""Numbers of micro-batches to try, as multiples of the fewest."""
_STAGE_ROWS = (1, 2, 4)
"""The same, as multiples of the pipeline's stages."""
PATIENCE = 2
"""The search ends after this many numbers in a row that are slower."""
_NEAR = 0.005
"""Share of a step that a plan without relays must save: its busiest server sends more, which no price shows."""
_BESIDE = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of servers' other work that attention is evened out with: barriers let less than all of it count."""
_NONE = np.zeros((0, 4), np.int64)


class PlannedTasks(NamedTuple):
    """A plan with a pool and its predicted times.

    Attributes:
        makespan_s: forward and backward of all micro-batches, noise included, without the reduction of gradients.
        spans, seconds: when each tick runs, and its seconds, in the same order.
        peak_bytes, busy_s: of the rank that needs most; [lane] seconds that it computes, the mean of its stages.
        fetched: most tokens of (queries, keys) that a server fetches, over the limit of tokens per rank.
        reason: one line: how many numbers were tried, which was the fastest, and whether it has relays.
    """

    plan: Plan
    makespan_s: float
    spans: tuple[TickSpan, ...]
    seconds: tuple[TickSeconds, ...]
    peak_bytes: float
    busy_s: tuple[float, ...]
    fetched: tuple[float, float]
    reason: str

    def iteration_s(self, cost_model: CostModel) -> float:
        """Return the seconds of a step, with the reduction of gradients."""
        edges = edges_of_ticks(self.spans, self.plan.topology, self.plan.num_microbatches)
        return self.makespan_s + cost_model.reduction.exposed_s(edges, self.makespan_s)

    def planned_batch(self, cost_model: CostModel, reason: str | None = None) -> PlannedBatch:
        """Return it as `PlannedBatch`, with the reduction of gradients in its time."""
        return PlannedBatch(
            plan=self.plan,
            predicted_s=self.iteration_s(cost_model),
            predicted_busy_s=self.busy_s,
            reason=self.reason if reason is None else reason,
        )


class TaskRow(NamedTuple):
    """A micro-batch on its lanes: homes, int64 [home, (sample by its number, start, stop, lane)], the same cut by
    nano-batch, [home, 5], and padded tokens [lane]."""

    samples: tuple[Sample, ...]
    homes: Ints
    split_homes: Ints
    lane_tokens: list[int]


_Parts = Sequence[tuple[int, TaskRow]]
"""The rows of a tick, by stage."""
_Maker = Callable[[Floats, float], Tasks]
"""From [server] work besides attention, and a tolerance, to the tasks of a tick."""


class TaskSearch(NamedTuple):
    """What all plans of a batch share; `memory` is None if it is unknown; `is_at_home`: lanes compute what they
    hold."""

    prices: TickPrices
    servers: Servers
    memory: MemoryModel | None
    is_at_home: bool = False

    @property
    def cost_model(self) -> CostModel:
        return self.prices.cost_model


def plan_tasks(
    samples: Sequence[Sample],
    cost_model: CostModel,
    options: TaskOptions | None = None,
    *,
    memory: MemoryModel | None = None,
    num_microbatches: Sequence[int] = (),
) -> PlannedTasks:
    """Return the fastest task plan that is found, the same for the same samples in any order.

    Args:
        samples: at least one, with the causal mask.
        memory: of the job, if known; plans that need more are left out.
        num_microbatches: numbers to try; (): a sweep.

    Raises UnsupportedFeatureError: masks or layers that have no tasks. Raises InfeasibleSampleError: no plan keeps the
    limits of tokens and memory."""
    topology = cost_model.topology
    refuse_masks(samples)
    prices = TickPrices(cost_model, options or TaskOptions())
    relayed, *others = (TaskSearch(prices, servers_of(topology, number), memory) for number in _relays(topology))
    ordered = longest_first(samples)
    best: PlannedTasks | None = None
    why = NO_ROOM
    tried = num_slower = 0
    for number in num_microbatches or numbers_of_rows(ordered, cost_model):
        found = _planned(relayed, ordered, number)
        if isinstance(found, Unfit) and found != NO_ROOM:
            # At home, servers fetch no queries, and no more keys than they may.
            found = _planned((others or [relayed])[-1]._replace(is_at_home=True), ordered, number)
        if isinstance(found, Unfit):
            why = found
            continue
        tried += 1
        if best is None or found.makespan_s < best.makespan_s:
            best, num_slower = found, 0
        else:
            num_slower += 1
        if num_slower == PATIENCE:
            break
    if best is None:
        raise infeasible(ordered, cost_model, why)
    for search in others:
        # The gain of relays depends little on the number of micro-batches.
        found = _planned(search, ordered, best.plan.num_microbatches)
        if isinstance(found, PlannedTasks) and found.makespan_s < (1.0 - _NEAR) * best.makespan_s:
            best = found
    relays = pool_of(best.plan).relay_servers
    said = f", relays of {relays} servers" if relays else ""
    number = best.plan.num_microbatches
    return best._replace(reason=f"pool: m={number} of {tried} numbers of micro-batches{said}")


def _relays(topology: Topology) -> tuple[int, ...]:
    """Return values of `PoolTasks.relay_servers` to try, the preferred one first."""
    may_be_more = topology.pp_size > 1 and topology.num_lanes > servers_of(topology, 0).of_relay
    return (topology.num_lanes, 0) if may_be_more else (0,)


def refuse_masks(samples: Sequence[Sample]) -> None:
    masked = next((sample for sample in samples if sample.mask is not None), None)
    if masked is not None:
        raise UnsupportedFeatureError(
            f"{masked.mask_in_words}, attention tasks have all keys up to their queries: use placed attention "
            "(--cp-comm-type blocks)"
        )


def numbers_of_rows(samples: Sequence[Sample], cost_model: CostModel) -> list[int]:
    """Return the numbers of micro-batches that are tried."""
    topology = cost_model.topology
    fewest = ceil(sum(sample.seqlen for sample in samples) / max(1, tokens_of_row(cost_model)))
    wanted = {ceil(times * fewest) for times in _MORE_ROWS} | {times * topology.pp_size for times in _STAGE_ROWS}
    # A last group of fewer micro-batches than stages leaves places of its chunks empty.
    multiple = topology.num_microbatches_multiple
    return sorted({min(round_up(max(number, fewest), multiple), len(samples)) for number in wanted})


def tokens_of_row(cost_model: CostModel) -> int:
    """Return the tokens that a micro-batch may have: those of a lane, with its padding, on all lanes."""
    topology = cost_model.topology
    return topology.num_lanes * capacity_tokens(1, topology, cost_model.options)


class Unfit(NamedTuple):
    """Why there is no plan with some number of micro-batches, and what helps."""

    reason: str
    remedy: str


NO_ROOM = Unfit(
    "so many micro-batches have no room for them", "raise max_tokens_per_rank (--max-seqlen-per-dp-cp-rank)"
)


def why_out_of_memory(peak_bytes: float, memory: MemoryModel, topology: Topology) -> Unfit:
    in_flight = ((topology.vp_size + 1) * topology.pp_size - 1) / topology.vp_size
    return Unfit(
        f"they do not fit within memory: a rank needs {peak_bytes / 1e9:.2f} GB, the first stage keeping {in_flight:g} "
        f"of them, and has {memory.available_bytes / 1e9:.2f} GB",
        "recompute more, use more lanes or a larger tp_size (--tensor-model-parallel-size)",
    )


def infeasible(samples: Sequence[Sample], cost_model: CostModel, why: Unfit) -> InfeasibleSampleError:
    longest, most = max(sample.seqlen for sample in samples), tokens_of_row(cost_model)
    total = sum(sample.seqlen for sample in samples)
    if longest > most:
        return InfeasibleSampleError(
            f"the longest sample has {longest} tokens, a micro-batch of {cost_model.topology.num_lanes} lanes holds "
            f"{most}: raise max_tokens_per_rank (--max-seqlen-per-dp-cp-rank) or use more lanes"
        )
    return InfeasibleSampleError(
        f"no task plan holds {total} tokens in micro-batches of at most {most}: {why.reason}; {why.remedy}"
    )


def _plan_of(rows: Sequence[TaskRow], topology: Topology, limit: int, pool: PoolTasks) -> Plan:
    """Return the plan whose micro-batches are one bucket each, on all lanes."""
    micro_batches = []
    for row in rows:
        bucket = Bucket(first_lane=0, samples=row.samples)
        if topology.num_lanes > 1:
            bucket = Bucket(
                first_lane=0,
                cp_size=topology.num_lanes,
                samples=row.samples,
                cp_comm_type=BY_PLACEMENT,
                placement=Placement(row.homes.astype(np.int32), np.zeros((0, 4), np.int32)),
            )
        micro_batches.append(MicroBatch(buckets=(bucket,)))
    return Plan(
        topology=topology, max_tokens_per_rank=limit, micro_batches=tuple(micro_batches), policy="pool", extension=pool
    )


def _planned(search: TaskSearch, samples: Sequence[Sample], number: int) -> PlannedTasks | Unfit:
    """Return the plan with about so many micro-batches, or why they do not fit."""
    rows = rows_of(search, samples, number)
    if rows is None:
        return NO_ROOM
    topology, num_rows = search.cost_model.topology, len(rows)
    sides: dict[str, dict[int, Tasks]] = {kind: {} for kind in KINDS}
    times, seconds = [], []
    made = _Made(search)
    busy_s = np.zeros(topology.num_lanes)
    for tick in tick_order(topology.pp_size, topology.vp_size, num_rows):
        running = running_in(tick, topology, rows)
        tasks, one, lanes_s = made.of_tick(tick, running)
        sides[tick.kind][tick.number] = tasks
        seconds.append(one)
        times.append(tick_time(search, tick, one, running))
        for part_s in lanes_s:
            busy_s += part_s
    spans = tick_timeline(times, topology.pp_size, topology.vp_size, num_rows)
    limit = search.cost_model.options.max_tokens_per_rank
    forward, backward = (tuple(sides[kind][index] for index in range(len(sides[kind]))) for kind in KINDS)
    servers = search.servers
    pool = PoolTasks(
        tile_tokens=search.prices.options.tile_tokens,
        forward=forward,
        backward=backward,
        relay_servers=0 if servers.of_relay == servers.of_node else servers.of_relay,
    )
    plan = _plan_of(rows, topology, limit, pool)
    fetched = fetched_in_ticks(plan)
    share = fetched.max(axis=(0, 2)) / limit
    peak_bytes = 0.0
    if search.memory is not None:
        held = np.array([row.lane_tokens for row in rows], np.int64)
        of_stages = peak_in_ticks(
            search.memory, held, fetched, in_nano_batches=pool.num_nano_batches > 1, has_relays=servers.of_relay > 1
        )
        peak_bytes = max(stage.total_bytes for stage in of_stages)
        if peak_bytes > search.memory.available_bytes:
            return why_out_of_memory(peak_bytes, search.memory, topology)
    if (share > most_fetched(topology)).any():
        return Unfit(f"a server fetches {share.max():.1f} times {limit} tokens", NO_ROOM.remedy)
    check_plan(plan, samples)
    return PlannedTasks(
        plan=plan,
        makespan_s=max(spans[-1].stage_ends_ns) / 1e9,
        spans=tuple(spans),
        seconds=tuple(seconds),
        peak_bytes=peak_bytes,
        busy_s=tuple((busy_s / topology.pp_size).tolist()),
        fetched=(float(share[0]), float(share[1])),
        reason="",
    )


def rows_of(search: TaskSearch, samples: Sequence[Sample], number: int) -> list[TaskRow] | None:
    topology = search.cost_model.topology
    lanes, tile = topology.num_lanes, search.prices.options.tile_tokens
    limit = capacity_tokens(1, topology, search.cost_model.options)
    packed = even_rows(samples, number, lanes * limit)
    if packed is None:
        return None
    rows = []
    for row in packed:
        homes = even_homes(row, lanes, limit, tile, search.prices.options.num_nano_batches)
        if homes is None:
            return None
        held = np.bincount(homes[:, HOLDER], homes[:, STOP] - homes[:, START], lanes).astype(np.int64).tolist()
        padded = [placed_share(tokens, 1, topology.rank_token_multiple) for tokens in held]
        split_homes = np.insert(homes, 4, 0, axis=1)
        if search.prices.options.ping_pong:
            split_homes = homes_in_nano_batches(homes, lanes, tile)
        rows.append(TaskRow(tuple(row), homes, split_homes, padded))
    return rows


Running = Mapping[int, tuple[Unit, TaskRow]]
"""Stage -> the unit that it runs in a tick, and its row; stages that only serve are not in it."""


def running_in(tick: Tick, topology: Topology, rows: Sequence[TaskRow]) -> Running:
    pp_size, vp_size = topology.pp_size, topology.vp_size
    units = {stage: tick.unit(stage, pp_size, vp_size, len(rows)) for stage in range(pp_size)}
    return {stage: (unit, rows[unit.micro_batch]) for stage, unit in units.items() if unit is not None}


class _Made:
    """Makes the tasks of each tick once. With chunks, the same micro-batches meet again, also one stage further on:
    tasks are then the same on other servers (`tasks.num_shifts`)."""

    def __init__(self, search: TaskSearch) -> None:
        self._search = search
        self._topology = search.cost_model.topology
        self._num_shifts = num_shifts(self._topology)
        self._begin = [(1, 1), (1, 1)]
        self._made: dict[tuple[str, tuple[int, ...]], tuple[Tasks, TickSeconds, list[Floats]]] = {}

    def of_tick(self, tick: Tick, running: Running) -> tuple[Tasks, TickSeconds, list[Floats]]:
        """Return the tasks of a tick, its seconds, and the seconds that each lane computes, as parts to add."""
        pp_size = self._topology.pp_size
        on = tuple(running[stage][0].micro_batch if stage in running else -1 for stage in range(pp_size))
        for shift in range(self._num_shifts):
            earlier = self._made.get((tick.kind, on[shift:] + on[:shift]))
            if earlier is not None:
                tasks, seconds, busy_s = earlier
                if shift:
                    counts = [len(running[stage][1].samples) if stage in running else 0 for stage in range(pp_size)]
                    tasks = shifted_tasks(tasks, counts, shift, self._topology)
                return tasks, seconds, busy_s
        parts, direction = [(stage, row) for stage, (_, row) in running.items()], KINDS.index(tick.kind)
        prices, num_servers = self._search.prices, self._search.servers.number
        tasks, seconds, self._begin[direction] = _fastest(self._search, direction, parts, self._begin[direction])
        busy_s = [prices.attention_s(tasks, direction, num_servers).reshape(pp_size, -1).sum(axis=0)]
        busy_s += [prices.linear_s(direction, np.array(row.lane_tokens)) for _, row in parts]
        self._made[tick.kind, on] = tasks, seconds, busy_s
        return tasks, seconds, busy_s


def _fastest(
    search: TaskSearch, direction: int, parts: _Parts, begin: tuple[int, int]
) -> tuple[Tasks, TickSeconds, tuple[int, int]]:
    """Return the tasks with which a tick is fastest, its seconds, and the choice of (index of `_BESIDE`, index of
    tolerances) that gave them. From `begin`, the choice of a tick before, it goes to faster neighbours."""
    held = held_by_servers(search, parts)
    beside = search.prices.work_beside(direction, held)
    shares = _BESIDE if np.ptp(beside) > 0 and not search.is_at_home else (0.0,)
    tolerances = (0.0,) if search.is_at_home else search.prices.options.tolerances
    tasks_by = _at_home(search, parts) if search.is_at_home else _by_our_rule(search, direction, parts)
    found: dict[tuple[int, int], tuple[Tasks, TickSeconds]] = {}

    def total_s(place: tuple[int, int]) -> float:
        if place not in found:
            tasks = tasks_by(shares[place[0]] * beside, tolerances[place[1]])
            found[place] = tasks, search.prices.seconds(tasks, direction, held, search.servers)
        return found[place][1].total_s

    best = min(begin[0], len(shares) - 1), min(begin[1], len(tolerances) - 1)
    while True:
        share, tolerance = best
        near = (best, (share, tolerance - 1), (share, tolerance + 1), (share - 1, tolerance), (share + 1, tolerance))
        there = [one for one in near if 0 <= one[0] < len(shares) and 0 <= one[1] < len(tolerances)]
        nearest = min(there, key=total_s)  # the first of equals
        if nearest == best:
            return *found[best], best
        best = nearest


def held_by_servers(search: TaskSearch, parts: _Parts) -> Ints:
    """Return [server] padded tokens."""
    held, lanes = np.zeros(search.servers.number, np.int64), search.cost_model.topology.num_lanes
    for stage, row in parts:
        held[stage * lanes : (stage + 1) * lanes] = row.lane_tokens
    return held


def merged(search: TaskSearch, parts: _Parts, which: str) -> Ints:
    """Return the homes of all rows of a tick, samples and servers counted over all of them."""
    found, first = [], 0
    for stage, row in parts:
        table: Ints = getattr(row, which).copy()
        table[:, SAMPLE] += first
        table[:, HOLDER] += stage * search.cost_model.topology.num_lanes
        found.append(table)
        first += len(row.samples)
    return np.concatenate(found)


def _by_our_rule(search: TaskSearch, direction: int, parts: _Parts) -> _Maker:
    homes, split_homes = merged(search, parts, "homes"), merged(search, parts, "split_homes")
    query_bytes, kv_bytes = search.prices.task_bytes
    options, extra = search.prices.options, search.prices.extra_tokens(direction)
    queries = [
        np.ascontiguousarray(split_homes[split_homes[:, 4] == nano_batch, :4])
        for nano_batch in range(options.num_nano_batches)
    ]

    def made(busy: Floats, tolerance: float) -> Tasks:
        rules = Rules(options.tile_tokens, tolerance, query_bytes, kv_bytes, extra)
        tasks: list[Ints] = []
        for of_nano_batch in queries:
            tasks.append(schedule(homes, of_nano_batch, tasks[0] if tasks else _NONE, busy, rules))
        return tasks_of(homes, tasks)

    return made


def _at_home(search: TaskSearch, parts: _Parts) -> _Maker:
    homes, split_homes = merged(search, parts, "homes"), merged(search, parts, "split_homes")
    tasks = tasks_of(
        homes,
        [split_homes[split_homes[:, 4] == nano_batch, :4] for nano_batch in range(int(split_homes[:, 4].max()) + 1)],
    )
    return lambda busy, tolerance: tasks


def tick_time(search: TaskSearch, tick: Tick, seconds: TickSeconds, running: Running) -> TickTime:
    """Return a tick in nanoseconds, with its margin, embedding and head."""
    topology, table = search.cost_model.topology, search.cost_model.table
    pp_size = topology.pp_size
    embedding, embedding_back, head, head_back = table.edges_s_per_token.tolist()
    tokens = {stage: max(row.lane_tokens) for stage, (_, row) in running.items()}
    first, last = [0] * pp_size, [0] * pp_size
    is_forward = tick.kind == KINDS[0]
    for stage, (unit, _) in running.items():
        embeds, has_head = edges_paid(stage, unit.chunk, pp_size, topology.vp_size)
        if embeds:
            first[stage] = nanoseconds(tokens[stage] * (embedding if is_forward else embedding_back))
        if has_head:
            last[stage] = nanoseconds(tokens[stage] * (head if is_forward else head_back))
    ahead, behind = (first, last) if is_forward else (last, first)
    hops = tuple(nanoseconds(tokens.get(stage, 0) * table.hop_s_per_token) for stage in range(pp_size))
    layers_s = seconds.total_s * (1.0 + search.prices.options.noise_margin)
    return TickTime(tick, nanoseconds(layers_s), tuple(ahead), tuple(behind), hops)
