"""Plans whose micro-batches are placed: cut into blocks, which lie where simulation says they cost least."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, repeat, zip_longest
from math import ceil
from typing import NamedTuple

import numpy as np

from dynamic_cp.mechanisms.blocks import why_too_much_fetched
from dynamic_cp.mechanisms.placed_seconds import link_rates
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.mechanisms.transfers import lanes_in_one_node
from dynamic_cp.memory.activations import tokens_of_states
from dynamic_cp.packing.level import deal
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.placement.cuts import Cut, spread, trimmed
from dynamic_cp.placement.divisions import LinkRates, Schedule, divided
from dynamic_cp.placement.legal import with_masks
from dynamic_cp.placement.portfolio import Maker, candidates
from dynamic_cp.placement.programme import buffer_tokens_of
from dynamic_cp.plans.padding import placed_tokens, round_up
from dynamic_cp.plans.stretches import room_for_states, states_kept
from dynamic_cp.pricing.cost_model import CostModel, is_priced_lane_by_lane, lane_costs
from dynamic_cp.types import BY_PLACEMENT, Bucket, MicroBatch, Placement, Plan, Sample
from dynamic_cp.types.counts import MAX_COUNT
from dynamic_cp.types.linear_attention import CHUNKS_PER_LANE
from dynamic_cp.types.placement import Lanes, PlacementProblem

_SCHEDULES = (
    Schedule.of(2),
    Schedule.of(1),
    Schedule((1.0, 0.7)),
    Schedule.of(3),
    Schedule((0.3, 1.0, 1.0, 0.4)),
    Schedule((0.3, 1.0, 1.0, 0.4), rotates=True),
    Schedule((0.0, 0.3, 0.7, 1.0, 0.5), rotates=True),
    Schedule((0.0, 1.0)),
)
_IN_LITTLE_ROOM = Schedule.of(8)
"""Where what lanes fetch has no room: what one division fetched makes room for what the next but one does."""
_NUM_SCHEDULED, _EACH_SCHEDULED = 4, 4
"""Placements that are tried in all schedules, after all were in the first: so many, one of each few, at least one."""
_NUM_SEARCHED_AGAIN, _EACH_SEARCHED_AGAIN, _MORE_SEEDS = 2, 8, (1, 2)
"""Placements that are searched again with other seeds, so many, one of each few; and these seeds."""
_FAR, _NUM_ROUNDS = 1.2, 2
"""An inner size is given up if, after `_NUM_ROUNDS` candidates, its fastest placement takes `_FAR` times as long as
another's."""
_TOKEN_TOLERANCE = 0.05
"""Share by which a lane may hold more tokens than the mean: linear layers wait for the fullest."""
_ROW_FILL = 0.97
"""Share of the lanes' tokens that level rows fill: lanes do not come out exactly even."""
_MORE_ROWS = (1.2, 1.5, 2.0, 3.0, 4.0)
"""Numbers of level rows for a pipeline, as multiples of the fewest."""
_CANDIDATES_PER_S, _MOST_CANDIDATES = {"fast": 1600, "thorough": 51200}, {"fast": 200, "thorough": 1024}
"""Candidates that are tried for a plan: lanes times candidates for each second of its step, and the most in all. A
candidate takes about 0.25 ms for each lane, with its share of schedules and searches, so that planning takes less than
half as long as a step."""
_FEWEST_EACH, _FEWEST_AGAIN = 8, 4
"""If fewer than `_FEWEST_EACH` candidates a row are left, all rows are placed by quick ways only. The remaining
candidates go to the rows of the fastest plan, if each gets at least `_FEWEST_AGAIN`."""
_EACH_QUICKLY = 2
"""A row placed by quick ways takes as long as so many candidates; without time for these, it is placed greedily."""
_QUICK, _NUM_QUICK_AMONG = ("greedy", "zigzag"), 4
"""Ways to place that search nothing, which take a quarter of the time on many lanes; they are among so many first."""
_SHORTEST_STEP_S = 0.25
"""Steps that take less are planned as if they took so long: few do on devices that need such plans."""
_INNER_SIZES = (1, 2, 8, 4)
"""Sparse masks mostly do best without an exchange of heads, others with one over a node, so that fewer bytes cross."""
_HOPELESS = 1.15
"""A plan is not placed if its longest row would take this many times as long in each of a few placements."""


