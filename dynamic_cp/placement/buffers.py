"""Where what a lane fetches lies in its buffer: a place is used again once what was there is no longer needed."""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Ints
from dynamic_cp.placement.order import sorted_by
from dynamic_cp.placement.transport import Fetches


@compiled
def places_in_buffers(fetches: Fetches, tokens: Ints, num_lanes: int) -> tuple[Ints, Ints]:
    """Return the first token of each fetch in the buffer of its lane and kind, and [lane, kind] tokens of the buffers.

    Args:
        fetches: of all lanes.
        tokens: of each home.
        num_lanes: of the bucket.
    """
    num_fetches = len(fetches.lane)
    begins, needed = np.empty(num_fetches, np.int64), np.empty(num_fetches, np.int64)
    most = 0
    for fetch in range(num_fetches):
        begins[fetch] = fetches.first[fetch] - (2 if fetches.crosses[fetch] else 1)
        needed[fetch] = tokens[fetches.home[fetch]]
        most = max(most, begins[fetch] + 3)
    by_begin, _ = sorted_by(begins + 2, most)
    by_buffer, starts = sorted_by((fetches.lane * 2 + fetches.kind)[by_begin], 2 * num_lanes)
    places, sizes = np.empty(num_fetches, np.int64), np.zeros((num_lanes, 2), np.int64)
    for buffer in range(2 * num_lanes):
        own = by_begin[by_buffer[starts[buffer] : starts[buffer + 1]]]
        if len(own):
            of_own, size = places_in_buffer(begins[own], fetches.last[own] + 2, needed[own])
            sizes[buffer // 2, buffer % 2] = size
            for number in range(len(own)):
                places[own[number]] = of_own[number]
    return places, sizes


@compiled
def places_in_buffer(begins: Ints, ends: Ints, tokens: Ints) -> tuple[Ints, int]:
    """Return the first token of each fetch in one buffer, and the tokens of the buffer.

    The smallest free place that is large enough is taken, of equal ones the first; what is too much of it stays free.

    Args:
        begins, ends: [fetch] first division in which its place is needed, ascending, and the first in which it no
            longer is.
        tokens: [fetch] how much it needs.
    """
    num_fetches = len(begins)
    places = np.zeros(num_fetches, np.int64)
    size = 0
    # [free] from which division, where, how much: each fetch leaves one behind, and a rest if its place was larger.
    since = np.zeros(2 * num_fetches, np.int64)
    where, much = np.zeros_like(since), np.zeros_like(since)
    num_free = 0
    for fetch in range(num_fetches):
        needed = tokens[fetch]
        taken = -1
        for free in range(num_free):
            is_fit = since[free] <= begins[fetch] and much[free] >= needed
            if is_fit and (taken < 0 or (much[free], where[free]) < (much[taken], where[taken])):
                taken = free
        if taken < 0:
            places[fetch] = size
            size += needed
            taken = num_free
            num_free += 1
        else:
            places[fetch] = where[taken]
            if much[taken] > needed:
                since[num_free] = since[taken]
                where[num_free] = where[taken] + needed
                much[num_free] = much[taken] - needed
                num_free += 1
        since[taken], where[taken], much[taken] = ends[fetch], places[fetch], needed
    return places, size
