"""Masks as runs of rows, from which pairs between any two stretches of a sample are counted in closed form.

A run is a stretch of rows whose range of keys stays or moves on by one key per row, at either end: a causal sample is
one run, any other mask made by a rule a handful. A row is in few runs, and has no key twice. Kernels compute whole
*sub-tiles* of SUB_TILE queries and keys if they hold one allowed pair; their pairs are *touched*, and count as work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Ints
from dynamic_cp.loops import ascending, first_not_below
from dynamic_cp.types.masks import CAUSAL, Mask
from dynamic_cp.types.plan import Sample

if TYPE_CHECKING:
    from dynamic_cp.types.masks import Ranges


FIRST_ROW, ROW_STOP, BEGIN, END, BEGIN_STEP, END_STEP = range(6)
"""Columns of runs: first row and the one after the last, the keys of the first row, and what each row adds to them."""
SUB_TILE = 128
"""Queries and keys of a sub-tile: what attention kernels compute at a time."""
_MIN_BLOCK = 64
"""Changes of a mask that lie closer together, in tokens, count as one."""


class RowRuns(NamedTuple):
    """The runs of some samples.

    Attributes:
        starts: [sample + 1] -> run; the runs of a sample are neighbours, ascending by their first row.
        table: [run, (FIRST_ROW, .. END_STEP)]; keys go from begin to before end; steps are 0 or 1.
    """

    seqlens: Ints
    starts: Ints
    table: Ints


class Tiles(NamedTuple):
    """Pairs of blocks between which a mask allows any pair, ascending by (row, column): [tile] block of the queries and
    of the keys, counted over all samples, pairs that the mask allows, and those that a kernel computes."""

    rows: Ints
    columns: Ints
    pairs: Ints
    touched: Ints


def runs_of(samples: Sequence[Sample]) -> RowRuns:
    """Return the runs of `samples`; those without a mask are causal."""
    tables = [table_of(sample.mask or CAUSAL, sample.seqlen) for sample in samples]
    starts = np.zeros(len(tables) + 1, np.int64)
    np.cumsum([len(table) for table in tables], out=starts[1:])
    seqlens = np.fromiter((sample.seqlen for sample in samples), np.int64, len(samples))
    return RowRuns(seqlens, starts, np.concatenate(tables))


@lru_cache(maxsize=4096)
def table_of(mask: Mask, seqlen: int) -> Ints:
    """Return the runs of one sample, as in `RowRuns.table`."""
    rectangles = mask.rectangles(seqlen)
    if rectangles is None:
        return _runs_in(mask.key_ranges(seqlen))
    table = [
        (one.first_row, one.first_row + one.num_rows, one.first_column,
         one.first_column + (1 if one.causal else one.num_columns), 0, int(one.causal))
        for one in rectangles
    ]  # fmt: skip
    return np.array(sorted(table), np.int64)


@compiled
def _runs_in(ranges: Ranges) -> Ints:
    """Return the runs of `Mask.key_ranges`."""
    num_rows, num_parts = len(ranges), ranges.shape[1] // 2
    table = np.empty((num_parts * num_rows, 6), np.int64)
    count = 0
    open_run = np.full(num_parts, -1)
    for row in range(num_rows):
        for part in range(num_parts):
            begin, end = np.int64(ranges[row, 2 * part]), np.int64(ranges[row, 2 * part + 1])
            run = open_run[part]
            if run >= 0 and begin < end:
                if row == table[run, FIRST_ROW] + 1:
                    begin_step, end_step = begin - table[run, BEGIN], end - table[run, END]
                    if 0 <= begin_step <= 1 and 0 <= end_step <= 1:
                        table[run, BEGIN_STEP], table[run, END_STEP] = begin_step, end_step
                if (begin, end) == _keys_of(table[run], row):
                    table[run, ROW_STOP] = row + 1
                    continue
            open_run[part] = -1
            if begin < end:
                table[count] = (row, row + 1, begin, end, 0, 0)
                open_run[part] = count
                count += 1
    return table[:count].copy()  # type: ignore[no-any-return]


@inlined
def _keys_of(run: Ints, row: int) -> tuple[int, int]:
    """Return the first key that a row of a run sees, and the one after the last."""
    further = row - run[FIRST_ROW]
    return run[BEGIN] + further * run[BEGIN_STEP], run[END] + further * run[END_STEP]


@compiled
def cut_samples(runs: RowRuns, block_size: int) -> tuple[Ints, Ints]:
    """Return ([sample + 1] -> cut, [cut] token): where samples are cut into blocks, their two ends included. Samples of
    up to `block_size` tokens are one block; others are cut where their mask changes, and between changes into equal
    parts of whole sub-tiles."""
    num_samples = len(runs.seqlens)
    starts = np.zeros(num_samples + 1, np.int64)
    most = 0
    for sample in range(num_samples):
        most += 2 + 2 * (runs.seqlens[sample] // _MIN_BLOCK)
    cuts = np.empty(most, np.int64)
    count = 0
    for sample in range(num_samples):
        seqlen = runs.seqlens[sample]
        cuts[count] = 0
        count += 1
        if seqlen > block_size:
            for change in _changes(runs, sample, block_size):
                first = cuts[count - 1]
                num_parts = -(-(change - first) // block_size)
                size = -(-(change - first) // (num_parts * SUB_TILE)) * SUB_TILE
                for cut in range(first + size, change, size):
                    cuts[count] = cut
                    count += 1
                cuts[count] = change
                count += 1
        else:
            cuts[count] = seqlen
            count += 1
        starts[sample + 1] = count
    return starts, cuts[:count].copy()


@compiled
def _changes(runs: RowRuns, sample: int, block_size: int) -> Ints:
    """Return the tokens at which a mask changes for rows or keys of a sample, and its end."""
    seqlen = runs.seqlens[sample]
    first, stop = runs.starts[sample], runs.starts[sample + 1]
    if (stop - first) * block_size > 8 * block_size + 2 * seqlen:  # changes everywhere
        return np.array([seqlen])
    points = np.empty(4 * (stop - first))
    count = 0
    for run in range(first, stop):
        for part in range(4):
            if part < 2 or runs.table[run, part + 2] == 0:
                points[count] = runs.table[run, part]
                count += 1
    kept = np.empty(count + 1, np.int64)
    num_kept, last = 0, 0
    for place in ascending(points[:count]):
        point = int(points[place])
        if point - last >= _MIN_BLOCK and seqlen - point >= _MIN_BLOCK:
            kept[num_kept] = point
            num_kept, last = num_kept + 1, point
    kept[num_kept] = seqlen
    return kept[: num_kept + 1]


@compiled
def count_tiles(runs: RowRuns, starts: Ints, cuts: Ints) -> Tiles:
    """Return the tiles between the blocks of each sample; `starts` and `cuts` as of `cut_samples`."""
    most, widest = 0, 0
    for sample in range(len(runs.seqlens)):
        num_blocks = starts[sample + 1] - starts[sample] - 1
        most += num_blocks * num_blocks
        widest = max(widest, num_blocks)
    rows, columns = np.empty(most, np.int64), np.empty(most, np.int64)
    all_pairs, all_touched = np.empty(most, np.int64), np.empty(most, np.int64)
    count = 0
    pairs, touched = np.empty(widest, np.int64), np.empty(widest, np.int64)
    keys = np.empty((2 * SUB_TILE + 2, 2), np.int64)
    for sample in range(len(runs.seqlens)):
        own = cuts[starts[sample] : starts[sample + 1]]
        table = runs.table[runs.starts[sample] : runs.starts[sample + 1]]
        first_block = starts[sample] - sample
        first_run = 0
        for row in range(len(own) - 1):
            while table[first_run, ROW_STOP] <= own[row] // SUB_TILE * SUB_TILE:
                first_run += 1
            _count_row(table[first_run:], own, row, keys, pairs, touched)
            for column in range(len(own) - 1):
                if pairs[column]:
                    rows[count], columns[count] = first_block + row, first_block + column
                    all_pairs[count], all_touched[count] = pairs[column], touched[column]
                    count += 1
    return Tiles(rows[:count].copy(), columns[:count].copy(), all_pairs[:count].copy(), all_touched[:count].copy())


@compiled
def _count_row(table: Ints, cuts: Ints, row: int, keys: Ints, pairs: Ints, touched: Ints) -> None:
    """Fill `pairs` and `touched` [column] for a row of blocks of one sample; `table` has its runs from the first on
    that may have rows there, `keys` is scratch."""
    pairs[:], touched[:] = 0, 0
    start, stop, seqlen = cuts[row], cuts[row + 1], cuts[-1]
    for run in range(len(table)):
        if table[run, FIRST_ROW] >= stop:
            break
        _add_pairs(table[run], start, stop, cuts, pairs)
    for sub_row in range(start // SUB_TILE, (stop - 1) // SUB_TILE + 1):
        low, high = sub_row * SUB_TILE, min((sub_row + 1) * SUB_TILE, seqlen)
        num_rows = min(high, stop) - max(low, start)
        for part in range(_touched_keys(table, low, high, seqlen, keys)):
            _add_keys(keys[part, 0], keys[part, 1], num_rows, cuts, touched)


@compiled
def seen_in_run(run: Ints, first_row: int, row_stop: int, low: int, high: int) -> tuple[int, int, int, int]:
    """Return which of the given rows of a run see any of the keys from `low` to before `high`, and which keys: (first
    row, row behind the last, first key, key behind the last). With no rows, the first is not below the second."""
    from_row, to_row = max(first_row, run[FIRST_ROW]), min(row_stop, run[ROW_STOP])
    begin, end = _keys_of(run, from_row)
    # From there on, rows whose keys end behind the first key and begin before the last.
    if run[BEGIN_STEP] == 1:
        to_row = min(to_row, from_row + high - begin)
    elif begin >= high:
        to_row = from_row
    if end <= low:
        from_row = from_row + low + 1 - end if run[END_STEP] == 1 else to_row
    begin, end = _keys_of(run, from_row)[0], _keys_of(run, to_row - 1)[1]
    return from_row, to_row, max(begin, low), min(end, high)


@compiled
def _add_pairs(run: Ints, first_row: int, row_stop: int, cuts: Ints, pairs: Ints) -> None:
    """Add to `pairs` [column] those of some rows of a run with the keys between two cuts."""
    low, high = max(run[FIRST_ROW], first_row), min(run[ROW_STOP], row_stop)
    if low >= high:
        return
    num_rows = high - low
    begin, end = _keys_of(run, low)
    last_end = _keys_of(run, high - 1)[1]
    column = first_not_below(cuts, 0, len(cuts), begin + 1) - 1
    while column < len(cuts) - 1 and cuts[column] < last_end:
        low, high = cuts[column], cuts[column + 1]
        pairs[column] += _sum_within(end, run[END_STEP], num_rows, low, high)
        pairs[column] -= _sum_within(begin, run[BEGIN_STEP], num_rows, low, high)
        column += 1


@compiled
def _sum_within(first: int, step: int, count: int, low: int, high: int) -> int:
    """Return the sum of `count` numbers from `first` on, each `step` (0 or 1) above the last, clipped to low..high."""
    if step == 0:
        return count * min(max(first, low), high)
    num_below = min(max(low - first, 0), count)
    num_above = min(max(first + count - 1 - high, 0), count)
    num_inside = count - num_below - num_above
    inside = num_inside * (first + num_below) + num_inside * (num_inside - 1) // 2
    return num_below * low + num_above * high + inside


@compiled
def _touched_keys(table: Ints, low: int, high: int, seqlen: int, keys: Ints) -> int:
    """Fill `keys` with the ranges of keys in sub-tiles touched by rows from `low` to before `high`; return how many
    there are."""
    count = 0
    for run in range(len(table)):
        if table[run, FIRST_ROW] >= high:
            break
        from_row, to_row = max(table[run, FIRST_ROW], low), min(table[run, ROW_STOP], high)
        if from_row >= to_row:
            continue
        begin, end = _keys_of(table[run], from_row)[0], _keys_of(table[run], to_row - 1)[1]
        begin, end = begin // SUB_TILE * SUB_TILE, min(-(-end // SUB_TILE) * SUB_TILE, seqlen)
        place = 0
        while place < count:  # swallow those that it meets
            if keys[place, 0] <= end and begin <= keys[place, 1]:
                begin, end = min(begin, keys[place, 0]), max(end, keys[place, 1])
                count -= 1
                keys[place] = keys[count]
                place = 0
            else:
                place += 1
        keys[count] = (begin, end)
        count += 1
    return count


@compiled
def _add_keys(begin: int, end: int, num_rows: int, cuts: Ints, touched: Ints) -> None:
    """Add to `touched` [column] the pairs of some rows with the keys of a range."""
    column = first_not_below(cuts, 0, len(cuts), begin + 1) - 1
    while column < len(cuts) - 1 and cuts[column] < end:
        touched[column] += num_rows * (min(end, cuts[column + 1]) - max(begin, cuts[column]))
        column += 1
