"""What each lane of a placement has to do, as plain data that travels to it and that its executor runs.

A lane numbers the homes that it holds, then the rows and columns that it fetches. These have places in a buffer, which
are reused once they are no longer needed. All lanes run operations in the same order, so that no two wait for each
other: every transfer belongs to a round.

    division t:  wait for ACROSS t + 1, begin INSIDE t + 1 and ACROSS t + 2, wait for INSIDE t, attend,
                 wait for COLLECT t - 1, begin DELIVER t - 1, wait for DELIVER t - 2, begin COLLECT t
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Ints
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.loops import sorted_by
from dynamic_cp.placement.cuts import placement_under
from dynamic_cp.placement.transport import ACROSS, COLLECT, DELIVER, INSIDE, Fetches, fetches_of
from dynamic_cp.types import CAUSAL, Lambda, Mask, Placement, Sample
from dynamic_cp.types.placement import COLUMN, ROW, Lanes


@compiled
def places_in_buffers(fetches: Fetches, tokens: Ints, num_lanes: int) -> tuple[Ints, Ints]:
    """Return the first token of each fetch in its buffer, and [lane, kind] tokens of the buffers; `tokens` are those of
    homes."""
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
    """Return the first token of each fetch in one buffer, and the tokens of the buffer. Each takes the smallest free
    place that is large enough, the first of equal ones. `begins` (ascending), `ends`: [fetch] the first division that
    needs its place, and the first that no longer does; `tokens`: [fetch] how much it needs."""
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


class Held(NamedTuple):
    """Tokens that a lane works with.

    Attributes:
        sample: its number among those of the lane (`Placement.samples_of`), -1 if the lane only hands it on to others.
        kind: ROW or COLUMN if fetched; -1: the lane's own, for both.
        place: first token in the buffer of the kind; for its own, among the lane's tokens.
    """

    sample: int
    start: int
    stop: int
    kind: int
    place: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class Exchange(NamedTuple):
    """One round of one lane; division and round as in `transport`. `sends` and `receives` have (lane, entries) for each
    other lane, ascending; an entry is (number in `held`, kind), in the same order on both sides. What is given back is
    added there."""

    division: int
    round: int
    sends: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    receives: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


class Programme(NamedTuple):
    """What one lane of a placement does.

    Attributes:
        held: its own homes, then what it fetches.
        tiles: [division] -> (number of the rows, number of the columns) in `held`, ascending.
        buffer_tokens: of the buffers of fetched (rows, columns).
        mask: text of the mask of the layers that it is for; "": causal or full.
        narrower: what the lane does in layers with a window, if this is for those without.
    """

    held: tuple[Held, ...]
    tiles: tuple[tuple[tuple[int, int], ...], ...]
    exchanges: tuple[Exchange, ...]
    buffer_tokens: tuple[int, int]
    mask: str = ""
    narrower: Programme | None = None

    def of_layers(self, mask: Mask) -> Programme:
        """Return what the lane does in layers with `mask`; UnsupportedFeatureError if planned for other masks."""
        wanted = _name_of(mask)
        if self.mask == wanted:
            return self
        if self.narrower is not None and self.narrower.mask == wanted:
            return self.narrower
        planned = ", ".join(one.mask or "causal or full" for one in (self, self.narrower) if one is not None)
        raise UnsupportedFeatureError(
            f"attention is placed for layers with the masks {planned}, this layer has {mask}: plan with the windows of "
            "this model (--window-size)",
            mask=str(mask),
        )

    @property
    def own(self) -> tuple[Held, ...]:
        """The homes of the lane, in the order of its tokens."""
        return tuple(one for one in self.held if one.kind < 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of the lane, without padding."""
        return sum(one.num_tokens for one in self.own)

    def as_json(self) -> list[Any]:
        """Return it as JSON's types, which `Programme.read` takes."""
        exchanges = [
            [one.division, one.round, *([[lane, [*map(list, entries)]] for lane, entries in side] for side in one[2:])]
            for one in self.exchanges
        ]
        tiles = [[list(tile) for tile in division] for division in self.tiles]
        data = [[list(one) for one in self.held], tiles, exchanges, list(self.buffer_tokens)]
        if self.mask or self.narrower is not None:
            data += [self.mask, self.narrower and self.narrower.as_json()]
        return data

    @classmethod
    def read(cls, data: Any) -> Programme:
        """Return what `as_json` wrote."""
        held, tiles, exchanges, buffer_tokens, *of_windows = data
        mask, narrower = of_windows or ("", None)
        return cls(
            held=tuple(Held(*one) for one in held),
            tiles=tuple(tuple((row, column) for row, column in division) for division in tiles),
            exchanges=tuple(
                Exchange(division, when, _entries(sends), _entries(receives))
                for division, when, sends, receives in exchanges
            ),
            buffer_tokens=(buffer_tokens[0], buffer_tokens[1]),
            mask=mask,
            narrower=None if narrower is None else cls.read(narrower),
        )


def _entries(sides: Any) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    return tuple((lane, tuple((number, kind) for number, kind in entries)) for lane, entries in sides)


def _name_of(mask: Mask) -> str:
    return str(mask) if isinstance(mask, Lambda) else ""


