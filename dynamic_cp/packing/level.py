"""Packs rows of even work: for lanes that share experts, and whole samples for placed attention and the pool.

Lanes that share experts wait for the longest of a row. A *slot* is one row of one block of lanes. Slots are filled one
after the other, each as long as a common target or as the longest sample that is left needs, so that long samples are
together and short ones are. Slots then go to the blocks, the longest first to the block that ends first.

What is made level is the time that lanes compute apart (`durations.apart_durations_of`): experts take the mean of what
all lanes of a block hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import product
from math import ceil

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.packing.durations import Packing, apart_durations_of, bucket_ns
from dynamic_cp.packing.judge import grid_of_packing
from dynamic_cp.packing.lane_blocks import cut, widths_of
from dynamic_cp.packing.rows import RowTargets, alone_ns, fill_least
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.work import Lengths


def deal(
    items: Iterable[tuple[int, float]], num_rows: int, most_tokens: float
) -> tuple[list[list[int]], Floats] | None:
    """Return ([row] -> positions of its items, [row] its work); None: one has no room. An empty row has room for any.

    Args:
        items: (tokens, work) of each, in the order in which they are dealt.
        num_rows: rows, some of which may stay empty.
        most_tokens: of a row with more than one item.
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    held, load = np.zeros(num_rows), np.zeros(num_rows)
    for position, (tokens, work) in enumerate(items):
        fits = (held + tokens <= most_tokens) | (held == 0)
        if not fits.any():
            return None
        row = int(np.where(fits, load, np.inf).argmin())
        rows[row].append(position)
        held[row] += tokens
        load[row] += work
    return rows, load


_ROW_FACTORS = {"fast": (1.0, 1.3, 1.8, 2.6), "thorough": (1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.2, 2.6, 3.2)}
"""Common targets, as an even share of so many times the fewest rows that hold all tokens."""
_SLACKS = {"fast": (1.02, 1.4), "thorough": (1.02, 1.1, 1.2, 1.4, 1.7)}
"""How many times the least of its longest sample a row may last: more lets that sample use fewer lanes."""
_MOST_ROWS = 4.0
_LOWEST, _STEPS = 0.8, 5
"""The common target is lowered down to this share of it, as long as all samples fit into as many slots."""


def pack_level(lengths: Lengths, cost_model: CostModel, base: int, fewest_rows: int) -> Iterator[tuple[str, Packing]]:
    """Yield (name, packing) of level rows.

    Args:
        lengths: the samples.
        cost_model: prices, and lanes that share experts.
        base: log2 of the smallest allowed CP size.
        fewest_rows: rows that the tokens need at least.
    """
    topology = cost_model.topology
    durations = apart_durations_of(cost_model.table, topology.num_lanes)
    alone = alone_ns(lengths, durations, topology.num_lanes.bit_length())
    empty_ns = bucket_ns(durations, base, 0.0, 0.0)
    totals = float(lengths.seqlens.sum()), float(lengths.squares.sum())
    share_ns = (bucket_ns(durations, base, *totals) - empty_ns) / (topology.num_lanes >> base)
    most = ceil(_MOST_ROWS * fewest_rows) + 1
    widths, effort = widths_of(alone[:, 0], topology.expert_lanes), cost_model.options.search
    for k, factor, slack in product(widths, _ROW_FACTORS[effort], _SLACKS[effort]):
        first_lanes, num_lanes = cut(topology.num_lanes, 1 << k)
        num_blocks = len(num_lanes)
        target_ns, num_rows = share_ns / (factor * fewest_rows) + empty_ns, most
        found = None
        for low, steps in ((1.0, 0), (_LOWEST, _STEPS)):
            # Row by row over all blocks, so that the last slots are those that stay empty.
            slot_lanes = np.tile(num_lanes, num_rows)
            slots = RowTargets(slot_lanes, np.full(len(slot_lanes), target_ns), np.zeros(len(slot_lanes)))
            least, filling = fill_least(lengths, durations, alone, slots, (low, 1.0), steps, slack)
            if least < 0:
                break
            found, num_rows = filling, int(filling.rows.max()) // num_blocks + 1
        if found is not None:
            bucket_of_sample, slot_of_bucket, lanes, sizes = found
            rows, blocks = np.divmod(slot_of_bucket, num_blocks)
            packing = Packing(num_rows, bucket_of_sample, rows, first_lanes[blocks] + lanes, sizes)
            if num_blocks > 1:
                places = _dealt(_slot_ns(lengths, packing, cost_model, first_lanes), num_lanes)
                rows, blocks = np.divmod(places[slot_of_bucket], num_blocks)
                packing = packing._replace(rows=rows, first_lanes=first_lanes[blocks] + lanes)
            yield f"level m={num_rows} width={1 << k} share=1/{factor} slack={slack}", packing


def _slot_ns(lengths: Lengths, packing: Packing, cost_model: CostModel, first_lanes: Ints) -> Floats:
    """Return [row, block] -> nanoseconds of the slot, experts included; all its lanes take as long."""
    grid = grid_of_packing(lengths, packing, cost_model)
    slot_ns: Floats = grid.chunk_ns.sum(axis=0)[: packing.num_rows, first_lanes].astype(np.float64)
    return slot_ns


def _dealt(slot_ns: Floats, num_lanes: Ints) -> Ints:
    """Return [slot] -> its new place: the longest slot goes to the block of its width that ends first and has room."""
    num_rows, num_blocks = slot_ns.shape
    widths, durations_ns, used = num_lanes.tolist(), slot_ns.ravel().tolist(), [0] * num_blocks
    # Width -> heap of (when a block ends, block) of those that have room.
    ends = {width: [(0.0, block) for block in range(num_blocks) if widths[block] == width] for width in widths}
    places = np.empty(slot_ns.size, np.int64)
    for slot in np.argsort(-slot_ns.ravel(), kind="stable").tolist():
        alike = ends[widths[slot % num_blocks]]
        end_ns, block = heappop(alike)
        places[slot] = used[block] * num_blocks + block
        used[block] += 1
        if used[block] < num_rows:
            heappush(alike, (end_ns + durations_ns[slot], block))
    return places
