"""Documents on lanes as tests of tasks draw them."""

import random

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.pool.homes import TILE_TOKENS, homes_in_nano_batches, quota_homes
from dynamic_cp.pool.scheduler import Rules, schedule
from dynamic_cp.pool.tasks import Tasks, tasks_of

NONE = np.zeros((0, 4), np.int64)


def rules(tolerance: float = 0.1, tile: int = TILE_TOKENS, extra_tokens: float = 0.0) -> Rules:
    """Return those of Llama-3-8B: a quarter as many bytes of keys and values as of queries and outputs."""
    return Rules(tile, tolerance, 16384.0, 4096.0, extra_tokens)


def random_seqlens(rng: random.Random, num_tokens: int) -> Ints:
    """Return lengths, descending, of about so many tokens; some of a token, some far longer than the others."""
    seqlens = [1]
    while sum(seqlens) < num_tokens:
        seqlens.append(min(num_tokens - sum(seqlens), round(rng.lognormvariate(6.5, 1.6)) + 1))
    return np.array(sorted(seqlens, reverse=True), np.int64)


def homes_of(seqlens: Ints, num_lanes: int, num_nano_batches: int = 1, tile: int = TILE_TOKENS) -> Ints:
    """Return homes with room to spare."""
    capacity = -(-int(seqlens.sum()) // num_lanes) * 5 // 4 + 8 * tile
    homes = quota_homes(seqlens, num_lanes, capacity, tile, num_nano_batches)
    assert len(homes)
    return homes


def scheduled(
    homes: Ints, num_servers: int, tolerance: float = 0.1, num_nano_batches: int = 1, tile: int = TILE_TOKENS
) -> Tasks:
    """Return tasks of homes, in one nano-batch or in two."""
    if num_nano_batches == 1:
        return tasks_of(homes, [schedule(homes, homes, NONE, np.zeros(num_servers), rules(tolerance, tile))])
    rows = homes_in_nano_batches(homes, num_servers, tile)
    first = schedule(homes, rows[rows[:, 4] == 0, :4].copy(), NONE, np.zeros(num_servers), rules(tolerance, tile))
    second = schedule(homes, rows[rows[:, 4] == 1, :4].copy(), first, np.zeros(num_servers), rules(tolerance, tile))
    return tasks_of(homes, [first, second])