def programmes_of(
    placement: Placement, samples: Sequence[Sample], lanes: Lanes, order: Ints | None = None
) -> list[Programme]:
    """Return what each lane does, in layers of all masks; `samples` are the bucket's, `order` as of `fetches_of`."""
    samples_of = [placement.samples_of(lane) for lane in range(lanes.number)]
    named = []
    for mask in placement.layer_masks or (CAUSAL,):
        own = placement_under(placement, samples, mask, lanes)
        programmes = _programmes(own, samples_of, fetches_of(own, lanes, order))
        named.append([one._replace(mask=_name_of(mask)) for one in programmes])
    if len(named) == 1:
        return named[0]
    return [one._replace(narrower=narrower) for one, narrower in zip(*named, strict=True)]


def _programmes(placement: Placement, samples_of: Sequence[Sequence[int]], fetches: Fetches) -> list[Programme]:
    """Return what each lane does in layers of one mask; `samples_of`: [lane] -> the samples that it knows."""
    num_lanes = len(samples_of)
    homes = placement.homes.tolist()
    num_divisions = placement.num_divisions
    own: list[list[int]] = [[] for _ in range(num_lanes)]
    for number, home in enumerate(homes):
        own[home[3]].append(number)
    of_lane = _by_lane(fetches, num_lanes)
    places, buffers = _places(fetches, placement, num_lanes)
    held: list[list[Held]] = []
    number_of: list[dict[tuple[int, int], int]] = []
    for lane in range(num_lanes):
        entries: list[Held] = []
        numbers: dict[tuple[int, int], int] = {}
        place = 0
        sample_numbers = {sample: number for number, sample in enumerate(samples_of[lane])}
        for home in own[lane]:
            sample, start, stop, _ = homes[home]
            numbers[home, ROW] = numbers[home, COLUMN] = len(entries)
            entries.append(Held(sample_numbers[sample], start, stop, -1, place))
            place += stop - start
        for fetch in of_lane[lane].tolist():
            home, kind = int(fetches.home[fetch]), int(fetches.kind[fetch])
            numbers[home, kind] = len(entries)
            sample, start, stop, _ = homes[home]
            entries.append(Held(sample_numbers.get(sample, -1), start, stop, kind, int(places[fetch])))
        held.append(entries)
        number_of.append(numbers)
    exchanges = _exchanges(fetches, number_of, num_lanes)
    tiles: list[list[list[tuple[int, int]]]] = [[[] for _ in range(num_divisions)] for _ in range(num_lanes)]
    in_order = np.lexsort((placement.tiles[:, COLUMN], placement.tiles[:, ROW]))
    for row, column, lane, division in placement.tiles[in_order].tolist():
        numbers = number_of[lane]
        tiles[lane][division].append((numbers[row, ROW], numbers[column, COLUMN]))
    return [
        Programme(
            held=tuple(held[lane]),
            tiles=tuple(map(tuple, tiles[lane])),
            exchanges=tuple(exchanges[lane]),
            buffer_tokens=(int(buffers[lane, ROW]), int(buffers[lane, COLUMN])),
        )
        for lane in range(num_lanes)
    ]


def buffer_tokens_of(placement: Placement, samples: Sequence[Sample], lanes: Lanes) -> list[tuple[int, int]]:
    """Return the largest `Programme.buffer_tokens` of each lane."""
    of_masks = []
    for mask in placement.layer_masks or (CAUSAL,):
        own = placement_under(placement, samples, mask, lanes)
        of_masks.append(_places(fetches_of(own, lanes), own, lanes.number)[1])
    largest = np.max(of_masks, axis=0).tolist()
    return [(rows, columns) for rows, columns in largest]


def _by_lane(fetches: Fetches, num_lanes: int) -> list[Ints]:
    return np.split(np.arange(len(fetches.lane)), np.searchsorted(fetches.lane, np.arange(1, num_lanes)))


def _exchanges(
    fetches: Fetches, number_of: Sequence[dict[tuple[int, int], int]], num_lanes: int
) -> list[list[Exchange]]:
    """Return the rounds of each lane; rounds in which a lane has no part are left out."""
    sends: dict[tuple[int, int, int], dict[int, list[tuple[int, int]]]] = {}
    receives: dict[tuple[int, int, int], dict[int, list[tuple[int, int]]]] = {}

    def add(division: int, when: int, sender: int, receiver: int, home: int, kind: int) -> None:
        for book, lane, peer in ((sends, sender, receiver), (receives, receiver, sender)):
            of_peer = book.setdefault((lane, division, when), {}).setdefault(peer, [])
            of_peer.append((number_of[lane][home, kind], kind))

    for user, kind, home, source, crosses, first, last in zip(*(column.tolist() for column in fetches), strict=True):
        add(first, ACROSS if crosses else INSIDE, source, user, home, kind)
        add(last, DELIVER if crosses else COLLECT, user, source, home, kind)
    rounds: list[list[Exchange]] = [[] for _ in range(num_lanes)]
    for lane, division, when in sorted({*sends, *receives}):
        sides = (book.get((lane, division, when), {}) for book in (sends, receives))
        sent, received = (tuple((peer, tuple(of_peer[peer])) for peer in sorted(of_peer)) for of_peer in sides)
        rounds[lane].append(Exchange(division, when, sent, received))
    return rounds


def _places(fetches: Fetches, placement: Placement, num_lanes: int) -> tuple[Ints, Ints]:
    """Return where each fetch lies in the buffer of its kind, and [lane, kind] tokens of the buffers. A place is taken
    from the round that fills it until what is given back has been sent, before the division after the next."""
    tokens = placement.tokens_of_homes
    return places_in_buffers(fetches, tokens, num_lanes)
