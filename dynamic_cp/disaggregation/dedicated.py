"""Dedicated attention servers: ranks without weights that only serve, priced beside servers in place.

N of W servers compute attention and hold no tokens; the others run all that is not attention and none of it. With L
seconds of layers and A of attention to share out in a tick, and all else ideal,

    in place      (L + A) / W
    dedicated     max(L / (W - N), A / N)

The first is the mean of the two times of the second, weighted by W - N and N ranks, so it is never longer: dedicated
servers cannot pay in time while ranks are alike. They hold no weights and no optimizer's state; in exchange all others
hold more tokens, and all queries travel with all keys.

Ticks are priced as in a pool (`prices.py`), but layers of one half run beside attention of the other one:

    tick = max(L, A, X, (L + A + X) / 2) + (A + X) / (2 * layers)     with ping-pong
         = L + A + X                                                  without

L, A and X are those of the fullest lane, the most loaded server and the busiest link. The fourth is the way of one half
through its layers, which has to wait for itself; what is added is the last half, whose attention nothing hides.

Limits: servers come behind all others, so that links inside a node serve what they serve only where both kinds share
one. Nobody hands keys on, as relays of a pool do. Whether a server's memory holds what it fetches is not asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.disaggregation.homes import quota_homes
from dynamic_cp.disaggregation.prices import TaskOptions, TickPrices, TickSeconds
from dynamic_cp.disaggregation.rows import longest_first
from dynamic_cp.disaggregation.scheduler import Rules, schedule
from dynamic_cp.disaggregation.search import (
    NO_ROOM,
    PATIENCE,
    PlannedTasks,
    Running,
    TaskSearch,
    Unfit,
    held_by_servers,
    infeasible,
    merged,
    numbers_of_rows,
    plan_of,
    refuse_masks,
    rows_of,
    running_in,
    tick_time,
    why_out_of_memory,
)
from dynamic_cp.disaggregation.tasks import tasks_of
from dynamic_cp.disaggregation.timeline import tick_timeline
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.plans.padding import round_up
from dynamic_cp.plans.pool import servers_of
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import KINDS, Placement, Problem, Sample, Tasks, Topology, tick_order
from dynamic_cp.types.tasks import HALF, HOLDER, SAMPLE, START, STOP


class _Work(NamedTuple):
    """Seconds of ranks in all ticks: of layers without attention, and of attention."""

    layers_s: float
    attention_s: float

    def ideal(self, num_servers: int, num_dedicated: int) -> tuple[float, float, float]:
        """Return seconds of (layers, attention) on ranks of their own, evenly, and of both in place."""
        layers_s, attention_s = self.layers_s / (num_servers - num_dedicated), self.attention_s / num_dedicated
        return layers_s, attention_s, (self.layers_s + self.attention_s) / num_servers


def plan_dedicated(
    samples: Sequence[Sample], cost_model: CostModel, options: TaskOptions, *, memory: MemoryModel | None = None
) -> PlannedTasks:
    """Return the fastest way found to run a global batch with `options.attention_servers` dedicated servers.

    Its plan has the lanes that are left, and no pool: nothing runs it.

    Args:
        samples: at least one, with the causal mask.
        cost_model: of the lanes that are left, `problem_without`.
        options: halves, margin, tolerances, and how many servers there are besides.
        memory: of the same lanes; what they cannot hold is left out.

    Raises:
        UnsupportedFeatureError, InfeasibleSampleError: as `plan_tasks`.
    """
    refuse_masks(samples)
    topology = cost_model.topology
    num_servers = topology.num_lanes * topology.pp_size + options.attention_servers
    servers = servers_of(topology, 0)._replace(number=num_servers)
    search = TaskSearch(TickPrices(cost_model, options), "pool", servers, memory)
    ordered = longest_first(samples)
    best: PlannedTasks | None = None
    why = NO_ROOM
    num_slower = 0
    for number in numbers_of_rows(ordered, cost_model):
        found = _planned(search, ordered, number)
        if isinstance(found, Unfit):
            why = found
            continue
        if best is None or found.makespan_s < best.makespan_s:
            best, num_slower = found, 0
        else:
            num_slower += 1
        if num_slower == PATIENCE:
            break
    if best is None:
        raise infeasible(ordered, cost_model, why)
    return best


def problem_without(problem: Problem, num_dedicated: int) -> Problem:
    """Return the problem of the lanes that are left when so many servers have no weights.

    Micro-batches keep their tokens: the limit of a rank grows as lanes get fewer, as far as memory holds them.

    Raises:
        InvalidInputError: none are left, or stages would have different numbers of lanes.
    """
    topology = problem.topology
    reason = why_not_dedicated(num_dedicated, topology)
    if reason is not None:
        raise InvalidInputError(reason)
    lanes = topology.num_lanes - num_dedicated // topology.pp_size
    limit = round_up(
        -(-problem.options.max_tokens_per_rank * topology.num_lanes // lanes), topology.rank_token_multiple
    )
    options = replace(problem.options, max_tokens_per_rank=limit, min_cp_size=1, max_cp_size=None, static_cp_size=None)
    return replace(problem, topology=replace(topology, num_lanes=lanes), options=options)


def why_not_dedicated(num_dedicated: int, topology: Topology) -> str | None:
    """Return why so many servers cannot be dedicated, with the numbers and what to do; None where they can."""
    pp_size, num_servers = topology.pp_size, topology.num_lanes * topology.pp_size
    if 1 <= num_dedicated < num_servers and num_dedicated % pp_size == 0:
        return None
    most = num_servers - pp_size
    remedy = f"give a multiple of {pp_size} up to {most}" if most else "there is one lane: give more of them (--lanes)"
    return (
        f"--attention-servers {num_dedicated} leaves {num_servers - num_dedicated} of {num_servers} servers (lanes by "
        f"stages) for the layers of {pp_size} stages, which need as many lanes each: {remedy}"
    )


def _planned(search: TaskSearch, samples: Sequence[Sample], number: int) -> PlannedTasks | Unfit:
    """Return what about so many micro-batches take, or why they do not fit."""
    rows = rows_of(search, samples, number)
    if rows is None:
        return NO_ROOM
    topology = search.cost_model.topology
    num_holders = topology.num_lanes * topology.pp_size
    made: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[TickSeconds, _Work]] = {}
    times, seconds = [], []
    layers_s = attention_s = 0.0
    for tick in tick_order(topology.pp_size, topology.vp_size, len(rows)):
        running, direction = running_in(tick, topology, rows), KINDS.index(tick.kind)
        on = direction, tuple((stage, unit.micro_batch) for stage, (unit, _) in running.items())
        if on not in made:
            made[on] = _fastest(search, direction, running, num_holders)
        one, work = made[on]
        seconds.append(one)
        times.append(tick_time(search, tick, one, running))
        layers_s, attention_s = layers_s + work.layers_s, attention_s + work.attention_s
    spans = tick_timeline(times, topology.pp_size, topology.vp_size, len(rows))
    held = np.array([row.lane_tokens for row in rows], np.int64)
    peak_bytes = 0.0
    if search.memory is not None:
        fetched = np.zeros((topology.pp_size, 2, topology.num_lanes), np.int64)
        of_stages = search.memory.peak_in_ticks(
            held, fetched, in_halves=search.prices.options.ping_pong, has_relays=False
        )
        peak_bytes = max(stage.total_bytes for stage in of_stages)
        if peak_bytes > search.memory.available_bytes:
            return why_out_of_memory(peak_bytes, search.memory, topology)
    placements = [Placement(row.homes.astype(np.int32), np.zeros((0, 4), np.int32)) for row in rows]
    limit = search.cost_model.options.max_tokens_per_rank
    num_servers, num_dedicated = search.servers.number, search.servers.number - num_holders
    of_layers_s, of_attention_s, in_place_s = _Work(layers_s, attention_s).ideal(num_servers, num_dedicated)
    return PlannedTasks(
        plan=plan_of(rows, placements, topology, limit, "pool"),
        makespan_s=max(spans[-1].stage_ends_ns) / 1e9,
        spans=tuple(spans),
        seconds=tuple(seconds),
        peak_bytes=peak_bytes,
        busy_s=tuple(_busy_s(search, held)),
        fetched=(0.0, 0.0),
        reason=f"{num_dedicated} of {num_servers} servers dedicated, m={len(rows)}: with all else ideal layers take "
        f"{of_layers_s:.3f} s on {num_holders} ranks beside {of_attention_s:.3f} s of attention on {num_dedicated}, "
        f"both on all {num_servers} take {in_place_s:.3f} s",
    )


def _busy_s(search: TaskSearch, held: Ints) -> list[float]:
    """Return [lane] seconds in which its ranks compute layers, forward and backward."""
    chunks = search.cost_model.topology.vp_size
    both = (search.prices.linear_s(direction, held).sum(axis=0) * chunks for direction in range(2))
    return np.sum(list(both), axis=0).tolist()  # type: ignore[no-any-return]


def _fastest(search: TaskSearch, direction: int, running: Running, num_holders: int) -> tuple[TickSeconds, _Work]:
    """Return what a tick takes with the tolerance with which it is fastest, and what its ranks compute."""
    prices = search.prices
    held = held_by_servers(search, [(stage, row) for stage, (_, row) in running.items()])
    best: tuple[TickSeconds, Tasks] | None = None
    for tasks in _tasks(search, direction, running, num_holders):
        one = prices.seconds(tasks, direction, held, search.servers)
        one = one.on_their_own(prices.layers_of_tick, is_in_halves=prices.options.ping_pong)
        if best is not None and one.total_s >= best[0].total_s:
            break
        best = one, tasks
    assert best is not None
    layers_s = sum(float(prices.linear_s(direction, np.array(row.lane_tokens)).sum()) for _, row in running.values())
    attention_s = float(prices.attention_s(best[1], direction, search.servers.number).sum())
    return best[0], _Work(layers_s, attention_s)


def _tasks(search: TaskSearch, direction: int, running: Running, num_holders: int) -> Iterator[Tasks]:
    """Yield tasks of growing tolerance, all of them on servers behind the holders."""
    parts = [(stage, row) for stage, (_, row) in running.items()]
    homes, halves = merged(search, parts, "homes"), merged(search, parts, "halves")
    options, num_dedicated = search.prices.options, search.servers.number - num_holders
    query_bytes, kv_bytes = search.prices.task_bytes
    extra = search.prices.extra_tokens(direction)
    spread = _spread(homes, num_dedicated, options)
    # Each part of a half with the server that it is spread to.
    rows = tasks_of(spread, [halves[halves[:, 4] == half, :4] for half in range(options.num_halves)]).rows
    queries = [
        rows[rows[:, HALF] == half][:, [SAMPLE, START, STOP, HOLDER]].astype(np.int64)
        for half in range(options.num_halves)
    ]
    for tolerance in options.tolerances:
        rules = Rules(options.tile_tokens, tolerance, query_bytes, kv_bytes, extra)
        tasks: list[Ints] = []
        for of_half in queries:
            earlier = tasks[0] if tasks else np.zeros((0, 4), np.int64)
            tasks.append(schedule(spread, np.ascontiguousarray(of_half), earlier, np.zeros(num_dedicated), rules))
        yield tasks_of(homes, [of_half + np.array([0, 0, 0, num_holders]) for of_half in tasks])


def _spread(homes: Ints, num_dedicated: int, options: TaskOptions) -> Ints:
    """Return which server begins with which queries: documents on as many as their work asks for, as `quota_homes`."""
    seqlens = np.zeros(int(homes[:, 0].max()) + 1, np.int64)
    np.maximum.at(seqlens, homes[:, 0], homes[:, 2])
    order = np.argsort(-seqlens, kind="stable")
    room = int(seqlens.sum()) + 4 * options.tile_tokens * len(seqlens)
    spread = quota_homes(seqlens[order], num_dedicated, room, options.tile_tokens, options.num_halves)
    spread[:, 0] = order[spread[:, 0]]
    in_order: Ints = spread[np.lexsort((spread[:, 1], spread[:, 0]))]
    return in_order
