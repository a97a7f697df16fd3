"""What makes a plan one with a pool, and its memory in bytes of a rank on every stage. `validate.check_plan` asks for
the rules; they need compiled code, so this file is imported late."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.mechanisms.blocks import AGAIN_KEYS, AGAIN_QUERIES, COLLECTED_KEYS, FETCHED_KEYS, FETCHED_QUERIES
from dynamic_cp.mechanisms.transfers import lanes_in_one_node
from dynamic_cp.memory.memory_model import MemoryModel, StageMemory
from dynamic_cp.pipeline.schedule import most_alive_tokens
from dynamic_cp.placement.legal import why_not_tiled
from dynamic_cp.plans.padding import lane_tokens_of
from dynamic_cp.pool.tasks import (
    NANO_BATCH,
    SERVER,
    TASKS_PER_DOCUMENT,
    PoolTasks,
    Tasks,
    micro_batches_of,
    pool_of,
    runs_of,
    samples_of,
    ticks_of,
)
from dynamic_cp.pool.ticks import num_ticks, stage_ticks
from dynamic_cp.pool.traffic import Servers, fetched_tokens
from dynamic_cp.types import BY_PLACEMENT, Bucket, MicroBatch, Plan, Topology
from dynamic_cp.types.placement import HOLDER, SAMPLE, START, STOP

_AGAIN = "plan these samples again"

_MOST_QUERIES, _MOST_KEYS = 4, 32


def most_fetched(topology: Topology) -> tuple[int, int]:
    """Return (queries, keys) that a server may fetch in a tick, over the limit of tokens per rank. Servers meet the
    longest documents of all stages; keys of one that fills all lanes are always possible. A token limit that memory
    sets leaves room for as much (`memory.peak_at`)."""
    others = topology.num_lanes * topology.pp_size - 1
    return min(_MOST_QUERIES, others), min(max(_MOST_KEYS, topology.num_lanes), others)


def servers_of(topology: Topology, relay_servers: int) -> Servers:
    """Return the servers of a pool; `relay_servers` as in `PoolTasks`."""
    node_servers = lanes_in_one_node(topology)
    return Servers(topology.num_lanes * topology.pp_size, node_servers, relay_servers or node_servers)


def homes_of(micro_batch: MicroBatch) -> Ints:
    """Return int64 [home, (sample, start, stop, lane)] of a micro-batch of a plan with a pool."""
    (bucket,) = micro_batch.buckets
    if bucket.placement is not None:
        return bucket.placement.homes.astype(np.int64)
    return np.array([(number, 0, one.seqlen, 0) for number, one in enumerate(bucket.samples)], np.int64).reshape(-1, 4)


def homes_in_tick(plan: Plan, parts: Sequence[tuple[int, int]]) -> Ints:
    """Return int64 [home, (sample of the tick, start, stop, server)] of the micro-batches `parts`, (stage, index)."""
    found, first = [np.zeros((0, 4), np.int64)], 0
    for stage, number in parts:
        shift = np.array([first, 0, 0, stage * plan.topology.num_lanes])
        found.append(homes_of(plan.micro_batches[number]) + shift)
        first += len(plan.micro_batches[number].buckets[0].samples)
    return np.concatenate(found)


def check_pool(plan: Plan) -> None:
    """Raise if the ticks of a plan with a pool cannot run; its other rules hold already (`validate.check_plan`).

    The rules:
        1. Every micro-batch is one bucket over all lanes, whose placement has homes of all its samples and no tiles.
        2. Samples have the causal mask.
        3. There are as many entries of tasks as the schedule has ticks, with chunks those of all chunks.
        4. Tasks tile the samples of their tick, and every token is held where its home is: tasks move no tokens.
        5. Tasks are cut at multiples of tile_tokens, or where homes end; a server computes at most two of a sample, in
           either nano-batch. The second nano-batch of a sample comes after the first, and begins at the same token in
           every tick.
        6. What a server fetches stays below a limit.
        7. Relays are neighbours of one stage: relay_servers divides its lanes.

    Raises IllegalPlanError: the first broken rule, with its numbers; `micro_batch` or `tick` name it."""
    topology, pool = plan.topology, pool_of(plan)
    for number, micro_batch in enumerate(plan.micro_batches):
        reason = None
        if len(micro_batch.buckets) > 1:
            reason = f"{len(micro_batch.buckets)} buckets, in a plan with a pool 1 has all {topology.num_lanes} lanes"
        reason = reason or why_not_homed(micro_batch.buckets[0], plan)
        if reason is not None:
            raise IllegalPlanError(f"micro-batch {number}: {reason}: {_AGAIN}", micro_batch=number)
    wanted = num_ticks(topology.pp_size, topology.vp_size, plan.num_microbatches)
    if not len(pool.forward) == len(pool.backward) == wanted:
        raise IllegalPlanError(
            f"the plan has tasks for {len(pool.forward)} forward and {len(pool.backward)} backward ticks, {wanted} of "
            f"each are needed: {_AGAIN}"
        )
    if pool.relay_servers and topology.num_lanes % pool.relay_servers:
        raise IllegalPlanError(
            f"relay_servers is {pool.relay_servers}, which does not divide the {topology.num_lanes} lanes of a stage: "
            f"{_AGAIN}"
        )
    judged: dict[tuple[tuple[int, int], ...], Tasks] = {}
    firsts: dict[int, list[int]] = {}
    for tick, tasks in ticks_of(plan):
        parts = micro_batches_of(plan, tick)
        if judged.get(tuple(parts)) == tasks:
            continue
        judged[tuple(parts)] = tasks
        rows = tasks.rows.astype(np.int64)
        reason = why_not_tiled(rows[:, : HOLDER + 1], samples_of(plan, tick))
        if reason is None:
            reason = _why_tasks_wrong(plan, pool, rows, parts)
        if reason is None:
            reason = why_too_much_fetched(tasks, plan.num_servers, plan.max_tokens_per_rank, most_fetched(topology))
        if reason is None:
            reason = _why_nano_batches_differ(plan, rows, parts, firsts)
        if reason is not None:
            raise IllegalPlanError(f"tick {tick}: {reason}: {_AGAIN}", tick=str(tick))


def why_no_timeline(plan: Plan) -> str:
    """Return why the stock schedules have no timeline of a plan with a pool."""
    return (
        f"the plan has a pool of {plan.num_servers} servers, whose ticks are no 1F1B: what they take stands with "
        "the plan (`pool.search.plan_tasks`)"
    )


def why_not_homed(bucket: Bucket, plan: Plan) -> str | None:
    """Return why a bucket cannot be one of a plan with a pool; None if it can."""
    num_lanes = plan.topology.num_lanes
    masked = next((sample for sample in bucket.samples if sample.mask is not None), None)
    if masked is not None:
        return f"{masked.mask_in_words}, tasks have all keys up to their queries"
    if num_lanes == 1:
        return None
    if bucket.placement is None or bucket.inner_cp_size > 1:
        return f"its lanes have {bucket.attention}, in a plan with a pool they have homes ({BY_PLACEMENT})"
    if len(bucket.placement.tiles) or bucket.placement.layer_masks:
        return (
            f"its placement has {len(bucket.placement.tiles)} tiles and {len(bucket.placement.layer_masks)} masks of "
            "layers, in a plan with a pool 0: tasks say who computes"
        )
    homes = bucket.placement.homes.astype(np.int64)
    if len(homes) and not 0 <= homes[:, HOLDER].min() <= homes[:, HOLDER].max() < num_lanes:
        return f"homes are on lanes {homes[:, HOLDER].min()} to {homes[:, HOLDER].max()} of {num_lanes}"
    return why_not_tiled(homes, bucket.samples)


def _why_tasks_wrong(plan: Plan, pool: PoolTasks, rows: Ints, parts: Sequence[tuple[int, int]]) -> str | None:
    for column, kind in ((HOLDER, "held"), (SERVER, "computed")):
        if not 0 <= rows[:, column].min() <= rows[:, column].max() < plan.num_servers:
            return (
                f"tokens are {kind} by servers {rows[:, column].min()} to {rows[:, column].max()} of {plan.num_servers}"
            )
    homes = homes_in_tick(plan, parts)
    # The home of a row is the last one that begins no later.
    key, at = homes[:, SAMPLE] * 2**32 + homes[:, START], rows[:, SAMPLE] * 2**32 + rows[:, START]
    home = homes[np.searchsorted(key, at, side="right") - 1]
    elsewhere = (home[:, HOLDER] != rows[:, HOLDER]) | (home[:, STOP] < rows[:, STOP])
    if elsewhere.any():
        first = int(elsewhere.argmax())
        sample, start, stop, holder = rows[first, : HOLDER + 1].tolist()
        return (
            f"tokens {start} to {stop} of sample {sample} are held by server {holder}, their home "
            f"{home[first, 1:3].tolist()} is on {home[first, HOLDER]}"
        )
    off = (rows[:, STOP] % pool.tile_tokens != 0) & (rows[:, STOP] != home[:, STOP])
    if off.any():
        sample, _, stop, _ = rows[int(off.argmax()), : HOLDER + 1].tolist()
        return f"a task of sample {sample} ends at token {stop}, which {pool.tile_tokens} does not divide"
    ahead = (rows[1:, NANO_BATCH] < rows[:-1, NANO_BATCH]) & (rows[1:, SAMPLE] == rows[:-1, SAMPLE])
    if ahead.any() or not 0 <= rows[:, NANO_BATCH].min() <= rows[:, NANO_BATCH].max() <= 1:
        sample = rows[int(ahead.argmax()), SAMPLE] if ahead.any() else rows[int(rows[:, NANO_BATCH].argmax()), SAMPLE]
        return (
            f"nano-batches of sample {sample} are not 0 and then 1: the first nano-batch would need keys of the second"
        )
    runs = runs_of(rows)
    of_server, counts = np.unique(runs[:, [0, 3, 4]], axis=0, return_counts=True)
    if counts.max() > TASKS_PER_DOCUMENT:
        sample, server, _ = of_server[int(counts.argmax())].tolist()
        return f"server {server} computes {counts.max()} tasks of sample {sample}, {TASKS_PER_DOCUMENT} are possible"
    return None


def _why_nano_batches_differ(
    plan: Plan, rows: Ints, parts: Sequence[tuple[int, int]], firsts: dict[int, list[int]]
) -> str | None:
    """Return which sample is cut elsewhere than in `firsts`, micro-batch -> [sample] tokens of the first nano-batch.
    Micro-batches that are not in `firsts` are added."""
    tokens = (
        np.bincount(rows[:, SAMPLE], (rows[:, STOP] - rows[:, START]) * (rows[:, NANO_BATCH] == 0)).astype(int).tolist()
    )
    for _, number in parts:
        held = len(plan.micro_batches[number].buckets[0].samples)
        own, tokens = tokens[:held], tokens[held:]
        known = firsts.setdefault(number, own)
        if own != known:
            sample = next(sample for sample in range(held) if own[sample] != known[sample])
            return (
                f"the first nano-batch of sample {sample} of micro-batch {number} has {own[sample]} tokens, in another "
                f"tick {known[sample]}"
            )
    return None


def why_too_much_fetched(tasks: Tasks, num_servers: int, max_tokens_per_rank: int, most: tuple[int, int]) -> str | None:
    """Return which server fetches too much, with the numbers, or None; `most`: limits of (queries, keys), over that of
    tokens per rank."""
    fetched = fetched_tokens(tasks, num_servers)
    for kind, times, tokens in zip(("queries", "keys"), most, fetched, strict=True):
        if tokens.max(initial=0) > times * max_tokens_per_rank:
            return (
                f"server {int(tokens.argmax())} fetches {tokens.max()} tokens' {kind}, the limit is {times} times "
                f"{max_tokens_per_rank}"
            )
    return None


def fetched_in_ticks(plan: Plan) -> Ints:
    """Return int64 [stage, (queries, keys), lane]: the most tokens that a server of a pool fetches in a tick."""
    topology = plan.topology
    most = np.zeros((2, plan.num_servers), np.int64)
    for tasks in {tasks: None for _, tasks in ticks_of(plan)}:
        most = np.maximum(most, fetched_tokens(tasks, plan.num_servers))
    of_stages: Ints = most.reshape(2, topology.pp_size, -1).transpose(1, 0, 2)
    return of_stages


def peak(model: MemoryModel, plan: Plan) -> tuple[StageMemory, ...]:
    """Return the memory of every stage when it runs a plan with a pool, on its worst lane."""
    pool = pool_of(plan)
    has_relays = servers_of(plan.topology, pool.relay_servers).of_relay > 1
    held, fetched = lane_tokens_of(plan), fetched_in_ticks(plan)
    return peak_in_ticks(model, held, fetched, in_nano_batches=pool.num_nano_batches > 1, has_relays=has_relays)


def peak_at(model: MemoryModel, tokens_per_rank: int) -> tuple[StageMemory, ...]:
    """Return the same if a rank fetches as many queries and keys as it may: no plan of that limit needs more."""
    return _peak_in_full_ticks(model, tokens_per_rank, most_fetched(model.topology))


def least_at(model: MemoryModel, tokens_per_rank: int) -> tuple[str, tuple[StageMemory, ...]]:
    """Return, in words and bytes, the least that plans of this limit need: the memory of those that compute tokens
    where they lie. Plans that fetch more are taken only if they fit."""
    at_home = 0, model.topology.num_lanes - 1
    return f"{tokens_per_rank} tokens per rank in ticks", _peak_in_full_ticks(model, tokens_per_rank, at_home)


def _peak_in_full_ticks(model: MemoryModel, tokens_per_rank: int, fetched: tuple[int, int]) -> tuple[StageMemory, ...]:
    """Return the memory of full micro-batches in ticks; `fetched`: (queries, keys) over the tokens of a rank."""
    topology = model.topology
    of_stages = np.array([fetched] * topology.pp_size, np.int64)[:, :, None] * tokens_per_rank
    held = model.full_micro_batches(tokens_per_rank)
    return peak_in_ticks(
        model, held, of_stages, in_nano_batches=model.options.ping_pong, has_relays=topology.num_lanes > 1
    )


def peak_in_ticks(
    model: MemoryModel, held: Ints, fetched: Ints, *, in_nano_batches: bool, has_relays: bool
) -> tuple[StageMemory, ...]:
    """Return the memory of every stage when all stages run in ticks, on its worst lane.

    Args:
        held: int64 [micro-batch, lane] padded tokens of a rank.
        fetched: int64 [stage, (queries, keys), lane] most tokens that a rank fetches in a tick.
        has_relays: ranks hand on what they fetched.
    """
    topology = model.topology
    most = held.max(axis=0).astype(np.float64)
    queries, keys, again = FETCHED_QUERIES, FETCHED_KEYS, np.zeros_like(most)
    if in_nano_batches and has_relays:
        keys += COLLECTED_KEYS
    if in_nano_batches and "core_attn" in model.options.repeated:
        # The next layer is computed again beside the one that runs backward.
        queries, keys = queries + AGAIN_QUERIES, keys + AGAIN_KEYS
        again = most * (model.options.recompute == "full")
    memory = []
    for stage, of_ticks in enumerate(stage_ticks(topology.pp_size, topology.vp_size, len(held))):
        operations = [operation for operation in of_ticks if operation is not None]
        alive = most_alive_tokens(operations, held).astype(np.float64)
        rows, columns = most + fetched[stage]
        buffers = np.max(
            [
                queries * layer.a2a_queries * rows
                + keys * layer.ring_per_bucket_token * columns
                + again * layer.working
                for layer in model.layer_bytes.values()
            ],
            axis=0,
        )
        memory.append(model.worst_lane(stage, alive, most, buffers, alive, most))
    return tuple(memory)