class PlacedRows(NamedTuple):
    """Micro-batches, their makespan in nanoseconds and their name for the user."""

    makespan_ns: int
    name: str
    micro_batches: tuple[MicroBatch, ...]


def placed_rows(
    packed: Sequence[MicroBatch],
    samples: Sequence[Sample],
    cost_model: CostModel,
    *,
    step_s: float,
    is_guess: bool = False,
) -> Iterator[PlacedRows]:
    """Yield micro-batches of the same samples that are placed, where their tokens fit and that may be faster.

    Some are those of `packed`, each placed or as it is there, whichever is faster; the others have even work.

    Args:
        packed: micro-batches of a legal plan, or a guess.
        samples: descending by seqlen, ties by ascending sample_id.
        cost_model: its topology, limits and prices of attention.
        step_s: that they take; placing them may take about half as long.
        is_guess: no mechanism may be used that `packed` uses on several lanes.
    """
    rows = [row for row in packed if any(bucket.samples for bucket in row.buckets)]
    of_rows = [[sample for bucket in row.buckets for sample in bucket.samples] for row in rows]
    fixed = [not is_guess or all(bucket.cp_size == 1 for bucket in row.buckets) for row in rows]
    is_sparse = cost_model.model.window is not None or any(sample.mask is not None for sample in samples)
    if all(fixed) and not is_sparse and _is_hopeless(rows, of_rows, cost_model):
        return
    in_time = _num_in_time(step_s, cost_model)
    kept = [row if may_stay else None for row, may_stay in zip(rows, fixed, strict=True)]
    levels = _levels(samples, len(rows), in_time, cost_model)
    plans = [_PlanRows("", of_rows, kept), *(_PlanRows("level ", level, [None] * len(level)) for level in levels)]
    num_distinct = len({_names_of(row) for each in plans for row in each.samples})
    num_each = min(_MOST_CANDIDATES[cost_model.options.search], in_time) // num_distinct
    if num_each < _FEWEST_EACH:
        yield from _placed_quickly(plans, num_distinct, in_time, cost_model)
        return
    place = _placer(cost_model, num_each)
    for each in plans:
        yield from _in_full(each, place, cost_model)


