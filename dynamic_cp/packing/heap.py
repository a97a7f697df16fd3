"""A binary heap of items by their keys, least key first, ties by item: for compiled loops that change keys in place."""

from __future__ import annotations

from dynamic_cp._jit import compiled
from dynamic_cp.prices import Floats, Ints


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
