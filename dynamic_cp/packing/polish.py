"""Improves packings of small batches by simulated annealing on the exact makespan.

Packers that fill rows to a target lose 2 to 5 % where a batch has only a few samples per lane: there every single
placement counts, and an exact simulation takes microseconds. Moves: a sample into another bucket or a new one, two
samples exchanged, a bucket to other lanes, another row or another CP size, a bucket split in two, two merged, two rows
exchanged; rows that end up empty are dropped. The generator starts from a fixed state and the number of steps is
counted, so equal input gives an equal packing.
"""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Ints
from dynamic_cp.loops import draw, next_state, share
from dynamic_cp.packing.durations import Packing, padded_seqlen, sums_of_buckets, without_empty_rows
from dynamic_cp.packing.judge import PricedPacking, fill_grid, num_microbatches_of
from dynamic_cp.packing.judge import makespan_ns as exact_makespan_ns
from dynamic_cp.pipeline.longest_path import Grid, end_times
from dynamic_cp.pipeline.schedule import Graph, pipeline_graph
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import PriceTable, best_options
from dynamic_cp.pricing.work import Lengths

_Slots = tuple[Ints, Ints, Ints, Ints]
"""[sample] -> bucket; [bucket] -> row, first lane, log2 of CP size. A slot without samples is no bucket."""
_HOTTEST, _COLDEST = 0.02, 0.0003
"""Temperatures as shares of the makespan: a step that is worse by this share is taken with probability 1 / e. Every
second walk starts three times as hot."""


def polish(
    lengths: Lengths, packing: Packing, cost_model: CostModel, num_steps: int, seed: int = 0
) -> tuple[int, Packing]:
    """Return (makespan in nanoseconds, packing) of the best packing met in `num_steps` moves, `packing` included.

    Args:
        lengths: the samples.
        packing: where to start; the result has as many rows, or fewer.
        cost_model: prices, lanes and stages.
        num_steps: moves to try.
        seed: another seed, another walk.
    """
    topology = cost_model.topology
    rows = num_microbatches_of(packing, cost_model)
    graph = pipeline_graph(topology.pp_size, rows, topology.vp_size)
    makespan_ns, (bucket_of_sample, row_of, first_of, size_of) = _anneal(
        lengths,
        cost_model.table,
        graph,
        topology.vp_size,
        (rows, topology.num_lanes),
        num_steps,
        seed,
        _one_slot_a_sample(packing, len(lengths.seqlens)),
    )
    used, bucket_of_sample = np.unique(bucket_of_sample, return_inverse=True)
    found = Packing(rows, bucket_of_sample, row_of[used], first_of[used], size_of[used])
    shorter = without_empty_rows(found)
    if num_microbatches_of(shorter, cost_model) < rows:
        return exact_makespan_ns(lengths, shorter, cost_model), shorter
    return int(makespan_ns), found


def _one_slot_a_sample(packing: Packing, num_samples: int) -> _Slots:
    """Return the buckets that hold samples, in as many slots as there could be buckets."""
    used, bucket_of_sample = np.unique(packing.bucket_of_sample, return_inverse=True)
    slots = np.zeros((3, num_samples), np.int64)
    for slot, values in zip(slots, (packing.rows, packing.first_lanes, packing.log2_cp_sizes), strict=True):
        slot[: len(used)] = values[used]
    return bucket_of_sample.astype(np.int64), slots[0].copy(), slots[1].copy(), slots[2].copy()


