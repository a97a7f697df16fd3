"""Sorting and searching for compiled loops, compiled once: numpy's own are compiled anew for each kind of array."""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints


@compiled
def ascending(values: Floats) -> Ints:
    """Return the indexes of `values`, ascending by value, then by index."""
    return np.argsort(values, kind="mergesort")


@compiled
def sorted_by(keys: Ints, num_keys: int) -> tuple[Ints, Ints]:
    """Return ([place] -> index of `keys`, ascending by key, then by index; [key + 1] -> place of its first)."""
    starts = np.zeros(num_keys + 1, np.int64)
    for key in keys:
        starts[key + 1] += 1
    for key in range(num_keys):
        starts[key + 1] += starts[key]
    places = starts[:-1].copy()
    order = np.empty(len(keys), np.int64)
    for index in range(len(keys)):
        order[places[keys[index]]] = index
        places[keys[index]] += 1
    return order, starts


@compiled
def first_not_below(values: Ints, low: int, high: int, least: int) -> int:
    """Return the first place from `low` on of an ascending list whose value is at least `least`; `high` if none is."""
    while low < high:
        middle = (low + high) // 2
        if values[middle] < least:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def total_of(values: Ints) -> int:
    total = 0
    for value in values:
        total += value
    return total
