"""Improves packings without a pipeline by simulated annealing, a third of a microsecond a move.

Without a pipeline a lane waits only inside a group, and never where groups shrink from micro-batch to micro-batch
(`nested`). So lanes last as long as their buckets in sum. They are the leaves of a binary tree; a bucket of CP size 2^k
belongs to the node above its 2^k lanes. A move changes two buckets, hence the paths from their nodes to the root, which
knows when the last lane ends: a sample goes into another bucket, two samples trade places, two buckets become one of
twice the lanes of the first, or one becomes two of half of its lanes.

What a walk lowers is a soft maximum over lanes: at first nearer to their mean, so that work gets less, at the end to
the last end. The generator starts from a fixed state, moves are counted, and all arithmetic is of the four basic
operations, so equal input gives an equal packing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.loops import draw, next_state, share
from dynamic_cp.packing.durations import Packing, padded_seqlen, without_empty_rows
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import PriceTable, duration_ns
from dynamic_cp.pricing.work import Lengths, density_of

_HOTTEST, _COLDEST = 5e-5, 3e-6
"""Temperatures as shares of the makespan: a move that raises the soft maximum by as much is taken in 3 of 8 cases."""
_SOFTEST, _HARDEST = 30.0, 3000.0
"""The makespan over the width of the soft maximum."""
_EPOCHS = 64
"""Times that temperature and width change, and that the best state is looked for."""
_RELOCATE, _SWAP, _MERGE, _SPLIT = 32, 94, 98, 100
"""Of 100 moves: up to which each kind is made."""
_NEVER_NS = -1e18
_OWN, _ENDS, _COUNT, _MOST = range(4)
_SIZE, _NODE, _TOKENS, _SQUARES, _NS, _MEMBERS = range(6)


class _Walk(NamedTuple):
    """Where a walk is, and its next move. Whole numbers are exact as floats; few arrays make fast calls.

    Attributes:
        tree: [node, column]. Node 1 is the root, node i has the children 2 i and 2 i + 1, lane n is node width + n.
            _OWN: nanoseconds that the node's buckets take more than empty places would; _ENDS: the soft maximum over
            its lanes of that at it and below; _COUNT: its buckets; _MOST: the most that a lane has at it and below.
        buckets: [bucket, column]: log2 of the CP size, node, sums of padded lengths and of their squares, nanoseconds
            (0: there is none), samples.
        bucket_of_sample: [sample].
        move: [2, column] as `buckets`, of the two that it changes; _MEMBERS: which bucket that is.
        shape: rows, lanes, width: the least power of two that is no less than the lanes.
        empty_ns: of an empty place.
    """

    tree: Floats
    buckets: Floats
    bucket_of_sample: Ints
    move: Floats
    shape: tuple[int, int, int]
    empty_ns: float


def anneal(lengths: Lengths, packing: Packing, cost_model: CostModel, num_steps: int, seed: int = 0) -> Packing:
    """Return the best packing met in `num_steps` moves from `packing`.

    Args:
        lengths: the samples.
        packing: where to start; the result has as many rows, or fewer.
        cost_model: prices and lanes, without a pipeline and without experts that lanes share.
        num_steps: moves to try.
        seed: another seed, another walk.
    """
    num_samples, num_lanes = len(lengths.seqlens), cost_model.topology.num_lanes
    used, bucket_of_sample = np.unique(packing.bucket_of_sample, return_inverse=True)
    places = np.zeros((2, num_samples), np.int64)
    places[:, : len(used)] = packing.log2_cp_sizes[used], packing.first_lanes[used]
    shape = (packing.num_rows, num_lanes, 1 << (num_lanes - 1).bit_length())
    walk = _begin(lengths, cost_model.table, shape, bucket_of_sample.astype(np.int64), places)
    bucket_of_sample, buckets = _best_on(lengths, cost_model.table, walk, num_steps, seed)
    used, bucket_of_sample = np.unique(bucket_of_sample, return_inverse=True)
    sizes, nodes = buckets[used, _SIZE].astype(np.int64), buckets[used, _NODE].astype(np.int64)
    first_lanes = (nodes - (shape[2] >> sizes)) << sizes
    order = np.lexsort((-buckets[used, _NS], sizes))
    rows = packing.num_rows - 1 - _rows_from_the_end(order, sizes, first_lanes, num_lanes)
    return without_empty_rows(Packing(packing.num_rows, bucket_of_sample, rows, first_lanes, sizes))


@compiled
def _rows_from_the_end(order: Ints, sizes: Ints, first_lanes: Ints, num_lanes: int) -> Ints:
    """Return [bucket] -> rows after it, for buckets in `order`, the smallest CP sizes first and of these the longest.

    So each lane's groups shrink, and it ends with a long bucket, behind whose backward pass gradients are reduced.
    """
    rows, taken = np.zeros(len(sizes), np.int64), np.zeros(num_lanes, np.int64)
    for bucket in order:
        lanes = taken[first_lanes[bucket] : first_lanes[bucket] + (1 << sizes[bucket])]
        rows[bucket] = lanes.max()
        lanes[:] = rows[bucket] + 1
    return rows


@compiled
def _begin(
    lengths: Lengths, table: PriceTable, shape: tuple[int, int, int], bucket_of_sample: Ints, places: Ints
) -> _Walk:
    """Return the walk from a packing; places: [log2 of CP size | first lane, bucket]."""
    count, width = len(bucket_of_sample), shape[2]
    unit = float(table.rank_token_multiple)
    empty_ns = float(duration_ns(table, 0, table.links[0, 0], unit, unit * unit))
    tree, buckets, move = np.zeros((2 * width, 4)), np.zeros((count, 6)), np.zeros((2, 6))
    for sample in range(count):
        bucket = bucket_of_sample[sample]
        size, first_lane = places[0, bucket], places[1, bucket]
        buckets[bucket, _SIZE], buckets[bucket, _NODE] = size, (width >> size) + (first_lane >> size)
        buckets[bucket, _MEMBERS] += 1.0
        _shift(lengths, table, buckets, bucket, sample, 1.0)
    for bucket in range(count):
        if buckets[bucket, _MEMBERS] > 0.0:
            _price(table, buckets, bucket, width)
            _put(tree, buckets, bucket, 1.0, empty_ns)
    return _Walk(tree, buckets, bucket_of_sample.copy(), move, shape, empty_ns)


@compiled
def _best_on(lengths: Lengths, table: PriceTable, walk: _Walk, num_steps: int, seed: int) -> tuple[Ints, Floats]:
    """Return [sample] -> bucket, and the buckets, of the best state on the walk."""
    tree, buckets, bucket_of_sample, _, shape, empty_ns = walk
    num_rows, num_lanes, width = shape
    best_ns = _last_end(tree, num_lanes, width)
    best = bucket_of_sample.copy(), buckets.copy()
    makespan_ns, now_ns = best_ns + num_rows * empty_ns, 0.0
    hardness, temperature_ns = _SOFTEST / makespan_ns, _HOTTEST * makespan_ns
    generator = np.uint64(88172645463325252 + seed * 7919000021)
    for epoch in range(_EPOCHS):
        for node in range(2 * width - 1, 0, -1):
            _sum_up(tree, node, hardness)
            if node >= width + num_lanes:
                tree[node, _ENDS] = _NEVER_NS
        now_ns = tree[1, _ENDS]
        for _ in range(num_steps * epoch // _EPOCHS, num_steps * (epoch + 1) // _EPOCHS):
            generator, kind, sample, other = _draw(generator, tree, buckets, bucket_of_sample)
            if not _propose(lengths, table, walk, kind, sample, other):
                continue
            _exchange(walk, hardness)
            worse = (tree[1, _ENDS] - now_ns) / temperature_ns
            generator = next_state(generator)
            taken = tree[1, _MOST] <= num_rows
            if taken and worse > 0.0:  # nearly a draw below exp(-worse)
                taken = share(generator) * (1.0 + worse * (1.0 + worse * (0.5 + worse / 6.0))) < 1.0
            if taken:
                now_ns = tree[1, _ENDS]
                _assign(lengths, table, walk, kind, sample, other)
            else:
                _exchange(walk, hardness)
        end_ns = _last_end(tree, num_lanes, width)
        if end_ns < best_ns:
            best_ns = end_ns
            best[0][:], best[1][:] = bucket_of_sample, buckets
        hardness *= (_HARDEST / _SOFTEST) ** (1.0 / (_EPOCHS - 1))
        temperature_ns *= (_COLDEST / _HOTTEST) ** (1.0 / (_EPOCHS - 1))
    return best


@inlined
def _shift(lengths: Lengths, table: PriceTable, buckets: Floats, bucket: int, sample: int, sign: float) -> None:
    """Add the tokens of a sample to a bucket, or take them away (sign -1)."""
    padded = float(padded_seqlen(lengths.seqlens[sample], table.multiples[int(buckets[bucket, _SIZE])]))
    buckets[bucket, _TOKENS] += sign * padded
    buckets[bucket, _SQUARES] += sign * density_of(lengths.densities, sample) * padded * padded


@inlined
def _price(table: PriceTable, buckets: Floats, bucket: int, width: int) -> None:
    """Write what a bucket takes, 0 without tokens."""
    size, tokens = int(buckets[bucket, _SIZE]), buckets[bucket, _TOKENS]
    link = table.links[size, int(buckets[bucket, _NODE]) - (width >> size)]
    ns = float(duration_ns(table, size, link, tokens, buckets[bucket, _SQUARES]))
    buckets[bucket, _NS] = ns if tokens > 0.0 else 0.0


@inlined
def _put(tree: Floats, buckets: Floats, bucket: int, sign: float, empty_ns: float) -> None:
    """Add a bucket to its node, or take it away (sign -1)."""
    if buckets[bucket, _NS] > 0.0:
        tree[int(buckets[bucket, _NODE]), _OWN] += sign * (buckets[bucket, _NS] - empty_ns)
        tree[int(buckets[bucket, _NODE]), _COUNT] += sign


@compiled
def _last_end(tree: Floats, num_lanes: int, width: int) -> float:
    """Return what the lane that ends last takes more than empty places."""
    last_ns = _NEVER_NS
    for lane in range(num_lanes):
        last_ns = max(last_ns, _with_nodes_above(tree, width + lane, 0.0))
    return last_ns


@inlined
def _with_nodes_above(tree: Floats, node: int, below_ns: float) -> float:
    """Return `below_ns` and what the buckets of a node and of those above it take."""
    while node >= 1:
        below_ns += tree[node, _OWN]
        node >>= 1
    return below_ns


@inlined
def _sum_up(tree: Floats, node: int, hardness: float) -> None:
    """Write _ENDS and _MOST of a node whose children have theirs."""
    tree[node, _ENDS], tree[node, _MOST] = tree[node, _OWN], tree[node, _COUNT]
    if 2 * node < len(tree):
        left_ns, right_ns = tree[2 * node, _ENDS], tree[2 * node + 1, _ENDS]
        apart = hardness * abs(left_ns - right_ns)
        # Nearly log(1 + exp(-apart)).
        soft_ns = 0.7 / (hardness * (1.0 + apart * (1.0 + apart * (0.5 + apart / 6.0))))
        tree[node, _ENDS] += max(left_ns, right_ns) + soft_ns
        tree[node, _MOST] += max(tree[2 * node, _MOST], tree[2 * node + 1, _MOST])


@inlined
def _draw(generator: int, tree: Floats, buckets: Floats, bucket_of_sample: Ints) -> tuple[int, int, int, int]:
    """Return (generator, kind of move, two samples); long samples come often, the first one's lanes end later."""
    generator = next_state(generator)
    kind = draw(generator, 100)
    generator = next_state(generator)
    which = draw(generator, 4)
    generator = next_state(generator)
    one = share(generator)
    generator = next_state(generator)
    two = share(generator)
    one = one * one * one * one * one * one if which % 2 else one
    two = two * two * two * two * two * two if which // 2 else two
    sample, other = int(one * len(bucket_of_sample)), int(two * len(bucket_of_sample))
    node, other_node = int(buckets[bucket_of_sample[sample], _NODE]), int(buckets[bucket_of_sample[other], _NODE])
    end_ns = _with_nodes_above(tree, node >> 1, tree[node, _ENDS])
    if end_ns < _with_nodes_above(tree, other_node >> 1, tree[other_node, _ENDS]):
        sample, other = other, sample
    return generator, kind, sample, other