def _levels(
    samples: Sequence[Sample], num_packed: int, in_time: int, cost_model: CostModel
) -> list[list[list[Sample]]]:
    """Return samples on rows of even work: on as few rows as hold them, on as many as are packed, and on others.

    Args:
        samples: descending by seqlen.
        num_packed: rows of the plan that is packed.
        in_time: candidates that there is time for.
        cost_model: topology and limits.
    """
    topology, options = cost_model.topology, cost_model.options
    num_tokens = sum(sample.seqlen for sample in samples)
    fewest = ceil(num_tokens / (_ROW_FILL * options.max_tokens_per_rank * topology.num_lanes))
    # More rows than needed fill a pipeline better.
    more = [ceil(times * fewest) for times in _MORE_ROWS] if topology.pp_size > 1 else []
    most_rows = max(fewest + topology.pp_size, num_packed)
    most_in_all = min(_MOST_CANDIDATES[options.search], in_time // _EACH_QUICKLY)
    levels: list[list[list[Sample]]] = []
    num_rows = num_packed
    for number in dict.fromkeys((fewest, num_packed, fewest + 1, *more)):
        num_rows += number
        if levels and (number > most_rows or num_rows > most_in_all):
            break
        level = _level_rows(samples, number, cost_model)
        if level is not None:
            levels.append(level)
    return levels


def _placed_quickly(
    plans: Sequence[_PlanRows], num_distinct: int, in_time: int, cost_model: CostModel
) -> Iterator[PlacedRows]:
    """Yield `plans` placed by ways that search nothing, and then the fastest of them once more as time remains.

    Args:
        plans: to place.
        num_distinct: rows of all plans, the same samples counted once.
        in_time: candidates that there is time for.
        cost_model: topology, limits and prices.
    """
    num_inner, num_quick = len(_inner_sizes(cost_model)), _EACH_QUICKLY * num_distinct
    place_quickly = _placer(cost_model, num_inner if num_quick <= in_time else 0, quick_first=True)
    quick = [(placed, each) for each in plans for placed in _in_full(each, place_quickly, cost_model)]
    yield from (placed for placed, _ in quick)
    if quick:
        quickest, fastest = min(quick, key=lambda one: one[0].makespan_ns)
        num_left = _num_in_time(quickest.makespan_ns / 1e9, cost_model) - num_quick
        num_each = min(_MOST_CANDIDATES[cost_model.options.search], num_left) // len(fastest.samples)
        # The first of each inner size are greedy, which takes half as long as others.
        most = num_each - num_inner // 2
        if most >= _FEWEST_AGAIN:
            yield from _in_full(fastest, _placer(cost_model, most), cost_model)


def _num_in_time(step_s: float, cost_model: CostModel) -> int:
    """Return how many candidates a step that takes so long has time for."""
    per_s = _CANDIDATES_PER_S[cost_model.options.search]
    return int(per_s * max(_SHORTEST_STEP_S, step_s) / cost_model.topology.num_lanes)


class _PlanRows(NamedTuple):
    """A plan to place: its name for the user, the samples of each row, and the row itself where it may stay."""

    name: str
    samples: Sequence[Sequence[Sample]]
    kept: Sequence[MicroBatch | None]


_Place = Callable[[Sequence[Sample]], MicroBatch | None]
"""Samples of a row -> it, placed."""


def _placer(cost_model: CostModel, most_candidates: int, *, quick_first: bool = False) -> _Place:
    """Return `place_row` with these arguments, which places the same samples once."""
    known: dict[tuple[int, ...], MicroBatch | None] = {}

    def place(row: Sequence[Sample]) -> MicroBatch | None:
        names = _names_of(row)
        if names not in known:
            known[names] = place_row(row, cost_model, most_candidates, quick_first=quick_first)
        return known[names]

    return place


def _names_of(row: Sequence[Sample]) -> tuple[int, ...]:
    return tuple(sorted(sample.sample_id for sample in row))


def _in_full(each: _PlanRows, place: _Place, cost_model: CostModel) -> Iterator[PlacedRows]:
    """Yield the rows and as many empty ones as the schedule needs; nothing if one of them is not there."""
    topology, name = cost_model.topology, each.name
    rows = [_faster(row, place(of_row), cost_model) for row, of_row in zip(each.kept, each.samples, strict=True)]
    found = [row for row in rows if row is not None]
    if len(found) == len(rows):
        num_placed = sum(row.buckets[0].placement is not None for row in found)
        empty = MicroBatch(buckets=tuple(Bucket(first_lane=lane) for lane in range(topology.num_lanes)))
        found += [empty] * (round_up(len(found), topology.num_microbatches_multiple) - len(found))
        plan = Plan(
            topology=topology, max_tokens_per_rank=cost_model.options.max_tokens_per_rank, micro_batches=tuple(found)
        )
        name = f"{name}m={len(found)}, {num_placed} of them placed"
        yield PlacedRows(makespan_ns(plan, cost_model), name, plan.micro_batches)


def _is_hopeless(rows: Sequence[MicroBatch], of_rows: Sequence[Sequence[Sample]], cost_model: CostModel) -> bool:
    """Return whether the longest row, placed once with each number of lanes that exchange heads, takes far longer."""
    slowest_s, longest = max((_slowest_s(row, cost_model), index) for index, row in enumerate(rows))
    placed = place_row(of_rows[longest], cost_model, most_candidates=0)
    return placed is None or _slowest_s(placed, cost_model) > _HOPELESS * slowest_s


def _faster(one: MicroBatch | None, other: MicroBatch | None, cost_model: CostModel) -> MicroBatch | None:
    """Return whichever is there and takes less time on its slowest lane; `one` of equals."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda row: _slowest_s(row, cost_model))


def _slowest_s(row: MicroBatch, cost_model: CostModel) -> float:
    """Return forward and backward, each on its slowest lane where all begin together, else on the slowest for both."""
    (bucket, *others) = row.buckets
    if not others and is_priced_lane_by_lane(bucket):
        return float(cost_model.seconds_lane_by_lane(bucket, row)[0].max(axis=1).sum())
    return max(cost.forward_s + cost.backward_s for _, cost in lane_costs(row, cost_model))


def _level_rows(samples: Sequence[Sample], num_rows: int, cost_model: CostModel) -> list[list[Sample]] | None:
    """Return samples on rows of about equal work, the most first, each on the row with least; None: they do not fit."""
    topology, options = cost_model.topology, cost_model.options
    most_tokens = _ROW_FILL * options.max_tokens_per_rank * topology.num_lanes
    squares = map(cost_model.model.squared_tokens, samples)
    work = [
        cost_model.duration_ns(1, 0, sample.seqlen, squared) for sample, squared in zip(samples, squares, strict=True)
    ]
    order = np.argsort(-np.array(work), kind="stable").tolist()
    dealt = deal(((samples[index].seqlen, work[index]) for index in order), num_rows, most_tokens)
    return None if dealt is None else [[samples[order[place]] for place in row] for row in dealt[0] if row]


def place_row(
    samples: Sequence[Sample], cost_model: CostModel, most_candidates: int = MAX_COUNT, *, quick_first: bool = False
) -> MicroBatch | None:
    """Return the fastest placed micro-batch of `samples` on all lanes; None where none keeps the limits.

    All candidates are priced in one schedule, the best ones in others and searched again with other seeds.

    Args:
        samples: of the micro-batch.
        cost_model: topology, limits and prices.
        most_candidates: to try after the first one of each inner size; more until one keeps the limits.
        quick_first: first those that take little to find.
    """
    masked = with_masks(samples, cost_model.mask)
    num_tokens = sum(sample.seqlen for sample in samples)
    if num_tokens > _most_tokens_of_lane(cost_model) * cost_model.topology.num_lanes:
        return None
    tried = _Tried(samples, cost_model)
    groupings = [_Grouping.of(inner, num_tokens, cost_model) for inner in _inner_sizes(cost_model)]
    for number, (grouping, make) in enumerate(_round_robin(groupings, masked, tried, quick_first=quick_first)):
        if number >= len(groupings) + most_candidates and tried.fastest():
            break
        tried.add(grouping, make)
    num_scheduled = min(_NUM_SCHEDULED, max(1, most_candidates // _EACH_SCHEDULED))
    for one in tried.fastest(lambda one: id(one.cut))[:num_scheduled]:
        for schedule in _SCHEDULES[1:]:
            tried.add_scheduled(one, schedule)
    num_searched = min(_NUM_SEARCHED_AGAIN, most_candidates // _EACH_SEARCHED_AGAIN)
    for one in [one for one in tried.fastest(lambda one: one.make) if one.make.takes_seed][:num_searched]:
        for seed in _MORE_SEEDS:
            tried.add(one.grouping, one.make, seed, one.schedule)
    return next((one.row for one in tried.fastest()), None)


def _round_robin(
    groupings: Sequence[_Grouping], masked: Sequence[Sample], tried: _Tried, *, quick_first: bool
) -> Iterator[tuple[_Grouping, Maker]]:
    """Yield a candidate of each grouping, then another of each, and so on, but of those that proved slow no more."""
    order = _quick_first if quick_first else iter
    rounds = zip_longest(
        *(zip(repeat(grouping), order(candidates(masked, grouping.problem))) for grouping in groupings)
    )
    for number, each in enumerate(rounds):
        slow = tried.groupings_beyond(_FAR) if number >= _NUM_ROUNDS else set()
        yield from (one for one in each if one is not None and one[0] not in slow)


def _quick_first(makers: Iterator[Maker]) -> Iterator[Maker]:
    """Yield of the first makers those that search nothing before the others."""
    firsts = islice(makers, _NUM_QUICK_AMONG)
    yield from sorted(firsts, key=lambda maker: maker.name.split()[0] not in _QUICK)
    yield from makers


class _Grouping(NamedTuple):
    """Lanes of a placement.

    Attributes:
        inner_cp_size: lanes of the job that each of them is.
        problem: what is placed on them.
        most_tokens: that each may hold.
        lanes, rates: they, and their links.
    """

    inner_cp_size: int
    problem: PlacementProblem
    most_tokens: int
    lanes: Lanes
    rates: LinkRates

    @classmethod
    def of(cls, inner_cp_size: int, num_tokens: int, cost_model: CostModel) -> _Grouping:
        """Return how to place so many tokens in all, as uneven as is usual and as lanes have room for."""
        topology, stage = cost_model.topology, cost_model.stage.attention.of_inner_group(inner_cp_size)
        most_tokens = _most_tokens_of_lane(cost_model) * topology.num_lanes
        problem = PlacementProblem(
            num_lanes=topology.num_lanes // inner_cp_size,
            node_lanes=lanes_in_one_node(topology) // inner_cp_size,
            row_bytes=max(1, round(stage.query_bytes)),
            column_bytes=max(1, round(stage.kv_bytes)),
            token_tolerance=min(_TOKEN_TOLERANCE, most_tokens / num_tokens - 1.0),
        )
        lanes = Lanes(problem.num_lanes, 0, problem.node_lanes)
        return cls(inner_cp_size, problem, problem.most_tokens(num_tokens), lanes, link_rates(stage))


def _most_tokens_of_lane(cost_model: CostModel) -> int:
    multiple = cost_model.topology.rank_token_multiple
    return cost_model.options.max_tokens_per_rank // multiple * multiple


class _Try(NamedTuple):
    """A placement that keeps the limits of tokens held and fetched, in a schedule, and what it takes.

    Attributes:
        seconds: of the slowest lane, forward and backward.
        grouping, make: how it is made.
        cut: it, without divisions.
    """

    seconds: float
    row: MicroBatch
    grouping: _Grouping
    make: Maker
    cut: Cut
    schedule: Schedule


class _Tried:
    """The placements of a micro-batch that keep the limits, each tried once, however often it was made."""

    def __init__(self, samples: Sequence[Sample], cost_model: CostModel) -> None:
        self._samples, self._cost_model = samples, cost_model
        self._seen: set[tuple[int, Schedule, bytes]] = set()
        self._tries: list[_Try] = []

    def fastest(self, kind: Callable[[_Try], Hashable] = id) -> list[_Try]:
        """Return the fastest first, of equals the one that was tried first; of those of one kind only one."""
        firsts: dict[Hashable, _Try] = {}
        for one in sorted(self._tries, key=lambda one: one.seconds):
            firsts.setdefault(kind(one), one)
        return list(firsts.values())

    def groupings_beyond(self, factor: float) -> set[_Grouping]:
        """Return the groupings whose placements all take more than so many times as long as the fastest."""
        most_s = factor * min((one.seconds for one in self._tries), default=0.0)
        within = {one.grouping for one in self._tries if one.seconds <= most_s}
        return {one.grouping for one in self._tries} - within

    def add(self, grouping: _Grouping, make: Maker, seed: int = 0, schedule: Schedule = _SCHEDULES[0]) -> None:
        """Try a placement cut to what lanes use of homes, and one in which homes that many use are shared out, too."""
        model, mask = self._cost_model.model, self._cost_model.mask
        placed = make(seed)
        tiles = np.zeros((len(placed.tiles), Placement.columns), np.int32)
        tiles[:, :3] = placed.tiles
        layer_masks = model.layer_masks if model.window is not None else ()
        whole = Cut(Placement(placed.homes, tiles, layer_masks), placed.touched)
        cut = trimmed(whole, self._samples, mask)
        for one in (cut, spread(cut, self._samples, mask, grouping.lanes, grouping.rates, grouping.most_tokens)):
            self._add(one, grouping, make, schedule)

    def add_scheduled(self, one: _Try, schedule: Schedule) -> None:
        """Try the same placement in another schedule."""
        self._add(one.cut, one.grouping, one.make, schedule)

    def _add(self, cut: Cut, grouping: _Grouping, make: Maker, schedule: Schedule) -> None:
        key = grouping.inner_cp_size, schedule, _digest_of(cut.placement)
        if key in self._seen:
            return
        self._seen.add(key)
        bucket = Bucket(
            first_lane=0,
            cp_size=self._cost_model.topology.num_lanes,
            cp_comm_type=BY_PLACEMENT,
            inner_cp_size=grouping.inner_cp_size,
            samples=tuple(self._samples),
            placement=cut.placement,
            state_exchange="heads" if self._cost_model.model.linear_attention is None else "states",
        )
        if not _fits(bucket, self._cost_model):
            return
        bucket = replace(
            bucket, placement=divided(cut.placement, cut.touched, grouping.lanes, grouping.rates, schedule)
        )
        if _has_room(bucket, grouping.lanes, self._cost_model):
            row = MicroBatch(buckets=(bucket,))
            lanes_s, _ = self._cost_model.seconds_lane_by_lane(bucket, row, with_host=False)
            self._tries.append(_Try(float(lanes_s.max(axis=1).sum()), row, grouping, make, cut, schedule))
        else:
            self._add(cut, grouping, make, _IN_LITTLE_ROOM)


def _digest_of(placement: Placement) -> bytes:
    digest = hashlib.blake2b(placement.homes.tobytes(), digest_size=16)
    digest.update(placement.tiles.tobytes())
    return digest.digest()


def _inner_sizes(cost_model: CostModel) -> list[int]:
    """Return the inner sizes to try, in the order of `_INNER_SIZES`, larger ones behind them."""
    sizes = MECHANISMS[BY_PLACEMENT].inner_sizes(cost_model.topology.num_lanes, cost_model.sharing)
    return sorted(sizes, key=lambda size: (_INNER_SIZES.index(size) if size in _INNER_SIZES else size, size))


def _fits(bucket: Bucket, cost_model: CostModel) -> bool:
    """Return whether what its lanes hold keeps the limit, with states of more runs than there is room for."""
    topology, options = cost_model.topology, cost_model.options
    held = np.array(placed_tokens(bucket, topology.rank_token_multiple), np.float64)
    if bucket.exchanges_states:
        runs = np.array(states_kept(bucket, topology.rank_token_multiple))
        more = np.maximum(runs - room_for_states(options.max_tokens_per_rank), 0)
        held += more / CHUNKS_PER_LANE * tokens_of_states(cost_model.model, topology, options)
    return bool(held.max() <= options.max_tokens_per_rank)


def _has_room(bucket: Bucket, lanes: Lanes, cost_model: CostModel) -> bool:
    """Return whether what its lanes fetch keeps the limit."""
    assert bucket.placement is not None
    buffers = buffer_tokens_of(bucket.placement, bucket.samples, lanes)
    copies, most_tokens = cost_model.sharing.copies(bucket.inner_cp_size), cost_model.options.max_tokens_per_rank
    return why_too_much_fetched(bucket, buffers, most_tokens, copies) is None
