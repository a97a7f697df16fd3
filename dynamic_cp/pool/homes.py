"""Which samples share a micro-batch, and which lane holds which of its tokens.

Long documents lie on as many lanes as their work asks for. Spreading a document over k lanes sends only keys and
values; shipping its queries to even out the same work sends queries, outputs and keys. Spreading costs fewer bytes
while k < (2 + r) / r, with r the bytes of keys and values over those of queries and outputs (9 lanes for Llama-3-8B, 3
with as many KV heads as heads), and no lane has to send the keys of a whole document to all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.loops import ascending
from dynamic_cp.packing.level import deal
from dynamic_cp.types import Sample
from dynamic_cp.types.placement import HOLDER, SAMPLE, START, STOP

TILE_TOKENS = 128
"""Queries are cut at multiples of this: attention kernels compute rows in blocks of 64 or 128."""


@compiled
def quota_homes(
    seqlens: Ints, num_lanes: int, capacity: int, tile: int, num_nano_batches: int, is_last_attempt: bool = False
) -> Ints:
    """Return homes, int64 [home, (document, start, stop, lane)], by document and start; none if tokens do not fit.

    A document with more attention than the mean of a lane is spread over as many lanes as it has means, those with room
    and the least work; a lane gets as many tokens of its head as of its tail. With two nano-batches
    (`homes_in_nano_batches`) that holds for each half of the document. Shorter documents stay whole if they fit.

    Args:
        seqlens: int64 [document], descending.
        capacity: tokens that a lane may hold.
        tile: cuts are at multiples of it; in the last attempt (`is_last_attempt`) at any token.
    """
    mean = 0.0
    for seqlen in seqlens:
        mean += float(seqlen) * seqlen / num_lanes
    work, room = np.zeros(num_lanes), np.full(num_lanes, capacity)
    homes = np.zeros((4 * (len(seqlens) + num_lanes * (num_lanes + 1)), 4), np.int64)
    count = 0
    for document in range(len(seqlens)):
        seqlen = seqlens[document]
        spread = min(num_lanes, max(1, ceil(float(seqlen) * seqlen / mean - 1e-9)))
        chosen, shares, grid = _choose_lanes(seqlen, spread, tile, num_nano_batches, work, room, is_last_attempt)
        if len(chosen) == 0:
            return homes[:0]
        if count + 4 * len(chosen) > len(homes):
            homes = np.concatenate((homes, np.zeros_like(homes)))
        middle = middle_of(seqlen, tile) if num_nano_batches == 2 and len(chosen) > 1 else 0
        if middle > 0:
            # In whole tiles, the first halves of shares hold at least `middle` tokens; otherwise exactly as many.
            firsts = shares // 2 if grid == tile else np.diff(np.append(0, np.cumsum(shares) * middle // seqlen))
            count = _spread(document, 0, middle, chosen, firsts, work, room, homes, count, grid)
            shares -= firsts
        count = _spread(document, middle, seqlen, chosen, shares, work, room, homes, count, grid)
    homes = homes[:count]
    place = (homes[:, SAMPLE] * 2.0**32 + homes[:, START]).astype(np.float64)
    return homes[ascending(place)]


@compiled
def middle_of(seqlen: int, tile: int) -> int:
    """Return where the second half of a document on several lanes begins."""
    return seqlen // (2 * tile) * tile


@compiled
def _choose_lanes(
    seqlen: int, spread: int, tile: int, num_nano_batches: int, work: Floats, room: Ints, is_last_attempt: bool
) -> tuple[Ints, Ints, int]:
    """Return (lanes, tokens for each, what cuts are multiples of) of a document; no lanes if it has no room."""
    num_lanes, unit = len(work), 2 * num_nano_batches * tile
    while spread <= num_lanes:
        share = seqlen if spread == 1 else -(-seqlen // (spread * unit)) * unit
        roomy = np.flatnonzero(room >= share)
        if len(roomy) >= spread:
            least: Floats = work[roomy]
            chosen = roomy[ascending(least)[:spread]]
            return chosen, np.full(spread, share), tile
        spread += max(1, spread // 4)
    # No equal shares fit: fill the lanes with most room.
    chosen = ascending(-room.astype(np.float64))
    shares = np.zeros(num_lanes, np.int64)
    for grid, multiple in ((tile, unit), (1, 1)):
        left = -(-seqlen // multiple) * multiple
        for place in range(num_lanes):
            shares[place] = min(left, room[chosen[place]] // multiple * multiple)
            left -= shares[place]
            if left == 0:
                return chosen[: place + 1], shares[: place + 1], grid
        if not is_last_attempt:
            break
    return chosen[:0], shares[:0], tile


@compiled
def _spread(
    document: int, start: int, stop: int, lanes: Ints, shares: Ints, work: Floats, room: Ints, homes: Ints, count: int,
    tile: int,
) -> int:  # fmt: skip
    """Write homes of [start, stop), half of each share from its head and half from its tail; return their number."""
    low, high, seqlen = start, -(-stop // tile) * tile, stop
    for place in range(len(lanes)):
        share = shares[place]
        if high - low <= share or place == len(lanes) - 1:
            count = _write(document, low, min(high, seqlen), lanes[place], work, room, homes, count)
            break
        half = share // (2 * tile) * tile
        count = _write(document, low, low + half, lanes[place], work, room, homes, count)
        rest = share - half
        count = _write(document, high - rest, min(high, seqlen), lanes[place], work, room, homes, count)
        low, high = low + half, high - rest
    return count


@compiled
def _write(document: int, start: int, stop: int, lane: int, work: Floats, room: Ints, homes: Ints, count: int) -> int:
    if stop <= start:
        return count
    homes[count] = document, start, stop, lane
    work[lane] += float(stop - start) * (stop + start)
    room[lane] -= stop - start
    return count + 1


def homes_in_nano_batches(homes: Ints, num_lanes: int, tile: int) -> Ints:
    """Return homes with their nano-batch, int64 [home, (document, start, stop, lane, nano-batch)], some cut in two at
    multiples of `tile`. The first nano-batch has the first tokens of every document, so that it needs no keys of the
    second, and half the tokens of every lane, as far as whole tiles and documents on several lanes allow."""
    documents, counts = np.unique(homes[:, SAMPLE], return_counts=True)
    ends = np.zeros(int(documents.max()) + 1, np.int64)
    np.maximum.at(ends, homes[:, SAMPLE], homes[:, STOP])
    is_spread = np.zeros(len(ends), bool)
    is_spread[documents[counts > 1]] = True
    cut = np.where(is_spread, ends // (2 * tile) * tile, 0)
    whole = ~is_spread[homes[:, SAMPLE]]
    tokens = homes[:, STOP] - homes[:, START]
    first = np.where(whole, 0, np.clip(cut[homes[:, SAMPLE]] - homes[:, START], 0, tokens))
    wanted = np.bincount(homes[:, HOLDER], tokens, num_lanes) / 2 - np.bincount(homes[:, HOLDER], first, num_lanes)
    for home in np.flatnonzero(whole).tolist():
        lane = homes[home, HOLDER]
        share = min(int(tokens[home]), max(0, round(wanted[lane] / tile) * tile))
        wanted[lane] -= share
        first[home] = share
    parts = []
    for nano_batch, (start, stop) in enumerate(
        ((homes[:, START], homes[:, START] + first), (homes[:, START] + first, homes[:, STOP]))
    ):
        own = np.full(len(homes), nano_batch)
        parts.append(np.stack([homes[:, SAMPLE], start, stop, homes[:, HOLDER], own], axis=1))
    rows = np.concatenate(parts)
    rows = rows[rows[:, STOP] > rows[:, START]]
    return rows[np.lexsort((rows[:, START], rows[:, SAMPLE]))]


_UNEVEN = (1.01, 1.03, 1.1, 1.3)
"""Limits of a row's tokens over the mean of rows, or a lane's over that of lanes; the first with room for all is
taken."""


def longest_first(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples by descending length, then by ascending sample_id: plans do not depend on their order."""
    return sorted(samples, key=lambda sample: (-sample.seqlen, sample.sample_id))


