"""Packs for a pipeline: independent blocks of lanes, rows filled to target durations, targets learned by simulating.

1. Cut the lanes into blocks as wide as the largest CP size that pays, or narrower; groups never cross blocks, so each
   block can be simulated alone.
2. For several numbers of rows: samples that are long compared with a row's share are dealt to 1, 2, 3, ... blocks, into
   neighbouring rows, because the bubbles that they cause then overlap. `profile.best_profiles` gives all other rows
   their targets; the fastest profiles are kept.
3. `rows.fill_least` packs the samples to the targets. Empty places are part of good plans.
4. Simulate the blocks, exactly. Rows that the critical path of a slow block crosses often get smaller targets, all rows
   are filled again, and the best packing is kept: the same multiplicative weights as in the profile, now with groups,
   true prices and whole samples.

Deterministic: counts of candidates and iterations, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice, product, zip_longest
from math import ceil
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.packing.durations import Durations, Packing, bucket_ns, durations_of, links_of
from dynamic_cp.packing.judge import grid_of_packing
from dynamic_cp.packing.profile import SMALLEST_SHARE, LaneClasses, Work, best_profiles, simulate_blocks
from dynamic_cp.packing.rows import RowTargets, alone_ns, fill_least
from dynamic_cp.pipeline.schedule import BACKWARD, FORWARD, pipeline_graph
from dynamic_cp.plans.padding import round_up
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import best_options, price, prices_of, without_host
from dynamic_cp.pricing.work import Lengths
from dynamic_cp.types import largest_power_of_two

_CLOSE_BLOCKS = 0.02
"""Blocks that end within this share of the slowest one learn from their critical path."""


class Effort(NamedTuple):
    """How much the search tries.

    Attributes:
        row_factors: numbers of rows to try, in units of the fewest that hold all tokens.
        num_ranking_iterations, num_profile_iterations: of `best_profiles`, for all candidates and for the best ones.
        num_profiles: the best candidates of a width of blocks, whose profiles are refined.
        num_packed: profiles that are packed; each further width of blocks adds two.
        num_other_rows: after the best profile of each width, so many with other numbers of rows are packed first.
        num_learned: packings whose targets learn from simulation.
        num_lessons: simulations of each.
        positions: places of the long samples in their block, as a share of the rows.
    """

    row_factors: tuple[float, ...]
    num_ranking_iterations: int
    num_profile_iterations: int
    num_profiles: int
    num_packed: int
    num_other_rows: int
    num_learned: int
    num_lessons: int
    positions: tuple[float, ...]


_FAST = Effort((1.1, 1.25, 1.5, 1.75, 2.0), 40, 120, 6, 4, 2, 1, 12, (0.5,))
_THOROUGH = Effort((1.05, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5), 80, 300, 20, 12, 4, 6, 60, (0.1, 0.3, 0.5))
EFFORTS = {"fast": (_FAST,), "thorough": (_FAST, _THOROUGH)}
OF_ONE_SIZE = Effort((1.1, 1.25, 1.5, 1.75, 2.0), 40, 120, 4, 3, 2, 1, 10, (0.5,))
"""Effort for static plans, whose candidates are fewer."""
_UNDERESTIMATED = 0.9
"""A plan takes at least this share of the best of its profiles: 0.95 in 90 static cases of PP 4 and 8."""
_NUM_GLANCES, _UNDERESTIMATED_AT_A_GLANCE = 20, 0.85
"""The same after so many iterations, which leave most candidates out that could not win."""
_FAR = 0.05
"""What is packed first is longer than what it becomes by this share at most, and lanes over samples more. In 400 static
cases of PP 2 to 8 none that beat the best plan was further from it."""
_MOST_OVERHEAD = 0.1
"""Profiles leave nothing out where rows cost more than this share of the work: packings may need fewer rows."""
_LEARNING_RATE = 0.004
_SPREAD_RATE = 0.05
_FACTORS = (0.997, 1.0, 1.004, 1.012, 1.04)
"""Tried in turn on the targets of a lesson, until all samples have a place."""
_TIGHTER = 0.001
_NUM_TIGHTER = 5
_SLOWER_IN_NARROW = 2.5
"""Widths of blocks are tried in which the longest sample lasts at most so many times its least."""
_STAGE_MULTIPLES = (2, 3, 5)
"""Numbers of rows to try besides, in units of pp_size."""
_FEW_BLOCKS, _PARTS_OF_BLOCKS = 4, 8
"""The longest samples are dealt to 1, 2, ... _FEW_BLOCKS blocks, and to 1, 2, ... eighths of all blocks."""
_MOST_BLOCKS = 128
"""But not to more than these: each has a profile of its own to learn, which takes seconds with thousands of lanes."""
_LONG_FACTOR = 1.5
"""A sample is long if it lasts more than this times the even share of a row."""


class _Blocks(NamedTuple):
    """Blocks of neighbouring lanes; all but the last ones have the full width."""

    first_lanes: Ints
    num_lanes: Ints


class _Candidate(NamedTuple):
    makespan_ns: float
    num_rows: int
    lanes: LaneClasses
    work_ns: Floats
    name: str


class Packed(NamedTuple):
    """A packing with its exact makespan and how it was found."""

    makespan_ns: int
    packing: Packing
    name: str


class _Start(NamedTuple):
    """A packing with the targets and floors of its rows, [block, row] nanoseconds, to learn from."""

    packed: Packed
    targets: Floats
    floors: Floats


_Profile = tuple[_Candidate, "_BlockPacker"]
"""A candidate and the packer of its blocks."""


def pack_blocks(
    lengths: Lengths, cost_model: CostModel, fewest_rows: int, effort: Effort, best_ns: float = np.inf
) -> list[Packed]:
    """Return packings for a pipeline, the fastest first; none when no target places all samples.

    Args:
        lengths: the samples.
        cost_model: prices, lanes and stages.
        fewest_rows: rows that the tokens need at least.
        effort: how much to try.
        best_ns: nothing is packed where profiles say that all would take longer.
    """
    num_lanes = cost_model.topology.num_lanes
    durations = durations_of(cost_model.table, num_lanes)
    alone = alone_ns(lengths, durations, num_lanes.bit_length())
    widths = widths_of(alone[:, 0], cost_model.topology.expert_lanes)
    packers = [_BlockPacker(lengths, cost_model, durations, alone, k, effort) for k in widths]
    # Profiles take blocks within a node and across nodes for alike.
    differ = any(row.min() < row.max() for row in links_of(cost_model.table, num_lanes))
    if differ or num_lanes * fewest_rows * sum(packers[0].empty_ns) > _MOST_OVERHEAD * packers[0].total_ns:
        best_ns = np.inf
    refined = []
    for packer in packers:
        candidates = packer.candidates(fewest_rows)
        if best_ns < np.inf:
            glanced = packer.profiles(candidates, _NUM_GLANCES)
            candidates = [one for one in glanced if _UNDERESTIMATED_AT_A_GLANCE * one.makespan_ns < best_ns]
        for num_iterations in (effort.num_ranking_iterations, effort.num_profile_iterations):
            ranking = sorted(packer.profiles(candidates, num_iterations), key=lambda one: one.makespan_ns)
            candidates = [one for one in ranking if _UNDERESTIMATED * one.makespan_ns < best_ns]
            candidates = candidates[: effort.num_profiles]
        refined.append([(one, packer) for one in candidates])
    if durations.num_exchanges.max() > 1:
        queue = _width_by_width(refined)
    else:
        queue = _best_profiles(refined, effort)
    packed = ((packer.pack(one), packer) for one, packer in queue)
    found = ((start, packer) for start, packer in packed if start is not None)
    num_packed = effort.num_packed + 2 * (sum(map(bool, refined)) - 1)
    started = [*islice(found, 1)]
    far_ns = (1.0 + _FAR + num_lanes / len(lengths.seqlens)) * best_ns
    if started and started[0][0].packed.makespan_ns < far_ns:
        started += islice(found, num_packed - 1)
    started.sort(key=lambda one: one[0].packed.makespan_ns)
    results = [start.packed for start, _ in started]
    results += [packer.learn(one) for one, packer in started[: effort.num_learned] if one.packed.makespan_ns < far_ns]
    return sorted(results, key=lambda one: one.makespan_ns)


def _best_profiles(refined: Sequence[Sequence[_Profile]], effort: Effort) -> list[_Profile]:
    """Return all profiles: of every width the best one, then the best ones of other numbers of rows, then the others.

    Profiles underestimate the makespan of packings with many rows.
    """
    first = [profiles[0] for profiles in refined if profiles]
    rest = sorted((one for profiles in refined for one in profiles[1:]), key=lambda one: one[0].makespan_ns)
    rows_seen = {one.num_rows for one, _ in first}
    others: list[_Profile] = []
    again: list[_Profile] = []
    for one, packer in rest:
        is_new = one.num_rows not in rows_seen and len(others) < effort.num_other_rows
        (others if is_new else again).append((one, packer))
        rows_seen.add(one.num_rows)
    return [*first, *others, *again]


def _width_by_width(refined: Sequence[Sequence[_Profile]]) -> list[_Profile]:
    """Return all profiles: one of every width in turn, within a width new numbers of rows first.

    Profiles underestimate wide blocks, too: no lane waits for another in a profile. Where exchanges can be chosen, long
    samples allow wide blocks while most other samples do better in narrow ones.
    """
    queues = []
    for profiles in refined:
        rows_seen: set[int] = set()
        new: list[_Profile] = []
        again: list[_Profile] = []
        for one, packer in profiles:
            (again if one.num_rows in rows_seen else new).append((one, packer))
            rows_seen.add(one.num_rows)
        queues.append([*new, *again])
    return [one for turn in zip_longest(*queues) for one in turn if one is not None]


def widths_of(longest_ns: Floats, expert_lanes: int) -> list[int]:
    """Return log2 of the widths of blocks to try, from [log2 of CP size] -> nanoseconds of the longest sample.

    Lanes that share experts wait for each other and are never in different blocks.

    Blocks wider than the longest sample can use only couple more lanes. Narrower ones make it last longer but leave
    more blocks to even out.
    """
    widest = int(np.argmin(longest_ns))
    widths = [k for k in range(widest, -1, -1) if longest_ns[k] <= _SLOWER_IN_NARROW * longest_ns[widest]]
    return list(dict.fromkeys(max(k, expert_lanes.bit_length() - 1) for k in widths))


class _BlockPacker:
    """What all candidates of one global batch in blocks of 2^k lanes share."""

    def __init__(
        self, lengths: Lengths, cost_model: CostModel, durations: Durations, alone: Floats, k: int, effort: Effort
    ) -> None:
        self.lengths, self.cost_model, self.durations, self.effort = lengths, cost_model, durations, effort
        self.squares = lengths.squares
        self.alone = alone[: k + 1].copy()
        self.best_ns = self.alone.min(axis=0)
        self.blocks = cut(cost_model.topology.num_lanes, 1 << k)
        table = cost_model.table
        base = int(np.flatnonzero(durations.capacities)[0])
        first = int(table.first_option[base, 0])
        totals = float(lengths.seqlens.sum()), float(self.squares.sum())
        terms = without_host(table.level_terms)
        self.empty_ns = [1e9 * price(terms, first, way, 0.0, 0.0) for way in (FORWARD, BACKWARD)]
        batch_ns = [1e9 * price(terms, first, way, *totals) for way in (FORWARD, BACKWARD)]
        both = [batch - empty for batch, empty in zip(batch_ns, self.empty_ns, strict=True)]
        self.backward_over_forward = both[BACKWARD] / both[FORWARD]
        self.total_ns = (1 << base) * (bucket_ns(durations, base, *totals) - bucket_ns(durations, base, 0.0, 0.0))
        # Blocks that share experts are wider than the longest sample may be: several share a row.
        is_wide = cost_model.topology.expert_lanes > 1
        self.long_in_a_row = max(1, (1 << k) >> int(np.argmin(self.alone[:, 0]))) if is_wide else 1
        empty_ns = self.empty_ns[FORWARD], self.empty_ns[BACKWARD]
        self.work = Work(self.total_ns, self.backward_over_forward, empty_ns, cost_model.topology.vp_size)
        self._alone_parts_ns: Floats = np.zeros((2, 0))

    def candidates(self, fewest_rows: int) -> list[_Candidate]:
        """Return numbers of rows, and how the long samples are dealt to blocks."""
        topology, widths = self.cost_model.topology, self.blocks.num_lanes
        counts = {ceil(factor * fewest_rows) for factor in self.effort.row_factors}
        # A loose token limit needs few rows, a pipeline many.
        counts |= {k * topology.pp_size for k in _STAGE_MULTIPLES if k * topology.pp_size > max(counts)}
        if fewest_rows < 1.5 * topology.pp_size:
            counts.add(topology.pp_size)
        starts: dict[tuple[int, int, float], _Candidate] = {}
        for num_rows in sorted({round_up(one, topology.num_microbatches_multiple) for one in counts}):
            share_ns = self.total_ns / topology.num_lanes / num_rows
            num_long = int(np.count_nonzero(self.best_ns > _LONG_FACTOR * share_ns + sum(self.empty_ns)))
            found = False
            for count, position in product(_heavy_counts(len(widths)), self.effort.positions):
                num_heavy = min(count, num_long)
                key = (num_rows, num_heavy, position if num_long else 0.0)
                lanes = None if key in starts else self._lanes(num_rows, num_long, num_heavy, position)
                if lanes is not None:
                    found = True
                    name = f"m={num_rows} width={widths[0]} long={num_long} heavy-blocks={num_heavy}"
                    starts[key] = _Candidate(0.0, num_rows, lanes, np.zeros(0), name)
            everywhere = None if found else self._lanes(num_rows, 0, 0, 0.0)
            if everywhere is not None:  # too many long samples for blocks of their own: let them go where they fit
                name = f"m={num_rows} width={widths[0]} spread"
                starts[num_rows, 0, -1.0] = _Candidate(0.0, num_rows, everywhere, np.zeros(0), name)
        return [*starts.values()]

    def _lanes(self, num_rows: int, num_long: int, num_heavy: int, position: float) -> LaneClasses | None:
        """Deal the longest `num_long` samples to `num_heavy` blocks; None when they do not fit there."""
        widths = self.blocks.num_lanes
        full = int(np.count_nonzero(widths == widths[0]))
        num_heavy = min(num_heavy, num_long)
        if num_heavy > full or ceil(num_long / max(1, num_heavy * self.long_in_a_row)) > num_rows:
            return None
        num_classes = num_heavy + (num_heavy < len(widths))
        num_lanes = np.array([float(widths[0])] * num_heavy + [float(widths[num_heavy:].sum())])[:num_classes]
        alone_ns = self._alone_ns(num_long)
        long_ns = np.zeros((2, num_classes, num_rows))
        for block in range(num_heavy):
            own_ns = alone_ns[:, block : num_long : num_heavy * self.long_in_a_row]
            spare = num_rows - own_ns.shape[1]
            rows = _middle_out(min(spare, round(position * spare)), own_ns.shape[1])
            long_ns[:, block, rows] = own_ns
        if (num_lanes[:, None] * long_ns.sum(axis=0)).sum() > 0.98 * self.total_ns and num_long > 1:
            return None
        return LaneClasses(num_lanes, long_ns[FORWARD], long_ns[BACKWARD])

    def _alone_ns(self, num_samples: int) -> Floats:
        """Return [FORWARD or BACKWARD, sample] nanoseconds of the longest samples, each alone, without its overhead."""
        if num_samples > self._alone_parts_ns.shape[1]:
            tokens, squares = self.lengths.seqlens[:num_samples].astype(np.float64), self.squares[:num_samples]
            log2_cp_sizes, table = self.alone[:, :num_samples].argmin(axis=0), self.cost_model.table
            rows = best_options(table, np.zeros_like(log2_cp_sizes), log2_cp_sizes, tokens, squares)
            both_s = prices_of(table.level_terms[rows].swapaxes(0, 1), tokens, squares)
            self._alone_parts_ns = np.maximum(0.0, 1e9 * both_s - np.reshape(self.empty_ns, (2, 1)))
        return self._alone_parts_ns[:, :num_samples]

    def profiles(self, candidates: Sequence[_Candidate], num_iterations: int) -> list[_Candidate]:
        """Return `candidates`, in some order, each with its best profile after `num_iterations`."""
        topology = self.cost_model.topology
        found = []
        for num_rows in sorted({one.num_rows for one in candidates}):
            alike = [one for one in candidates if one.num_rows == num_rows]
            first_classes = np.cumsum([0, *(len(one.lanes.num_lanes) for one in alike)])
            lanes = LaneClasses(*(np.concatenate(parts) for parts in zip(*(one.lanes for one in alike), strict=True)))
            graph = pipeline_graph(topology.pp_size, num_rows, topology.vp_size)
            makespans_ns, work_ns = best_profiles(graph, lanes, first_classes, self.work, num_iterations)
            works_ns = np.split(work_ns, first_classes[1:-1])
            found += [
                one._replace(makespan_ns=makespan_ns, work_ns=own_ns)
                for one, makespan_ns, own_ns in zip(alike, makespans_ns.tolist(), works_ns, strict=True)
            ]
        return found

    def pack(self, one: _Candidate) -> _Start | None:
        """Pack to the targets of a profile; then shift work between blocks until they end together."""
        num_blocks, num_classes = len(self.blocks.num_lanes), len(one.lanes.num_lanes)
        class_of_block = np.minimum(np.arange(num_blocks), num_classes - 1)
        long_ns = one.lanes.long_forward_ns + one.lanes.long_backward_ns
        overhead_ns = sum(self.empty_ns)
        targets = (one.work_ns + overhead_ns)[class_of_block]
        targets[one.work_ns[class_of_block] < 0.05 * self.total_ns / self.blocks.num_lanes.sum() / one.num_rows] = 0.0
        floors = np.where(long_ns > 0.0, 1.001 * (long_ns + overhead_ns), 0.0)[class_of_block]
        best: _Start | None = None
        packing, factor = self._fill(targets, floors, 0.95, 1.6, 5)
        if packing is None:
            packing, factor = self._fill(targets, floors, 1.6, 6.4, 5)
        for is_last in (False, False, True):
            if packing is None:
                break
            targets = targets * factor
            ends_ns, _, _ = self._simulate(packing)
            if best is None or ends_ns.max() < best.packed.makespan_ns:
                best = _Start(Packed(int(ends_ns.max()), packing, one.name), targets, floors)
            if not is_last:
                targets = targets * (ends_ns.mean() / ends_ns)[:, None]
                packing, factor = self._fill_first(targets, floors)
        return best

    def learn(self, start: _Start) -> Packed:
        """Return the best packing of a number of lessons: simulate, shrink the rows that are critical, fill again."""
        best, targets, floors = start
        best_targets, packing = targets, best.packing
        overhead_ns = sum(self.empty_ns)
        lanes = self.blocks.num_lanes[:, None]
        smallest_ns = SMALLEST_SHARE * self.total_ns / lanes.sum() / targets.shape[1]
        _, row_ns, crossings = self._simulate(packing)
        targets = np.maximum(row_ns, targets)
        memory = crossings
        for _ in range(self.effort.num_lessons):
            ends_ns, row_ns, crossings = self._simulate(packing)
            worst = ends_ns.max()
            if worst < best.makespan_ns:
                best, best_targets = Packed(int(worst), packing, start.packed.name + " learned"), targets
            memory = 0.5 * memory + 0.5 * crossings
            movable_ns = np.where(row_ns > 1.002 * floors, row_ns, 0.0)
            mean = ((memory * movable_ns).sum(axis=1) + 1e-9) / (movable_ns.sum(axis=1) + 1e-9)
            pull = np.maximum(0.0, 1.0 - (worst - ends_ns) / (_CLOSE_BLOCKS * worst))
            # Far from even blocks there is much to move, and other blocks have room for it.
            rate = (_LEARNING_RATE + _SPREAD_RATE * (1.0 - ends_ns.mean() / worst)) * pull / mean
            work_ns = np.maximum(targets - overhead_ns, smallest_ns)
            learned_ns = work_ns * np.exp(-rate[:, None] * memory)
            learned_ns *= (lanes * work_ns).sum() / (lanes * learned_ns).sum()
            targets = overhead_ns + learned_ns
            filled, factor = self._fill_first(targets, floors)
            if filled is None:
                break
            packing, targets = filled, targets * factor
        return self._tighten(best, best_targets, floors)

    def _tighten(self, best: Packed, targets: Floats, floors: Floats) -> Packed:
        """Return the best packing of smaller and smaller targets, until the samples do not fit."""
        for step in range(1, _NUM_TIGHTER + 1):
            factor = 1.0 - _TIGHTER * step
            packing, _ = self._fill(targets, floors, factor, factor, 0)
            if packing is None:
                break
            worst = int(self._simulate(packing)[0].max())
            if worst < best.makespan_ns:
                best = Packed(worst, packing, best.name)
        return best

    def _fill_first(self, targets: Floats, floors: Floats) -> tuple[Packing | None, float]:
        """Return the filling of the first of `_FACTORS` that places all samples, which is close to the least."""
        for factor in _FACTORS:
            packing, _ = self._fill(targets, floors, factor, factor, 0)
            if packing is not None:
                return packing, factor
        return None, -1.0

    def _fill(
        self, targets: Floats, floors: Floats, low: float, high: float, num_steps: int
    ) -> tuple[Packing | None, float]:
        num_rows = targets.shape[1]
        rows = RowTargets(np.repeat(self.blocks.num_lanes, num_rows), targets.ravel(), floors.ravel())
        factor, filling = fill_least(self.lengths, self.durations, self.alone, rows, (low, high), num_steps)
        if factor < 0:
            return None, factor
        blocks, rows_of_block = np.divmod(filling.rows, num_rows)
        first_lanes = self.blocks.first_lanes[blocks] + filling.first_lanes
        packing = Packing(num_rows, filling.bucket_of_sample, rows_of_block, first_lanes, filling.log2_cp_sizes)
        return packing, factor

    def _simulate(self, packing: Packing) -> tuple[Ints, Floats, Floats]:
        """Return [block] -> makespan, [block, row] -> longest lane, [block, row] -> crossings by the critical path."""
        topology = self.cost_model.topology
        graph = pipeline_graph(topology.pp_size, packing.num_rows, topology.vp_size)
        grid = grid_of_packing(self.lengths, packing, self.cost_model)
        return simulate_blocks(
            graph, topology.vp_size, grid, self.blocks.first_lanes, self.blocks.num_lanes, self.backward_over_forward
        )


def cut(num_lanes: int, width: int) -> _Blocks:
    """Return blocks of `width` lanes; what is left becomes aligned blocks of smaller powers of two."""
    first, first_lanes, widths = 0, [], []
    while first < num_lanes:
        widths.append(min(width, largest_power_of_two(num_lanes - first)))
        first_lanes.append(first)
        first += widths[-1]
    return _Blocks(np.array(first_lanes), np.array(widths))


def _heavy_counts(num_blocks: int) -> list[int]:
    """Return to how many of `num_blocks` the longest samples may be dealt."""
    parts = {num_blocks * part // _PARTS_OF_BLOCKS for part in range(1, _PARTS_OF_BLOCKS + 1)}
    return sorted(one for one in parts | set(range(1, _FEW_BLOCKS + 1)) if 0 < one <= _MOST_BLOCKS)


@lru_cache(maxsize=4096)
def _middle_out(start: int, count: int) -> Sequence[int]:
    """Return the rows start .. start + count - 1, the middle one first, then outwards."""
    middle = start + (count - 1) // 2
    return sorted(range(start, start + count), key=lambda row: (abs(row - middle), row))
