"""What compiled loops share: a binary heap whose keys change in place (least key first, ties by item), random numbers
that are the same in every process, with and without numba, and sorting and searching, compiled once: numpy's own are
compiled anew for each kind of array."""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints


@compiled
def sift_up(keys: Floats, items: Ints, at: int) -> None:
    """Restore the heap `items` after position `at` got a smaller key."""
    while at > 0:
        parent = (at - 1) >> 1
        item, other = items[at], items[parent]
        if not (keys[item] < keys[other] or (keys[item] == keys[other] and item < other)):
            return
        items[at], items[parent] = other, item
        at = parent


@compiled
def sift_down(keys: Floats, items: Ints, num_items: int) -> None:
    """Restore the heap `items[:num_items]` after its first item changed or got a larger key."""
    at = 0
    while 2 * at + 1 < num_items:
        child = 2 * at + 1
        if child + 1 < num_items:
            left, right = items[child], items[child + 1]
            if keys[right] < keys[left] or (keys[right] == keys[left] and right < left):
                child += 1
        item, other = items[child], items[at]
        if not (keys[item] < keys[other] or (keys[item] == keys[other] and item < other)):
            return
        items[at], items[child] = item, other
        at = child


@compiled
def push(keys: Floats, items: Ints, num_items: int, item: int) -> None:
    """Add `item` to the heap `items[:num_items]`."""
    items[num_items] = item
    sift_up(keys, items, num_items)


@compiled
def pop(keys: Floats, items: Ints, num_items: int) -> int:
    """Remove and return the first item of the heap `items[:num_items]`."""
    item = items[0]
    items[0] = items[num_items - 1]
    sift_down(keys, items, num_items - 1)
    return item  # type: ignore[no-any-return]


@compiled
def find_room(
    keys: Floats, items: Ints, num_items: int, minus_room: Floats, parked: Ints, num_parked: int, needed: float
) -> tuple[int, int]:
    """Make the first of `items[:num_items]` one that has room; return (number of items, number of parked ones). Items
    without room for `needed` are parked, ordered by room, until a call needs less. No item left: none has room."""
    while num_parked and -minus_room[parked[0]] >= needed:
        push(keys, items, num_items, pop(minus_room, parked, num_parked))
        num_items, num_parked = num_items + 1, num_parked - 1
    while num_items and -minus_room[items[0]] < needed:
        push(minus_room, parked, num_parked, pop(keys, items, num_items))
        num_items, num_parked = num_items - 1, num_parked + 1
    return num_items, num_parked


@compiled
def next_state(state: int) -> int:
    """Return the next state of a 64-bit xorshift generator. Source: Marsaglia 2003, "Xorshift RNGs"."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    return state


@compiled
def share(state: int) -> float:
    """Return a number in [0, 1)."""
    return float(state >> np.uint64(11)) / 9007199254740992.0


@compiled
def draw(state: int, bound: int) -> int:
    """Return an integer in 0 .. bound - 1."""
    return int(share(state) * bound)


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
