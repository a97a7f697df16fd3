"""The packs that one lane of a placement computes in each division, and the tokens that travel in each round.

A lane works with its own tokens and, behind them, those that it fetches: as rows, and as columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynamic_cp.placement.programme import Held, Programme
from dynamic_cp.placement.transport import INSIDE
from dynamic_cp.plans.stretches import Stretches
from dynamic_cp.types import CAUSAL, FULL, Mask, Sample
from dynamic_cp.types.placement import COLUMN, ROW
from megatron.dynamic_cp.attention.packs import Pack, pairs_of_ranges, to_device


class Message(NamedTuple):
    """Tokens exchanged with another `lane` of the bucket in one round: int64 indices of the rows and columns that this
    lane works with, in the same order on both sides."""

    lane: int
    rows: Tensor
    columns: Tensor


class Round(NamedTuple):
    """What this lane sends and receives in one round."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Home(NamedTuple):
    """Neighbouring tokens of a sample that a lane holds; `sample` indexes `PlacedLane.samples`."""

    sample: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedLane:
    """A lane's part of a placed bucket.

    The lanes of an inner group share one programme and hold its tokens, padded at the end, in equal runs.

    Attributes:
        programme: of this lane or its inner group; for the layers without a window, if there are some.
        samples: of the bucket.
        num_tokens: that it holds, with padding.
        inner_cp_size, inner_rank: lanes of the inner group, and this lane's rank among them.
        first_in_group: rank of the bucket's first lane in the process group of the micro-batch.
        state_runs: of all lanes, where layers with linear attention pass on states; else None.
    """

    programme: Programme
    samples: tuple[Sample, ...]
    num_tokens: int
    inner_cp_size: int = 1
    inner_rank: int = 0
    first_in_group: int = 0
    state_runs: Stretches | None = None

    @property
    def homes(self) -> list[Home]:
        """What this lane holds of each sample, in the order of its tokens."""
        first = self.inner_rank * self.num_tokens
        parts = (
            Home(
                one.sample,
                one.start + max(0, first - one.place),
                min(one.stop, one.start + first + self.num_tokens - one.place),
            )
            for one in self.programme.own
        )
        return [part for part in parts if part.start < part.stop]

    def shards(self) -> list[NDArray[np.int64]]:
        """Return the tokens that this lane holds of each sample (of most none), and last its padding."""
        held = [[np.zeros(0, np.int64)] for _ in self.samples]
        num_held = 0
        for home in self.homes:
            held[home.sample].append(np.arange(home.start, home.stop, dtype=np.int64))
            num_held += home.stop - home.start
        return [*map(np.concatenate, held), np.arange(self.num_tokens - num_held, dtype=np.int64)]

    def packs(self, device: torch.device, mask: Mask = CAUSAL) -> PlacedPacks:
        """Return the programme for layers with `mask`, with its tensors on `device`; samples may bring other masks.
        Raises UnsupportedFeatureError: the plan was made for layers with other windows."""
        masks = [sample.mask_in(mask) for sample in self.samples]
        seqlens = [sample.seqlen for sample in self.samples]
        programme = self.programme.of_layers(mask)
        return build_placed_packs(programme, masks, seqlens, self.inner_cp_size * self.num_tokens, device)

    def member_of(self, lane: int) -> int:
        """Return the group rank with which this lane exchanges for `lane` of the placement."""
        return self.first_in_group + lane * self.inner_cp_size + self.inner_rank


class PlacedPacks(NamedTuple):
    """A lane's programme with its tensors on the device: the lane's tokens with padding, and room behind them for
    fetched rows and columns.

    Attributes:
        divisions: packs of each.
        rounds: (division, round) -> messages, where there are some.
        relays: whether the lane hands what it fetches on to its neighbours, and returns what they give back.
    """

    num_tokens: int
    row_room: int
    column_room: int
    divisions: tuple[tuple[Pack, ...], ...]
    rounds: dict[tuple[int, int], Round]
    relays: bool = False


