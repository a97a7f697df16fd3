"""Stretches of linear attention: tokens of a lane that a state passes in one go, and how many states lanes keep. A
stretch ends where the next token of its sample is on another lane or not adjacent, and where branches of a sample part:
each branch begins with the state behind the same prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from dynamic_cp.arrays import Bools, Ints
from dynamic_cp.plans.padding import padded_of, placed_tokens
from dynamic_cp.types import Bucket, Sample
from dynamic_cp.types.branches import Branches
from dynamic_cp.types.linear_attention import CHUNKS_PER_LANE
from dynamic_cp.types.masks import Mask
from dynamic_cp.types.placement import HOLDER, SAMPLE, START, STOP

STATES_OF_A_SCAN = 0.5
"""Memory of a stretch of a branch that a lane scans alone, over that of one whose states are passed on: the lane keeps
the state before it, and no summary, which is at least as large."""


def cuts_by_branches(sample: Sample) -> int:
    """Return how many more stretches a sample has than chunks: each segment after the first cuts one in two."""
    return len(sample.mask.shape()[0]) - 1 if isinstance(sample.mask, Branches) else 0


def stretches_of_branches(samples: Iterable[Sample]) -> int:
    """Return the stretches of the samples with branches, if one lane has all of a sample."""
    return sum(1 + more for more in map(cuts_by_branches, samples) if more)


def states_of_sample(sample: Sample, cp_size: int = 1) -> float:
    """Return how many plain samples a sample counts as where its states are passed on. The stretches of its branches
    are spread over `cp_size` lanes; with the default they may all lie on one."""
    return 1 + cuts_by_branches(sample) / (CHUNKS_PER_LANE * cp_size)


def samples_passed_on(bucket: Bucket) -> float:
    """Return how many plain samples those of a bucket count as; 0 if the bucket passes on no states."""
    return sum(states_of_sample(one, bucket.cp_size) for one in bucket.samples) if bucket.exchanges_states else 0.0


def room_for_states(max_tokens_per_rank: int) -> int:
    """Return the number of stretches whose states have room beside so many tokens, where attention may be placed. A
    lane holds at least one stretch of a sample that fills all lanes, so these may not count as tokens."""
    return 4 + max_tokens_per_rank // 1024


class Before(NamedTuple):
    """Tokens right before stretches, int64 [token]: those of a stretch together, the farthest first.

    Attributes:
        stretch: that they are before.
        source: stretch that has the token.
        row: which of the rows of that stretch's lane it is.
    """

    stretch: Ints
    source: Ints
    row: Ints


class Stretches(NamedTuple):
    """The stretches of all lanes of a bucket, int64 [stretch] each, in the order of samples and tokens, so that a
    stretch comes behind the one that it continues. All lanes know them; every row of a lane is in one, padding too.

    Attributes:
        lane, row, length: the lane that holds it, its first row there, and its rows, at least 1.
        previous: the stretch that it continues; -1: it begins with a state of zeros.
    """

    lane: Ints
    row: Ints
    length: Ints
    previous: Ints

    @classmethod
    def of_bucket(cls, bucket: Bucket, rank_token_multiple: int = 1) -> Stretches:
        """Return those of a bucket; `rank_token_multiple`: what the tokens of a lane are padded to."""
        if bucket.placement is not None:
            return cls.of_placement(bucket, rank_token_multiple)
        masks = [sample.mask for sample in bucket.samples]
        return cls.of_chunks(padded_of(bucket, rank_token_multiple), bucket.cp_size, masks)

    @classmethod
    def of_chunks(
        cls, padded_seqlens: Sequence[int], cp_size: int, masks: Sequence[Mask | None] | None = None
    ) -> Stretches:
        """Return those of samples that lie zigzag on the lanes: lane r has chunks r and 2 * cp_size - 1 - r of each.

        Args:
            padded_seqlens: of the samples; padding goes on behind a sample, and cannot reach its tokens.
            masks: of the samples, None where a sample has no branches. None: no sample has.
        """
        num_chunks = CHUNKS_PER_LANE * cp_size if cp_size > 1 else 1
        size = np.asarray(padded_seqlens, np.int64)[:, None] // num_chunks
        chunk = np.arange(num_chunks)
        start = chunk * size
        is_second = chunk >= cp_size
        first_row = np.cumsum(size * num_chunks // cp_size)[:, None] - size * num_chunks // cp_size
        columns = (
            np.broadcast_to(np.arange(len(size))[:, None], start.shape),
            start,
            start + size,
            np.broadcast_to(np.where(is_second, num_chunks - 1 - chunk, chunk), start.shape),
            first_row + is_second * size,
        )
        pieces = np.stack([column.ravel() for column in columns], axis=1)
        return cls._of_pieces(pieces, dict(enumerate(masks or ())))

    @classmethod
    def of_placement(cls, bucket: Bucket, rank_token_multiple: int = 1) -> Stretches:
        """Return those of a placed bucket; lanes of an inner group hold equal parts of its tokens, one after the other.
        `rank_token_multiple`: what the tokens of a lane are padded to (`Topology.rank_token_multiple`)."""
        assert bucket.placement is not None
        homes, inner = bucket.placement.homes.astype(np.int64), bucket.inner_cp_size
        on_lane = np.array(placed_tokens(bucket, rank_token_multiple))
        place = np.zeros(len(homes), np.int64)
        for group in range(bucket.num_inner_groups):
            of_group = np.flatnonzero(homes[:, HOLDER] == group)
            tokens = homes[of_group, STOP] - homes[of_group, START]
            place[of_group] = np.cumsum(tokens) - tokens
        pieces = []
        for (sample, start, stop, group), first in zip(homes.tolist(), place.tolist(), strict=True):
            share = int(on_lane[group * inner])
            at = start
            while at < stop:
                member, row = divmod(first + at - start, share)
                end = min(stop, at + share - row)
                pieces.append((sample, at, end, group * inner + member, row))
                at = end
        masks = {number: sample.mask for number, sample in enumerate(bucket.samples)}
        found = cls._of_pieces(np.array(pieces, np.int64).reshape(-1, 5), masks)._merged()
        return found._with_padding(on_lane)

    @classmethod
    def _of_pieces(cls, pieces: Ints, masks: dict[int, Mask | None]) -> Stretches:
        """Return stretches of pieces, int64 [piece, (sample, first token, one after the last, lane, row)], by tokens;
        `masks`: sample -> its mask."""
        previous = np.where(pieces[:, START] > 0, np.arange(len(pieces)) - 1, -1)
        for sample in np.unique(pieces[:, SAMPLE]).tolist() if masks else ():
            mask = masks.get(sample)
            if isinstance(mask, Branches) and len(mask.shape()[0]) > 1:
                pieces, previous = _branched(pieces, previous, sample, mask)
        _, start, stop, lane, row = pieces.T
        return cls(lane, row, stop - start, previous)

    @property
    def num_lanes(self) -> int:
        """Lanes of the bucket, each of which has at least one row; after `known_to` only up to the last known lane."""
        return int(self.lane.max()) + 1

    @property
    def is_linked(self) -> Bools:
        """[stretch] whether it continues another one, or is continued: its lanes pass on states. If any stretch is, the
        shortest one of every other lane counts, too, so that all lanes do the same."""
        linked = self.previous >= 0
        linked[self.previous[linked]] = True
        if linked.any():
            by_length = np.lexsort((self.length, self.lane))
            lanes, first = np.unique(self.lane[by_length], return_index=True)
            shortest = by_length[first]
            linked[shortest[np.isin(lanes, self.lane[linked], invert=True)]] = True
        return linked

    def of_lane(self, lane: int) -> Ints:
        """Return the stretches of a lane, in the order of its rows."""
        own = np.flatnonzero(self.lane == lane)
        return own[np.argsort(self.row[own])]

    def before(self, num_tokens: int) -> Before:
        """Return the `num_tokens` tokens before each stretch, fewer if its sample begins there."""
        stretch, back = (part.ravel() for part in np.indices((len(self.lane), num_tokens)))
        back = num_tokens - back
        source = self.previous[stretch]
        while (short := (source >= 0) & (back > self.length[source])).any():
            back = np.where(short, back - self.length[source], back)
            source = np.where(short, self.previous[source], source)
        there = source >= 0
        stretch, back, source = stretch[there], back[there], source[there]
        return Before(stretch, source, self.row[source] + self.length[source] - back)

    def rows_in_order(self) -> Ints:
        """Return the rows of all lanes, counted lane after lane, in the order of stretches."""
        on_lane = np.bincount(self.lane, self.length).astype(np.int64)
        first = (np.cumsum(on_lane) - on_lane)[self.lane] + self.row
        in_order = np.cumsum(self.length) - self.length
        return np.repeat(first - in_order, self.length) + np.arange(self.length.sum())

    def on_one_lane(self) -> Stretches:
        """Return the stretches that are left if one lane has the rows of all, in the order of stretches."""
        row = np.cumsum(self.length) - self.length
        return self._replace(lane=np.zeros_like(self.lane), row=row)._merged()

    def known_to(self, lane: int) -> Stretches:
        """Return what a lane has to know: all linked stretches, in whose states it has a share, and its others."""
        kept = np.flatnonzero(self.is_linked | (self.lane == lane))
        number = np.full(len(self.lane) + 1, -1)
        number[kept] = np.arange(len(kept))
        known = Stretches(*(column[kept] for column in self))
        return known._replace(previous=number[known.previous])

    def _merged(self) -> Stretches:
        """Join stretches that follow each other on a lane, unless a branch begins between them."""
        before = np.arange(len(self.lane)) - 1
        num_following = np.bincount(self.previous[self.previous >= 0], minlength=len(self.lane))
        goes_on = (self.previous == before) & (before >= 0) & (num_following[before] == 1)
        goes_on &= (self.lane == self.lane[before]) & (self.row == self.row[before] + self.length[before])
        first = np.flatnonzero(~goes_on)
        number = np.cumsum(~goes_on) - 1
        previous = self.previous[first]
        return Stretches(
            self.lane[first],
            self.row[first],
            np.add.reduceat(self.length, first),
            np.where(previous >= 0, number[previous], -1),
        )

    def _with_padding(self, on_lane: Ints) -> Stretches:
        """Add a stretch of padding at the end of lanes that hold fewer tokens than these."""
        held = np.bincount(self.lane, self.length, len(on_lane)).astype(np.int64)
        padded = np.flatnonzero(held < on_lane)
        more = padded, held[padded], (on_lane - held)[padded], np.full(len(padded), -1)
        return Stretches(*(np.concatenate(both) for both in zip(self, more, strict=True)))

    @property
    def num_linked(self) -> Ints:
        """[lane] stretches whose states are passed on."""
        return np.bincount(self.lane, self.is_linked, self.num_lanes).astype(np.int64)

    @property
    def depth(self) -> Ints:
        """[stretch] number of stretches on the way to it."""
        depth = np.zeros(len(self.lane), np.int64)
        for stretch in np.flatnonzero(self.previous >= 0).tolist():
            depth[stretch] = depth[self.previous[stretch]] + 1
        return depth

    def as_json(self) -> list[list[int]]:
        """Return them as JSON's types, which `Stretches.read` takes."""
        return [column.tolist() for column in self]

    @classmethod
    def read(cls, data: Any) -> Stretches:
        """Return what `as_json` wrote."""
        return cls(*(np.array(column, np.int64) for column in data))