@compiled
def _propose(lengths: Lengths, table: PriceTable, walk: _Walk, kind: int, sample: int, other: int) -> bool:
    """Write the next move; return whether it is one that keeps the limits of tokens."""
    _, buckets, bucket_of_sample, move, shape, _ = walk
    bucket, second = bucket_of_sample[sample], bucket_of_sample[other]
    if kind >= _MERGE:
        second = _free_bucket(buckets) if buckets[bucket, _MEMBERS] > 1.0 else bucket
    if bucket == second:
        return False
    for column in range(_MEMBERS):
        move[0, column], move[1, column] = buckets[bucket, column], buckets[second, column]
    move[0, _MEMBERS], move[1, _MEMBERS] = bucket, second
    if kind < _SWAP:
        _shift(lengths, table, move, 0, sample, -1.0)
        _shift(lengths, table, move, 1, sample, 1.0)
        if kind >= _RELOCATE:
            _shift(lengths, table, move, 0, other, 1.0)
            _shift(lengths, table, move, 1, other, -1.0)
    elif _resize(table, walk, kind):
        _divide(lengths, table, walk, kind, False)
    else:
        return False
    for at in range(2):
        tokens = move[at, _TOKENS]
        # What came in with more than the limit, a sample alone, may stay.
        grows = kind >= _SWAP or tokens > buckets[int(move[at, _MEMBERS]), _TOKENS]
        if grows and tokens > table.capacities[int(move[at, _SIZE])]:
            return False
        _price(table, move, at, shape[2])
    return True


