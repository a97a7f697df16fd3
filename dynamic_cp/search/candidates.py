"""Packings of a global batch, each with its makespan: what the search compares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.mechanisms.registry import Ring
from dynamic_cp.packing.durations import (
    Durations,
    Packing,
    apart_durations_of,
    bucket_ns,
    durations_of,
    without_empty_rows,
)
from dynamic_cp.packing.judge import ORDERS, PricedPacking, grid_of_priced, in_orders, makespan_ns, num_microbatches_of
from dynamic_cp.packing.megatron_dev import pack_megatron_dev
from dynamic_cp.packing.nested import pack_nested, row_counts
from dynamic_cp.packing.static import check_static_cp_size, fewest_rows, pack_balanced, pack_next_fit
from dynamic_cp.pipeline.longest_path import Grid
from dynamic_cp.plans.padding import round_up
from dynamic_cp.pricing.allowed import allowed_cp_sizes, capacity_tokens
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import kinks_of, linear_parts, prices_of
from dynamic_cp.pricing.work import Lengths, densities_of
from dynamic_cp.types import ModelShape, Sample

_NUM_NESTED_JUDGED = 2
_PIPELINE_NESTED_SWEEP = (1.0, 1.3, 1.7)
_BALANCED_SWEEP = (1.0, 1.15, 1.3, 1.6, 2.0, 2.5, 3.0)
_MEGATRON_DEV_LIMITS = (1, 2, 4)
_NUM_POLISHED = 4
_NUM_WALKS = {"fast": 6, "thorough": 32}
_POLISH_STEPS = 2000
_SMALL = 1000
_WORTH = {"fast": 0.01, "thorough": 0.002}
"""Without a pipeline, packings are annealed where work alone leaves room for a plan that is faster by this share."""
_STEPS_FOR_A_SAMPLE, _STEPS_FOR_A_LANE, _FEWEST_STEPS, _MOST_STEPS = 4, 80, 6000, 20_000
"""Moves of each first walk."""
_GAINED = 0.9995
"""In a fast search a longer walk follows where the first ones gain as much."""
_WALKS = {"fast": (4, 5), "thorough": (10, 30)}
"""Walks at most, and how many times as long as the first ones the others are."""
_SHARES = {"fast": 0.05, "thorough": 0.4}
"""Of the makespan: no more time than this is spent, at `_NS_OF_A_MOVE`, counted in moves."""
_NS_OF_A_MOVE = 500
_NUM_STARTS, _MORE_ROWS = 3, 1.1
"""Walks start from the best packings of two numbers of rows, and of one that is larger by this factor."""
_SLOWER_BY_THE_RING = 1.05
"""What a packing for the ring may last, in times of the best plan: with the fastest exchanges it takes less."""


class Candidate(NamedTuple):
    """A packing, its makespan in nanoseconds, its name for the user, and what chooses its exchanges."""

    makespan_ns: int
    name: str
    packing: Packing
    cost_model: CostModel


class Judged(NamedTuple):
    """A candidate with what its buckets exchange.

    Attributes:
        candidate: which one.
        prices: of `priced`, with rows of the buckets that pass on states.
        grid: its durations; makespan_ns: what they come to.
        num_states: buckets that pass on states, among the `num_shared` that have several lanes.
        num_too_large: buckets that should pass on states, but whose states do not fit.
    """

    candidate: Candidate
    priced: PricedPacking
    prices: CostModel
    grid: Grid
    makespan_ns: int
    num_states: int = 0
    num_shared: int = 0
    num_too_large: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        """Less is better: passing on states where the run asks for it comes before time."""
        return self.num_too_large, self.makespan_ns

    @property
    def in_words(self) -> str:
        """What it adds to the reason of a plan."""
        if not (self.num_states or self.num_too_large):
            return ""
        too_large = f", those of {self.num_too_large} do not fit under the token limit" if self.num_too_large else ""
        return (
            f"; {self.num_states} of {self.num_shared} shared buckets pass on states{too_large}: "
            f"{self.makespan_ns / 1e9:.6f} s"
        )


def as_packed(candidate: Candidate, priced: PricedPacking) -> Judged:
    """Return a candidate none of whose buckets passes on states."""
    # The grid of the packing is the grid of the plan, and much faster to make.
    grid = grid_of_priced(priced, candidate.cost_model)
    return Judged(candidate, priced, candidate.cost_model, grid, candidate.makespan_ns)


class Batch(NamedTuple):
    """Samples descending by seqlen, ties by ascending sample_id; as arrays; positions in the order of sample_id."""

    samples: list[Sample]
    lengths: Lengths
    input_order: Ints


class Search:
    """The candidates of one global batch."""

    def __init__(self, batch: Batch, cost_model: CostModel) -> None:
        self.batch = batch
        self.longest, self.lengths, self.input_order = batch.samples[0], batch.lengths, batch.input_order
        self.cost_model = cost_model
        num_lanes = cost_model.topology.num_lanes
        self.durations: Durations = durations_of(cost_model.table, num_lanes)
        # Where lanes share experts, level is also what is level without them.
        self.apart = apart_durations_of(cost_model.table, num_lanes) if cost_model.topology.expert_lanes > 1 else None
        self._held: dict[int, Search] = {}  # by CP size
        self._of_static: dict[int, list[Candidate]] = {}

    def ranking(self, policy: str, best_ns: float = np.inf) -> list[Candidate]:
        """Return all candidates, the fastest first; of dynamic plans of pipelines those that may beat `best_ns`."""
        found = sorted(self.candidates(policy, best_ns), key=lambda one: one.makespan_ns)
        if policy == "dynamic" and found:
            found = sorted([*found, *self.improved(found)], key=lambda one: one.makespan_ns)
            better = self._better_static(found[0].makespan_ns, improved=True)
            found = sorted([*found, *better], key=lambda one: one.makespan_ns)
        return found

    def by_the_ring(self, best_ns: float) -> Iterator[Candidate]:
        """Yield the best packing of a fast search for the ring alone: with each bucket's fastest exchange, and as is.

        Prices of all exchanges can lead a search to slower plans; with this one plans are never slower than the ring's.
        """
        search = Search(self.batch, self.cost_model.with_only(Ring.name, search="fast"))
        for best in search.ranking("dynamic", _SLOWER_BY_THE_RING * best_ns)[:1]:
            name = f"{best.name} as ring"
            yield self._judged(name, best.packing)
            yield best._replace(name=name)

    def candidates(self, policy: str, best_ns: float = np.inf) -> Iterator[Candidate]:
        """Yield at least one candidate, unless some are too slow for `best_ns`."""
        if policy == "dynamic":
            found = [*self._dynamic(best_ns)]
            for others in (self._megatron_dev, self._better_static):
                found += others(min([best_ns, *(one.makespan_ns for one in found)]))
            yield from found
            yield from self._shortened(found)
        elif policy == "megatron-dev":
            yield from self._megatron_dev()
        else:
            cp_size = self._static_cp_size()
            found = [*self._static(cp_size, policy)]
            yield from found
            if policy == "balanced":
                yield from self._improved_static(cp_size, found)

    def _shortened(self, found: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield candidates without their micro-batches that are padding on every lane, if interleaving needs fewer."""
        multiple = self.cost_model.topology.num_microbatches_multiple
        for one in found:
            num_filled = int(np.count_nonzero(np.bincount(one.packing.rows[one.packing.bucket_of_sample])))
            dropped = num_microbatches_of(one.packing, self.cost_model) - round_up(num_filled, multiple)
            if dropped:
                yield self._judged(f"{one.name} without {dropped} empty", without_empty_rows(one.packing))

    def _static_cp_size(self) -> int:
        """Return the CP size of the static policies: the one asked for, else the smallest that may be."""
        topology, options = self.cost_model.topology, self.cost_model.options
        cp_size = options.static_cp_size
        if cp_size is None:
            return next(cp for cp in allowed_cp_sizes(topology, options) if self._may_be_static(cp))
        check_static_cp_size(cp_size, self.longest, topology, options)
        self.cost_model.cost(cp_size, 0, 1.0, 1.0)  # refuses a CP size that no allowed exchange can serve
        return cp_size

    def _better_static(self, best_ns: float, *, improved: bool = False) -> Iterator[Candidate]:
        """Yield the static packings of every CP size that could be faster than `best_ns`, or these improved."""
        may_improve = self.cost_model.topology.pp_size == 1 or self._may_be_small(1)
        if improved and not may_improve:
            return
        for cp_size in allowed_cp_sizes(self.cost_model.topology, self.cost_model.options):
            if not self._may_be_static(cp_size) or best_ns <= self._least_static_ns(cp_size.bit_length() - 1):
                continue
            if cp_size not in self._of_static:
                self._of_static[cp_size] = [*self._static(cp_size, "dynamic", np.inf if may_improve else best_ns)]
            found = self._of_static[cp_size]
            for one in self._improved_static(cp_size, found) if improved else found:
                yield one
                best_ns = min(best_ns, one.makespan_ns)

    def _static(self, cp_size: int, policy: str, best_ns: float = np.inf) -> Iterator[Candidate]:
        """Yield the packings of one CP size below `best_ns`: next-fit, those of all packers, or if dynamic both."""
        topology = self.cost_model.topology
        k = cp_size.bit_length() - 1
        durations = self._static_durations(k)
        next_fit = pack_next_fit(
            self.lengths.seqlens, self.input_order, durations, k, topology.num_lanes, topology.num_microbatches_multiple
        )
        if policy != "balanced":
            yield from self._ordered(f"static cp={cp_size} m={next_fit.num_rows}", next_fit, ("as packed",), best_ns)
        if policy != "static":
            yield from self._balanced(durations, k, best_ns)
            if self.apart is not None:
                apart = self.apart._replace(capacities=durations.capacities)
                yield from self._balanced(apart, k, best_ns, "balanced apart")
            found = [*self._held_to(cp_size)._dynamic(best_ns, is_static=True)]
            found += self._shortened(found)
            yield from (one._replace(name=f"cp={cp_size} {one.name}") for one in found)

    def _held_to(self, cp_size: int) -> Search:
        """Return the search of plans of one CP size."""
        if cp_size not in self._held:
            k = cp_size.bit_length() - 1
            capacity = int(self._static_durations(k).capacities[k])
            self._held[cp_size] = Search(self.batch, self.cost_model.held_to(k, capacity))
        return self._held[cp_size]

    def _improved_static(self, cp_size: int, found: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield improved packings of one CP size, next-fit apart: in all policies the same ones."""
        ranking = sorted(found, key=lambda one: one.makespan_ns)
        yield from self._held_to(cp_size).improved([one for one in ranking if not one.name.startswith("static")])

    def improved(self, ranking: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield improved packings, from the best candidates with different numbers of rows; ranking: fastest first."""
        is_plain = self.cost_model.topology.pp_size == self.cost_model.topology.expert_lanes == 1
        yield from self.annealed(ranking) if is_plain else self.polished(ranking)

    def annealed(self, ranking: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield packings without a pipeline that annealing improves, where work alone leaves room for a faster one."""
        effort = self.cost_model.options.search
        (most_walks, times), best = _WALKS[effort], ranking[0]
        steps_left = int(_SHARES[effort] * best.makespan_ns / _NS_OF_A_MOVE)
        for_lanes = _STEPS_FOR_A_LANE * self.cost_model.topology.num_lanes
        num_steps = max(_FEWEST_STEPS, _STEPS_FOR_A_SAMPLE * len(self.lengths.seqlens), for_lanes)
        num_steps = min(_MOST_STEPS, num_steps)
        best_of_rows = {one.packing.num_rows: one for one in reversed(ranking)}
        for walk in range(most_walks):
            num_steps = min(num_steps, steps_left)
            steps_left -= num_steps
            if num_steps == 0 or not self._has_room(best.makespan_ns * (1 - _WORTH[effort])):
                return
            from dynamic_cp.packing.anneal import anneal

            first, *others = sorted(best_of_rows.values(), key=lambda one: one.makespan_ns)
            more_rows = [one for one in others[1:] if one.packing.num_rows > _MORE_ROWS * first.packing.num_rows]
            starts = [first, *others[:1], *more_rows[:1]]
            start = starts[walk % len(starts)] if effort == "thorough" or walk < _NUM_STARTS else best
            packing = anneal(self.lengths, start.packing, self.cost_model, num_steps, walk)
            found = self._judged(self._renamed(start, packing, " annealed"), packing)
            known = best_of_rows.get(packing.num_rows, found)
            best_of_rows[packing.num_rows] = min(found, known, key=lambda one: one.makespan_ns)
            if found.makespan_ns < best.makespan_ns:
                yield found
            best = min(found, best, key=lambda one: one.makespan_ns)
            if walk == _NUM_STARTS - 1:
                num_steps *= times
                if effort == "fast" and best.makespan_ns > _GAINED * ranking[0].makespan_ns:
                    return

    def _has_room(self, limit_ns: float) -> bool:
        """Return whether the least work of all samples, without a pipeline, fits into plans of `limit_ns`.

        A sample has the ways in which its bucket alone fits, and its exchange hides.
        """
        table, topology = self.cost_model.table, self.cost_model.topology
        tokens, squares = self.lengths.seqlens.astype(np.float64), self.lengths.squares
        sizes = np.flatnonzero(self.durations.capacities).tolist()
        first, end = table.first_option, table.end_option
        of_size = {k: sorted({row for link in (0, 1) for row in range(first[k, link], end[k, link])}) for k in sizes}
        floor_s = min(float(linear_parts(table.level_terms[rows]).sum(axis=1)[:, 0].min()) for rows in of_size.values())
        least_s = np.full(len(tokens), np.inf)
        for k, rows in of_size.items():
            # Samples behind the last one that has no way yet have none with less work.
            end_of_long = int(np.flatnonzero(np.isinf(least_s)).max(initial=-1)) + 1
            long, long2 = tokens[:end_of_long], squares[:end_of_long]
            edges_s = table.slowest_s_per_token / (1 << k) * long
            for row in rows:
                alone_s = prices_of(table.level_terms[row], long[:, None], long2[:, None]).sum(axis=1) + edges_s
                constant, per_token, per_token2 = linear_parts(table.level_terms[row]).sum(axis=0).tolist()
                work_s = per_token * long + per_token2 * long2 + edges_s
                work_s = (1 << k) * (work_s + (constant - floor_s) / table.capacities[k] * long)
                fits = (long <= table.capacities[k]) & (1e9 * alone_s <= limit_ns)
                np.minimum(least_s[:end_of_long], work_s, out=least_s[:end_of_long], where=fits)
        num_lanes = topology.num_lanes >> sizes[0] << sizes[0]
        num_rows = fewest_rows(self.lengths.seqlens, self.durations, sizes[0], topology.num_lanes)
        return bool(1e9 * (least_s.sum() / num_lanes + num_rows * floor_s) <= limit_ns)

    def polished(self, ranking: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield improved packings of a small batch, from the best candidates with different numbers of rows."""
        best_of_rows = {one.packing.num_rows: one for one in reversed(ranking)}
        for walk in range(_NUM_WALKS[self.cost_model.options.search]):
            starts = sorted(best_of_rows.values(), key=lambda one: one.makespan_ns)[:_NUM_POLISHED]
            start = starts[walk % len(starts)]
            if not self._is_small(start.packing):
                continue
            from dynamic_cp.packing.polish import polish

            found_ns, packing = polish(self.lengths, start.packing, self.cost_model, _POLISH_STEPS, walk)
            found = Candidate(found_ns, self._renamed(start, packing, " polished"), packing, self.cost_model)
            if found.makespan_ns < start.makespan_ns:
                yield found
            if found.makespan_ns < best_of_rows.get(packing.num_rows, start).makespan_ns:
                best_of_rows[packing.num_rows] = found

    def _renamed(self, start: Candidate, packing: Packing, suffix: str) -> str:
        """Return the name of what became of `start`, with the number of micro-batches that are left."""
        number = f"m={num_microbatches_of(packing, self.cost_model)}"
        return re.sub(r"\bm=\d+", number, start.name.removesuffix(suffix) + suffix)

    def _is_small(self, packing: Packing) -> bool:
        """Return whether a step of polishing costs a microsecond or two, so that thousands are worth it."""
        return self._may_be_small(num_microbatches_of(packing, self.cost_model))

    def _may_be_small(self, num_microbatches: int) -> bool:
        topology = self.cost_model.topology
        operations = 2 * topology.pp_size * topology.vp_size * num_microbatches
        return operations * topology.num_lanes + 8 * len(self.lengths.seqlens) <= _SMALL

    def _dynamic(self, best_ns: float = np.inf, *, is_static: bool = False) -> Iterator[Candidate]:
        """Yield what packers make of the allowed CP sizes (is_static: of one), below `best_ns` with a pipeline."""
        topology = self.cost_model.topology
        base = int(np.flatnonzero(self.durations.capacities)[0])
        fewest = fewest_rows(self.lengths.seqlens, self.durations, base, topology.num_lanes)
        totals = float(self.lengths.seqlens.sum()), float(self.lengths.squares.sum())
        empty_ns = bucket_ns(self.durations, base, 0.0, 0.0)
        share_ns = (bucket_ns(self.durations, base, *totals) - empty_ns) / (topology.num_lanes >> base)
        if topology.pp_size == 1:
            quota_ns = share_ns + fewest * empty_ns
            counts = row_counts(self.lengths, self.durations, topology.num_lanes, fewest, quota_ns)
            if topology.expert_lanes > 1:
                from dynamic_cp.packing.level import pack_level

                for name, packing in pack_level(self.lengths, self.cost_model, base, fewest):
                    yield self._judged(name, packing)
        else:
            from dynamic_cp.packing.lane_blocks import EFFORTS, OF_ONE_SIZE, pack_blocks

            counts = sorted({ceil(factor * fewest) for factor in _PIPELINE_NESTED_SWEEP})
            for effort in (OF_ONE_SIZE,) if is_static else EFFORTS[self.cost_model.options.search]:
                for one in pack_blocks(self.lengths, self.cost_model, fewest, effort, best_ns):
                    yield Candidate(one.makespan_ns, one.name, one.packing, self.cost_model)
        pack = partial(pack_nested, self.lengths, self.durations, topology.num_lanes)
        packed = [pack(num_rows, share_ns + num_rows * empty_ns) for num_rows in counts]
        found = [one for one in packed if one is not None]
        if topology.pp_size == 1:
            found = sorted(found, key=lambda one: one[0])[:_NUM_NESTED_JUDGED]
        for _, packing in found:
            yield from self._ordered(f"nested m={packing.num_rows}", packing, ("pyramid",), best_ns)

    def _megatron_dev(self, best_ns: float = np.inf) -> Iterator[Candidate]:
        topology, limit = self.cost_model.topology, self.cost_model.options.max_tokens_per_rank
        for divisor in _MEGATRON_DEV_LIMITS:
            packing = pack_megatron_dev(
                self.lengths.seqlens, self.cost_model.table, topology.num_lanes, max(1, limit // divisor),
                topology.num_microbatches_multiple,
            )  # fmt: skip
            name = f"megatron-dev limit={limit // divisor} m={packing.num_rows}"
            yield from self._ordered(name, packing, best_ns=best_ns if topology.pp_size > 1 else np.inf)

    def _balanced(
        self, durations: Durations, k: int, best_ns: float = np.inf, name: str = "balanced"
    ) -> Iterator[Candidate]:
        topology = self.cost_model.topology
        fewest = fewest_rows(self.lengths.seqlens, durations, k, topology.num_lanes)
        multiple = topology.num_microbatches_multiple
        num_rows = 0
        for factor in _BALANCED_SWEEP:
            if ceil(factor * fewest) <= num_rows:
                continue
            num_rows = round_up(ceil(factor * fewest), multiple)
            # Samples may fill over half a bucket each; with a bucket for each there is room.
            while (packing := pack_balanced(self.lengths, durations, k, topology.num_lanes, num_rows)) is None:
                num_rows += multiple
            yield from self._ordered(f"{name} cp={1 << k} m={num_rows}", packing, best_ns=best_ns)

    def _ordered(
        self, name: str, packing: Packing, orders: Sequence[str] = ORDERS, best_ns: float = np.inf
    ) -> Iterator[Candidate]:
        """Yield `packing` with its rows in each of `orders`; nothing, where none could be faster than `best_ns`."""
        if self._is_small(packing):
            best_ns = np.inf  # what is slow now may be the best one to polish
        for found_ns, order, one in in_orders(self.lengths, packing, self.cost_model, orders, best_ns):
            yield Candidate(found_ns, name if order == "as packed" else f"{name} {order}", one, self.cost_model)

    def _judged(self, name: str, packing: Packing) -> Candidate:
        return Candidate(makespan_ns(self.lengths, packing, self.cost_model), name, packing, self.cost_model)

    def _may_be_static(self, cp_size: int) -> bool:
        """Return whether a static policy at `cp_size` is one that the dynamic policy could also choose."""
        is_allowed = cp_size in allowed_cp_sizes(self.cost_model.topology, self.cost_model.options)
        return is_allowed and self.longest.seqlen <= int(self.cost_model.table.capacities[cp_size.bit_length() - 1])

    def _static_durations(self, k: int) -> Durations:
        """Return the durations with the capacity of CP size 2^k, which min_cp_size and max_cp_size do not bind."""
        topology, options = self.cost_model.topology, self.cost_model.options
        capacities = self.durations.capacities.copy()
        capacities[k] = capacity_tokens(1 << k, topology, options)
        return self.durations._replace(capacities=capacities)

    def _least_static_ns(self, k: int) -> float:
        """Return nanoseconds below which no plan is that has CP size 2^k everywhere: by its work or longest sample."""
        table, topology = self.cost_model.table, self.cost_model.topology
        rows = slice(table.first_option[k].min(), table.end_option[k].max())  # every exchange on every link
        tokens, squares = self.lengths.seqlens, self.lengths.squares
        # A price is above its linear part, and above that with any exchange as if no work hid it: the mean says which.
        linear = linear_parts(table.level_terms[rows]).sum(axis=1)
        weight, a, b, c = kinks_of(table.level_terms[rows])
        weight = weight * (b * tokens.sum() > c * squares.sum())
        lines = linear + np.stack([weight * np.minimum(a, 0.0), weight * b, -weight * c], axis=-1).sum(axis=(1, 2))
        # Padding adds tokens and squares, so both must count for something.
        lines = np.where((lines < 0.0).any(axis=1, keepdims=True), linear, lines)
        # Every stage computes this; the slowest one the edges in addition.
        lines[:, 1] += table.slowest_s_per_token / (1 << k)
        work_s = (lines[:, 1:] @ np.stack([tokens, squares])).min(axis=0).sum()
        num_rows = fewest_rows(tokens, self._static_durations(k), k, topology.num_lanes)
        least_s = work_s / (topology.num_lanes >> k) + lines[:, 0].min() * num_rows
        if topology.expert_lanes == 1:  # else other lanes decide what experts take
            # The bucket of the longest sample passes through all stages and back.
            alone_s = prices_of(table.level_terms[rows], tokens[0], squares[0]).sum(axis=1).min()
            least_s = max(least_s, topology.pp_size * alone_s)
        # An operation is rounded to whole nanoseconds, by at most half of one; no row is without samples.
        rounding_ns = (topology.vp_size + 2) * max(len(tokens), topology.pp_size)
        return 1e9 * float(least_s) * (1 - 1e-9) - rounding_ns


def batch_of(samples: Sequence[Sample], model: ModelShape) -> Batch:
    """Return `samples` descending by seqlen, ties by ascending sample_id; InvalidInputError: none, or an id twice."""
    if not samples:
        raise InvalidInputError("the global batch has 0 samples, at least 1 is needed: give samples")
    ids = np.array([sample.sample_id for sample in samples], np.int64)
    seqlens = np.array([sample.seqlen for sample in samples], np.int64)
    order = np.lexsort((ids, -seqlens))
    ids, descending = ids[order], [samples[index] for index in order.tolist()]
    input_order = np.argsort(ids)
    twice = np.flatnonzero(np.diff(ids[input_order]) == 0)
    if twice.size:
        one, other = (descending[input_order[twice[0] + offset]] for offset in (0, 1))
        raise InvalidInputError(
            f"sample_id {one.sample_id} is there twice, with {one.seqlen} and {other.seqlen} tokens: "
            "number the samples of a global batch uniquely",
            sample_id=one.sample_id,
        )
    return Batch(descending, Lengths(seqlens[order], densities_of(descending, model)), input_order)