def build_placed_packs(
    programme: Programme, masks: Sequence[Mask], seqlens: Sequence[int], num_tokens: int, device: torch.device
) -> PlacedPacks:
    """Return a lane's programme with its tensors on `device`; masks and lengths are of the bucket's samples.
    `num_tokens` counts the lane's tokens with padding."""
    held = programme.held
    starts = np.array([one.place + (num_tokens if one.kind >= 0 else 0) for one in held], np.int64)
    lengths = np.array([one.num_tokens for one in held], np.int64)

    def tokens_of(numbers: Iterable[int]) -> NDArray[np.int64]:
        parts = [np.arange(starts[number], starts[number] + lengths[number]) for number in numbers]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def messages(side: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> tuple[Message, ...]:
        found = []
        for lane, entries in side:
            by_kind = ([number for number, kind in entries if kind == wanted] for wanted in (ROW, COLUMN))
            found.append(Message(lane, *(to_device(tokens_of(numbers), device) for numbers in by_kind)))
        return tuple(found)

    return PlacedPacks(
        num_tokens=num_tokens,
        row_room=programme.buffer_tokens[ROW],
        column_room=programme.buffer_tokens[COLUMN],
        divisions=tuple(
            tuple(_packs_of_division(tiles, held, masks, seqlens, tokens_of, device)) for tiles in programme.tiles
        ),
        rounds={
            (one.division, one.round): Round(messages(one.sends), messages(one.receives)) for one in programme.exchanges
        },
        relays=any(
            held[number].kind >= 0
            for one in programme.exchanges
            if one.round == INSIDE
            for _, entries in one.sends
            for number, _ in entries
        ),
    )


def _packs_of_division(
    tiles: Sequence[tuple[int, int]],
    held: Sequence[Held],
    masks: Sequence[Mask],
    seqlens: Sequence[int],
    tokens_of: Callable[[Iterable[int]], NDArray[np.int64]],
    device: torch.device,
) -> Iterator[Pack]:
    """Yield a pack of the causal squares, one of full rectangles, and ranged packs. Rows with the same keys form one
    rectangle, whichever homes they are from: few large rectangles, however finely homes are cut."""
    squares: list[tuple[int, int]] = []
    full: dict[int, list[int]] = {}
    ranged: dict[int, list[int]] = {}
    for row, column in tiles:
        mask = masks[held[row].sample]
        same = (held[row].start, held[row].stop) == (held[column].start, held[column].stop)
        if mask == CAUSAL and same:
            squares.append((row, column))
        elif mask in (CAUSAL, FULL):
            assert mask == FULL or held[column].start < held[row].start, "placed for layers with full attention"
            full.setdefault(row, []).append(column)
        else:
            ranged.setdefault(row, []).append(column)
    if squares:
        lengths = [held[row].num_tokens for row, _ in squares]
        square_rows, square_columns = map(tokens_of, zip(*squares, strict=True))
        yield Pack.build(lengths, mask=CAUSAL, device=device, rows=square_rows, columns=square_columns)
    for columns_of, is_ranged in ((full, False), (ranged, True)):
        if columns_of:
            rows_of: dict[tuple[int, ...], list[int]] = {}
            for row, columns in columns_of.items():
                rows_of.setdefault(tuple(columns), []).append(row)
            rows = [row for together in rows_of.values() for row in together]
            ranges = _key_ranges(rows, columns_of, held, masks, seqlens) if is_ranged else [None]
            for key_ranges in ranges:
                yield Pack.build(
                    [sum(held[row].num_tokens for row in together) for together in rows_of.values()],
                    [sum(held[column].num_tokens for column in columns) for columns in rows_of],
                    mask=FULL,
                    device=device,
                    rows=tokens_of(rows),
                    columns=tokens_of(column for columns in rows_of for column in columns),
                    key_ranges=key_ranges,
                )


def _key_ranges(
    rows: Sequence[int],
    columns_of: Mapping[int, Sequence[int]],
    held: Sequence[Held],
    masks: Sequence[Mask],
    seqlens: Sequence[int],
) -> Iterator[NDArray[np.int32]]:
    """Yield the key ranges of each row, two at a time; a row's keys are its sample's parts in ascending order."""
    found = []
    by_sample: dict[int, NDArray[np.int32]] = {}
    for row in rows:
        columns = columns_of[row]
        number = held[row].sample
        if number not in by_sample:
            by_sample[number] = masks[number].key_ranges(seqlens[number])
        starts = np.array([held[column].start for column in columns])
        assert (np.diff(starts) > 0).all(), "tiles come in the order of their keys"
        lengths = np.array([held[column].num_tokens for column in columns])
        # Counting the keys present before each bound turns a range of the sample into one of the keys present.
        bounds = by_sample[number][held[row].start : held[row].stop, :, None]
        found.append(np.clip(bounds - starts, 0, lengths).sum(axis=-1).astype(np.int32))
    return pairs_of_ranges(found)