@compiled
def _free_bucket(buckets: Floats) -> int:
    """Return a bucket without samples; there is one where another one has two."""
    bucket = len(buckets) - 1
    while buckets[bucket, _MEMBERS] > 0.0:
        bucket -= 1
    return bucket


@compiled
def _resize(table: PriceTable, walk: _Walk, kind: int) -> bool:
    """Write CP sizes and lanes of a merger or a split; return whether there are such."""
    move, (_, num_lanes, width) = walk.move, walk.shape
    size, node = int(move[0, _SIZE]), int(move[0, _NODE])
    size, first = (size + 1, node >> 1) if kind < _MERGE else (size - 1, 2 * node)
    if size < 0 or size >= len(table.capacities) or table.capacities[size] == 0 or 1 << size > width:
        return False
    move[0, _SIZE], move[0, _NODE] = size, first
    if kind >= _MERGE:
        move[1, _SIZE], move[1, _NODE] = size, first + 1
    return (first - (width >> size) + 1) << size <= num_lanes


@compiled
def _divide(lengths: Lengths, table: PriceTable, walk: _Walk, kind: int, moves: bool) -> int:
    """Write the sums of a merger or a split; return how many samples are in the second bucket then.

    In a split the longest sample stays, and each further one goes to the half that has fewer tokens. `moves`: do so.
    """
    bucket_of_sample, move = walk.bucket_of_sample, walk.move
    pair = int(move[0, _MEMBERS]), int(move[1, _MEMBERS])
    for at in range(2):
        move[at, _TOKENS] = move[at, _SQUARES] = 0.0
    num_second = 0
    for sample in range(len(bucket_of_sample)):
        if bucket_of_sample[sample] == pair[0] or bucket_of_sample[sample] == pair[1]:
            half = 1 if kind >= _MERGE and move[0, _TOKENS] > move[1, _TOKENS] else 0
            _shift(lengths, table, move, half, sample, 1.0)
            num_second += half
            if moves:
                bucket_of_sample[sample] = pair[half]
    return num_second