@compiled
def _anneal(
    lengths: Lengths, table: PriceTable, graph: Graph, vp_size: int, shape: tuple[int, int], num_steps: int, seed: int,
    start: _Slots,
) -> tuple[int, _Slots]:  # fmt: skip
    """Return (makespan, state) of the best state on the way from `start`; `shape` is (rows, lanes)."""
    num_rows, num_lanes = shape
    grid = Grid(
        np.ones(shape, np.int64),
        np.empty((2, num_rows, num_lanes), np.int64),
        np.empty((2, 2, num_rows, num_lanes), np.int64),
        np.empty(shape, np.int64),
    )
    ends = np.empty((len(graph.kind), num_lanes), np.int64)
    hottest = _HOTTEST * (1.0 + 2.0 * (seed % 2))
    state = np.uint64(88172645463325252 + seed * 7919000021)
    current = (start[0].copy(), start[1].copy(), start[2].copy(), start[3].copy())
    now = _makespan(lengths, table, graph, vp_size, grid, ends, current)
    best, best_ns = (current[0].copy(), current[1].copy(), current[2].copy(), current[3].copy()), now
    trial = (current[0].copy(), current[1].copy(), current[2].copy(), current[3].copy())
    for step in range(num_steps):
        temperature = now * hottest * (_COLDEST / hottest) ** (step / num_steps)
        for part in range(4):
            trial[part][:] = current[part]
        state, changed = _move(state, lengths.seqlens, table, num_rows, num_lanes, trial)
        if not changed or not _is_legal(lengths.seqlens, table, num_rows, num_lanes, trial):
            continue
        then = _makespan(lengths, table, graph, vp_size, grid, ends, trial)
        state = next_state(state)
        if then <= now or share(state) < np.exp((now - then) / temperature):
            now = then
            for part in range(4):
                current[part][:] = trial[part]
            if now < best_ns:
                best_ns = now
                for part in range(4):
                    best[part][:] = current[part]
    return best_ns, best


@compiled
def _move(
    state: int, seqlens: Ints, table: PriceTable, num_rows: int, num_lanes: int, trial: _Slots
) -> tuple[int, bool]:
    """Change `trial` in place; return (state of the generator, whether something changed). May be illegal.

    Of 14 draws 4 put a sample into another bucket, 2 exchange two samples, 1 opens a bucket for a sample, 2 place a
    bucket anew, 2 split one, 2 merge two, 1 exchanges two rows. With samples 0, 1, 2 in buckets 0, 0, 1, a draw of 5
    and the samples 1 and 2 give the buckets 0, 1, 0.
    """
    bucket_of_sample = trial[0]
    state = next_state(state)
    kind = draw(state, 14)
    state = next_state(state)
    sample = draw(state, len(seqlens))
    state = next_state(state)
    other = draw(state, len(seqlens))
    bucket, other_bucket = bucket_of_sample[sample], bucket_of_sample[other]
    if kind < 6:
        bucket_of_sample[sample] = other_bucket
        if kind >= 4:
            bucket_of_sample[other] = bucket
        return state, other_bucket != bucket
    if kind < 9:
        return _place_anew(state, table, num_rows, num_lanes, sample, kind == 6, trial)
    if kind < 11:
        return _split(state, table, sample, trial)
    if kind < 13:
        return state, _merge(table, num_lanes, bucket, other_bucket, trial)
    return _exchange_rows(state, num_rows, trial)


@compiled
def _place_anew(
    state: int, table: PriceTable, num_rows: int, num_lanes: int, sample: int, is_new: bool, trial: _Slots
) -> tuple[int, bool]:
    """Draw row, lanes and CP size for the bucket of a sample, or for a new one with this sample."""
    bucket_of_sample, row_of, first_of, size_of = trial
    state = next_state(state)
    k = draw(state, len(table.capacities))
    if table.capacities[k] == 0 or 1 << k > num_lanes:
        return state, False
    bucket = _free_slot(bucket_of_sample) if is_new else bucket_of_sample[sample]
    if bucket == len(bucket_of_sample):
        return state, False
    bucket_of_sample[sample] = bucket
    state = next_state(state)
    row_of[bucket] = draw(state, num_rows)
    state = next_state(state)
    first_of[bucket] = draw(state, num_lanes >> k) << k
    size_of[bucket] = k
    return state, True


