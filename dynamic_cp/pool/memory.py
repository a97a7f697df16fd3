"""Bytes of a rank on every stage where all stages run in ticks and serve each other (`memory.memory_model`)."""

from __future__ import annotations

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.mechanisms.blocks import AGAIN_KEYS, AGAIN_QUERIES, COLLECTED_KEYS, FETCHED_KEYS, FETCHED_QUERIES
from dynamic_cp.memory.memory_model import MemoryModel, StageMemory
from dynamic_cp.pipeline.schedule import most_alive_tokens
from dynamic_cp.plans.lane_tokens import lane_tokens_of
from dynamic_cp.pool.legal import fetched_in_ticks, most_fetched, servers_of
from dynamic_cp.pool.plan import pool_of
from dynamic_cp.pool.ticks import stage_ticks
from dynamic_cp.types import Plan


def peak(model: MemoryModel, plan: Plan) -> tuple[StageMemory, ...]:
    """Return the memory of every stage when it runs a plan with a pool, on its worst lane."""
    pool = pool_of(plan)
    has_relays = servers_of(plan.topology, pool.relay_servers).of_relay > 1
    held, fetched = lane_tokens_of(plan), fetched_in_ticks(plan)
    return peak_in_ticks(model, held, fetched, in_nano_batches=pool.num_nano_batches > 1, has_relays=has_relays)


def peak_at(model: MemoryModel, tokens_per_rank: int) -> tuple[StageMemory, ...]:
    """Return the same where a rank fetches as many queries and keys as it may: no plan of that limit needs more."""
    return _peak_in_full_ticks(model, tokens_per_rank, most_fetched(model.topology))


def least_at(model: MemoryModel, tokens_per_rank: int) -> tuple[str, tuple[StageMemory, ...]]:
    """Return what plans may need whose tokens are computed where they lie, and what that is in words.

    Of plans that fetch more the ones that fit are taken.
    """
    at_home = 0, model.topology.num_lanes - 1
    return f"{tokens_per_rank} tokens per rank in ticks", _peak_in_full_ticks(model, tokens_per_rank, at_home)


def _peak_in_full_ticks(model: MemoryModel, tokens_per_rank: int, fetched: tuple[int, int]) -> tuple[StageMemory, ...]:
    """Return the memory of full micro-batches in ticks; fetched: (queries, keys) over the tokens of a rank."""
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
        model: of the job.
        held: int64 [micro-batch, lane] padded tokens of a rank.
        fetched: int64 [stage, (queries, keys), lane] most tokens of which a rank fetches those in a tick.
        in_nano_batches: layers run in two nano-batches; has_relays: ranks hand on what they fetched.
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