@compiled
def _exchange(walk: _Walk, hardness: float) -> None:
    """Exchange the two buckets of a move with what they shall be: done twice, nothing has changed."""
    tree, buckets, _, move, _, empty_ns = walk
    for at in range(2):
        bucket = int(move[at, _MEMBERS])
        node = before = int(buckets[bucket, _NODE])
        _put(tree, buckets, bucket, -1.0, empty_ns)
        for column in range(_MEMBERS):
            buckets[bucket, column], move[at, column] = move[at, column], buckets[bucket, column]
        _put(tree, buckets, bucket, 1.0, empty_ns)
        while node >= 1:
            _sum_up(tree, node, hardness)
            node >>= 1
        node = int(buckets[bucket, _NODE])
        while node >= 1 and int(buckets[bucket, _NODE]) != before:
            _sum_up(tree, node, hardness)
            node >>= 1


@compiled
def _assign(lengths: Lengths, table: PriceTable, walk: _Walk, kind: int, sample: int, other: int) -> None:
    """Move the samples of a move that was taken."""
    _, buckets, bucket_of_sample, move, _, _ = walk
    bucket, second = int(move[0, _MEMBERS]), int(move[1, _MEMBERS])
    if kind < _RELOCATE:
        bucket_of_sample[sample] = second
        buckets[bucket, _MEMBERS] -= 1.0
        buckets[second, _MEMBERS] += 1.0
    elif kind < _SWAP:
        bucket_of_sample[sample], bucket_of_sample[other] = second, bucket
    else:
        num_samples = buckets[bucket, _MEMBERS] + buckets[second, _MEMBERS]
        move[0, _SIZE], move[1, _SIZE] = buckets[bucket, _SIZE], buckets[second, _SIZE]
        num_second = _divide(lengths, table, walk, kind, True)
        buckets[bucket, _MEMBERS], buckets[second, _MEMBERS] = num_samples - num_second, num_second
