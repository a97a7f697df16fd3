"""The rows of a pack for linear attention: the runs of a lane, what comes before them, and how they are linked.

A run is rows of a lane that follow each other in a sample. Padding lies behind a sample and cannot reach its tokens: it
is computed like them. Everything is made on the host, once for each micro-batch, and kept in its `LayerCache`.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynamic_cp.plans.stretches import Stretches
from megatron.dynamic_cp.attention.linear.recurrence import Runs
from megatron.dynamic_cp.attention.packs import to_device
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams


class LaneIndex(NamedTuple):
    """Which `lane` of the `num_lanes` of its bucket this one is; the process group may have others besides."""

    num_lanes: int
    lane: int

    @classmethod
    def of(cls, params: DynamicPackedSeqParams) -> LaneIndex:
        """Return the index of this lane in a micro-batch."""
        group, placed = params.cp_group, params.placed
        if placed is None:
            return cls(group.size(), group.rank())
        return cls(placed.state_runs.num_lanes, group.rank() - placed.first_in_group)


class Halo(NamedTuple):
    """The last tokens before each run of this lane, which its convolution sees, and which lanes hold them.

    Attributes:
        sent: this lane's rows that others need, lane after lane, int64; num_sent: [lane] how many, its own none.
        num_received: [lane] rows that come from it.
        extended: of this lane's rows, each run behind what comes before it, int64; any row where one is received.
        arrived: which of the extended rows are received, as they come, int64.
        runs: the runs so extended.
        own: which of the extended rows are this lane's, in order, int64 [T].
        copied: which of the extended rows are another time rows of this lane; copied_rows: which rows, int64.
    """

    sent: Tensor
    num_sent: tuple[int, ...]
    num_received: tuple[int, ...]
    extended: Tensor
    arrived: Tensor
    runs: Runs
    own: Tensor
    copied: Tensor
    copied_rows: Tensor


class Alone(NamedTuple):
    """The runs of a lane through which no states pass, where it has linked ones, too, and the rows of both, int64.
    `in_order` says where each row of the lane is once rows of linked runs come first, int64."""

    linked_rows: Tensor
    rows: Tensor
    runs: Runs
    in_order: Tensor


class Level(NamedTuple):
    """Runs that go on from those of the level before, on a lane that has all rows, and these rows, int64. `previous` is
    the run of the level before behind which each begins, int64; of the first level it means nothing."""

    runs: Runs
    rows: Tensor
    previous: Tensor


class LinkedRuns(NamedTuple):
    """Linked runs (`Stretches.is_linked`) of all lanes, in their order.

    Attributes:
        counts: [lane] how many it has.
        in_order: for each run in order, its number where they are sorted by lane, int64.
        by_lane: for each run sorted by lane, its number in order.
        following, previous: runs that go on from another one, and that one, int64.
        jumps: (runs that have so many before them, the first and the last of these), for 1, 2, 4, ... runs, int64.
    """

    counts: tuple[int, ...]
    in_order: Tensor
    by_lane: Tensor
    following: Tensor
    previous: Tensor
    jumps: tuple[tuple[Tensor, Tensor, Tensor], ...]


class LaneRows:
    """The rows that a lane computes, as runs; kept by a micro-batch's parameters, which it must not know. `table` has
    the runs of all lanes, `has_links` says whether any goes on from another; `index` is None on a lane with all rows.
    """

    def __init__(self, table: Stretches, index: LaneIndex | None, device: torch.device) -> None:
        self.table, self.index, self._device = table, index, device
        self._own = table.of_lane(self._lane)
        self.runs = Runs.build(table.length[self._own].tolist(), device)
        self.has_links = bool((table.previous >= 0).any())
        self._halos: dict[int, Halo] = {}

    @property
    def _lane(self) -> int:
        return 0 if self.index is None else self.index.lane

    def halo(self, num_before: int) -> Halo:
        """Return the `num_before` tokens before each run; where runs are shorter, those are in several."""
        if num_before not in self._halos:
            self._halos[num_before] = self._halo(num_before)
        return self._halos[num_before]

    @cached_property
    def linked(self) -> Runs:
        """Those of this lane that are linked, where any are."""
        return self._runs_of(self._is_linked)

    @cached_property
    def alone(self) -> Alone | None:
        """The others, where any are."""
        is_linked = self._is_linked
        if is_linked.all():
            return None
        linked_rows = np.repeat(is_linked, self.table.length[self._own])
        order = np.argsort(~linked_rows, kind="stable")
        first, second = np.split(order, [linked_rows.sum()])
        rows = (self._on_device(values) for values in (first, second))
        return Alone(*rows, self._runs_of(~is_linked), self._on_device(np.argsort(order)))

    @cached_property
    def levels(self) -> list[Level]:
        """All runs, where this lane has all rows, those first that go on from none."""
        table, depth = self.table, self.table.depth
        number = np.zeros_like(depth)
        levels = []
        for level in range(int(depth.max()) + 1):
            runs = np.flatnonzero(depth == level)
            number[runs] = np.arange(len(runs))
            rows = np.repeat(depth == level, table.length)  # runs are in the order of rows
            of_level = Runs.build(table.length[runs].tolist(), self._device)
            previous = self._on_device(number[table.previous[runs]])
            levels.append(Level(of_level, self._on_device(np.flatnonzero(rows)), previous))
        return levels

    @cached_property
    def by_row(self) -> Tensor:
        """Where each row is among those of all levels, int64."""
        return torch.cat([level.rows for level in self.levels]).argsort()

    @cached_property
    def links(self) -> LinkedRuns:
        """The runs that states pass through."""
        table = self.table
        linked = np.flatnonzero(table.is_linked)
        number = np.full(len(table.lane), -1)
        number[linked] = np.arange(len(linked))
        previous = np.where(table.previous[linked] >= 0, number[table.previous[linked]], -1)
        by_lane = np.lexsort((table.row[linked], table.lane[linked]))
        following = np.flatnonzero(previous >= 0)
        jumps, first = [], previous
        while (later := np.flatnonzero(first >= 0)).size:
            jumps.append(tuple(map(self._on_device, (later, first[later], previous[later]))))
            first = np.where(first >= 0, first[first], -1)
        return LinkedRuns(
            counts=tuple(np.bincount(table.lane[linked], minlength=table.num_lanes).tolist()),
            in_order=self._on_device(np.argsort(by_lane)),
            by_lane=self._on_device(by_lane),
            following=self._on_device(following),
            previous=self._on_device(previous[following]),
            jumps=tuple(jumps),
        )

    @property
    def _is_linked(self) -> NDArray[np.bool_]:
        return self.table.is_linked[self._own]

    def _runs_of(self, which: NDArray[np.bool_]) -> Runs:
        return self.runs if which.all() else Runs.build(self.table.length[self._own[which]].tolist(), self._device)

    def _on_device(self, values: NDArray[np.int64]) -> Tensor:
        return to_device(np.ascontiguousarray(values), self._device)

    def _halo(self, num_before: int) -> Halo:
        table, lane = self.table, self._lane
        before = table.before(num_before)
        owner, user = table.lane[before.source], table.lane[before.stretch]
        lengths = table.length[self._own]
        num_rows = int(lengths.sum())
        mine = np.flatnonzero(user == lane)
        slot_of = np.full(len(table.lane), -1)
        slot_of[self._own] = np.arange(len(self._own))
        slot = slot_of[before.stretch[mine]]
        mine, slot = (part[np.argsort(slot, kind="stable")] for part in (mine, slot))
        num_of_run = np.bincount(slot, minlength=len(lengths))
        own = np.arange(num_rows) + np.repeat(np.cumsum(num_of_run), lengths)
        others = np.ones(num_rows + len(mine), np.bool_)
        others[own] = False
        place = np.flatnonzero(others)  # of each of `mine` among the extended rows
        is_far = owner[mine] != lane
        extended = np.zeros(len(others), np.int64)
        extended[own] = np.arange(num_rows)
        extended[place[~is_far]] = before.row[mine[~is_far]]
        by_owner = np.lexsort((mine[is_far], owner[mine[is_far]]))  # as they come: lane after lane
        sent = np.flatnonzero((owner == lane) & (user != lane))
        sent = sent[np.argsort(user[sent], kind="stable")]
        num_of_lane = partial(np.bincount, minlength=table.num_lanes)
        return Halo(
            sent=self._on_device(before.row[sent]),
            num_sent=tuple(num_of_lane(user[sent]).tolist()),
            num_received=tuple(num_of_lane(owner[mine[is_far]]).tolist()),
            extended=self._on_device(extended),
            arrived=self._on_device(place[is_far][by_owner]),
            runs=Runs.build((lengths + num_of_run).tolist(), self._device),
            own=self._on_device(own),
            copied=self._on_device(place[~is_far]),
            copied_rows=self._on_device(before.row[mine[~is_far]]),
        )


def lane_rows(params: DynamicPackedSeqParams, device: torch.device) -> LaneRows:
    def make() -> LaneRows:
        index = LaneIndex.of(params)
        return LaneRows(_table(params), index if index.num_lanes > 1 else None, device)

    return params.cache.once("rows of this lane", make)


class GatheredRows(NamedTuple):
    """`rows` of a lane that has those of all lanes in the order of samples; for each of its tokens, the row among those
    of all lanes, lane after lane (`in_order`, int64), and for each such row its token (`by_lane`)."""

    rows: LaneRows
    in_order: Tensor
    by_lane: Tensor


def gathered_rows(params: DynamicPackedSeqParams, device: torch.device) -> GatheredRows:
    """Return where the tokens of the group are once lanes have exchanged them."""

    def make() -> GatheredRows:
        table = _table(params)
        order = table.rows_in_order()
        rows = LaneRows(table.on_one_lane(), None, device)
        return GatheredRows(rows, to_device(order, device), to_device(np.argsort(order), device))

    return params.cache.once("rows of all lanes", make)


def _table(params: DynamicPackedSeqParams) -> Stretches:
    if params.placed is not None:
        return params.placed.state_runs
    masks = None if params.masked_samples is None else [sample.mask for sample in params.masked_samples]
    return Stretches.of_chunks(params.padded_seqlens, params.cp_group.size(), masks)