@compiled
def _split(state: int, table: PriceTable, sample: int, trial: _Slots) -> tuple[int, bool]:
    """Split the bucket of a sample into two of half the CP size; the sample stays, others draw."""
    bucket_of_sample, row_of, first_of, size_of = trial
    num_samples, bucket = len(bucket_of_sample), bucket_of_sample[sample]
    slot = _free_slot(bucket_of_sample)
    k = size_of[bucket] - 1
    if slot == num_samples or k < 0 or table.capacities[k] == 0:
        return state, False
    row_of[slot], first_of[slot], size_of[slot] = row_of[bucket], first_of[bucket] + (1 << k), k
    size_of[bucket] = k
    for member in range(num_samples):
        if bucket_of_sample[member] == bucket:
            state = next_state(state)
            if member != sample and share(state) < 0.5:
                bucket_of_sample[member] = slot
    return state, True


@compiled
def _merge(table: PriceTable, num_lanes: int, bucket: int, other_bucket: int, trial: _Slots) -> bool:
    """Merge two buckets into one of twice the CP size of the first, around its lanes."""
    bucket_of_sample, _, first_of, size_of = trial
    k = size_of[bucket] + 1
    if other_bucket == bucket or 1 << k > num_lanes or table.capacities[k] == 0:
        return False
    first = first_of[bucket] >> k << k
    if first + (1 << k) > num_lanes:
        return False
    first_of[bucket], size_of[bucket] = first, k
    for member in range(len(bucket_of_sample)):
        if bucket_of_sample[member] == other_bucket:
            bucket_of_sample[member] = bucket
    return True


@compiled
def _exchange_rows(state: int, num_rows: int, trial: _Slots) -> tuple[int, bool]:
    row_of = trial[1]
    state = next_state(state)
    one = draw(state, num_rows)
    state = next_state(state)
    two = draw(state, num_rows)
    for slot in range(len(row_of)):
        if row_of[slot] == one:
            row_of[slot] = two
        elif row_of[slot] == two:
            row_of[slot] = one
    return state, one != two


@compiled
def _free_slot(bucket_of_sample: Ints) -> int:
    """Return a slot whose bucket holds no sample; the number of samples when there is none."""
    num_samples = len(bucket_of_sample)
    taken = np.zeros(num_samples, np.bool_)
    for sample in range(num_samples):
        taken[bucket_of_sample[sample]] = True
    for slot in range(num_samples):
        if not taken[slot]:
            return slot
    return num_samples


@compiled
def _is_legal(seqlens: Ints, table: PriceTable, num_rows: int, num_lanes: int, trial: _Slots) -> bool:
    """Return whether no bucket holds too much and no two buckets overlap."""
    bucket_of_sample, row_of, first_of, size_of = trial
    num_samples = len(seqlens)
    tokens = np.zeros(num_samples, np.int64)
    for sample in range(num_samples):
        bucket = bucket_of_sample[sample]
        tokens[bucket] += padded_seqlen(seqlens[sample], table.multiples[size_of[bucket]])
    taken = np.zeros((num_rows, num_lanes), np.bool_)
    for bucket in range(num_samples):
        if tokens[bucket] == 0:
            continue
        if tokens[bucket] > table.capacities[size_of[bucket]]:
            return False
        for lane in range(first_of[bucket], first_of[bucket] + (1 << size_of[bucket])):
            if taken[row_of[bucket], lane]:
                return False
            taken[row_of[bucket], lane] = True
    return True


@inlined
def _makespan(
    lengths: Lengths, table: PriceTable, graph: Graph, vp_size: int, grid: Grid, ends: Ints,
    trial: _Slots,
) -> int:  # fmt: skip
    bucket_of_sample, row_of, first_of, size_of = trial
    tokens, squares = sums_of_buckets(lengths, bucket_of_sample, size_of, table.multiples, table.rank_token_multiple)
    price_rows = best_options(table, first_of, size_of, tokens, squares)
    packing = Packing(len(grid.sizes), bucket_of_sample, row_of, first_of, size_of)
    fill_grid(grid, table, vp_size, PricedPacking(packing, tokens, squares, price_rows))
    return end_times(graph, grid, ends)