def states_kept(bucket: Bucket, rank_token_multiple: int = 1) -> Sequence[int]:
    """Return, for each lane of a bucket, the number of states it keeps, in stretches whose states are passed on. If
    none are, lanes keep those of branches; if lanes exchange heads, those of their share of the heads."""
    if not bucket.exchanges_states:
        of_branches = ceil(STATES_OF_A_SCAN * stretches_of_branches(bucket.samples) / bucket.cp_size)
        return [of_branches] * bucket.cp_size
    if bucket.placement is None and not stretches_of_branches(bucket.samples):
        return [CHUNKS_PER_LANE * len(bucket.samples)] * bucket.cp_size
    numbers: list[int] = Stretches.of_bucket(bucket, rank_token_multiple).num_linked.tolist()
    return numbers


def _branched(pieces: Ints, previous: Ints, sample: int, mask: Branches) -> tuple[Ints, Ints]:
    """Return pieces and what each continues, after those of a sample are cut where its branches begin and end."""
    segments = mask.segments()
    stops = np.array([segment.stop for segment in segments])
    first, end = np.searchsorted(pieces[:, SAMPLE], (sample, sample + 1)).tolist()
    cut = []
    for _, start, stop, lane, row in pieces[first:end].tolist():
        bounds = [start, *stops[(stops > start) & (stops < stop)].tolist(), stop]
        cut += [(sample, a, b, lane, row + a - start) for a, b in pairwise(bounds)]
    own = np.array(cut, np.int64)
    before = np.where(own[:, START] > 0, first + np.arange(len(own)) - 1, -1)
    for segment in segments:
        begin = np.searchsorted(own[:, START], segment.start)
        behind = np.searchsorted(own[:, STOP], segments[segment.parent].stop) if segment.parent >= 0 else -1
        before[begin] = first + behind if behind >= 0 else -1
    before[own[:, START] >= stops[-1]] = -1  # padding
    more = len(own) - (end - first)
    later = np.where(previous[end:] >= end, previous[end:] + more, previous[end:])
    return np.concatenate([pieces[:first], own, pieces[end:]]), np.concatenate([previous[:first], before, later])