def even_rows(samples: Sequence[Sample], num_rows: int, most_tokens: int) -> list[list[Sample]] | None:
    """Return rows of samples (longest first) with equal numbers of tokens, at most `most_tokens`, as far as whole
    samples allow, and then even attention; None: no room. Rows with little attention come first and last, where fewer
    stages have a row."""
    if any(sample.seqlen > most_tokens for sample in samples):
        return None
    items = [(sample.seqlen, float(sample.seqlen) * sample.seqlen) for sample in samples]
    mean = sum(tokens for tokens, _ in items) / num_rows
    for limit in (*(min(uneven * mean, most_tokens) for uneven in _UNEVEN), most_tokens):
        dealt = deal(items, num_rows, limit)
        if dealt is not None and all(dealt[0]):
            rows, work = dealt
            order = np.argsort(-work, kind="stable").tolist()
            middle_last = (*order[::-2], *order[len(order) % 2 :: 2])
            return [[samples[place] for place in rows[row]] for row in middle_last]
    return None


def even_homes(
    row: Sequence[Sample], num_lanes: int, most_tokens: int, tile: int, num_nano_batches: int
) -> Ints | None:
    """Return the homes of a row (longest sample first), lanes as even in tokens as whole tiles and documents allow,
    with at most `most_tokens`; None: no room. `tile` and `num_nano_batches` as in `quota_homes`."""
    seqlens = np.array([sample.seqlen for sample in row], np.int64)
    mean = -(-int(seqlens.sum()) // num_lanes)
    for uneven in (*_UNEVEN, 2.0):
        capacity = min(int(uneven * mean) + 2 * num_nano_batches * tile, most_tokens)
        homes = quota_homes(seqlens, num_lanes, capacity, tile, num_nano_batches)
        if len(homes):
            return homes
    homes = quota_homes(seqlens, num_lanes, most_tokens, tile, num_nano_batches, is_last_attempt=True)
    return homes if len(homes) else None
