"""Seconds of one bucket on one pipeline stage: linear layers, attention, exposed exchange, edges, fixed overheads.

A bucket's price is NOT the sum of its samples' prices: its whole exchange hides behind its whole attention. For a fixed
CP size it is convex, piecewise linear and increasing in (tokens, tokens squared). `stage.py` has the formulas,
`mechanisms/` those of attention.

Structure matters most: plans made by tokens squared alone take 1.2 to 8.8 times the step time, those that ignore the
exchange 1.03 to 1.8 times, but those with a 20 % error in one coefficient at most 1.04 times (planner experiments on
the frozen cost model, 2026-11-20).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.mechanisms.registry import MECHANISMS, attentions_of
from dynamic_cp.plans.padding import lane_tokens, padded_of
from dynamic_cp.pricing.allowed import token_capacity
from dynamic_cp.pricing.edges import Reduction
from dynamic_cp.pricing.stage import StagePrices, make_table
from dynamic_cp.pricing.table import best_option, duration_ns, price
from dynamic_cp.pricing.work import squared_tokens
from dynamic_cp.types import (
    Attention,
    Bucket,
    CpCommType,
    MicroBatch,
    Problem,
    SearchEffort,
    check_latents,
)


def nanoseconds(seconds: float) -> int:
    """Return `seconds` in whole nanoseconds, so that every comparison of the planner is one of integers."""
    return round(seconds * 1e9)


class BucketCost(NamedTuple):
    """Seconds of each lane of one bucket on one pipeline stage, all its model chunks together.

    Attributes:
        forward_s, backward_s: compute and exposed exchange; backward_s includes recomputation.
        p2p_s: delay of one hop to the next pipeline stage (0 without pipelining).
        embedding_forward_s, embedding_backward_s: paid in addition by the first virtual stage.
        head_forward_s, head_backward_s: paid in addition by the last virtual stage, loss included.
    """

    forward_s: float
    backward_s: float
    p2p_s: float
    embedding_forward_s: float = 0.0
    embedding_backward_s: float = 0.0
    head_forward_s: float = 0.0
    head_backward_s: float = 0.0


class CostModel:
    """Prices buckets of one model on one kind of device.

    Attributes:
        table: all prices as arrays.
        attentions: row of `table.terms` -> how the lanes of a bucket that pays it compute attention.
        first_row_of_states: from this row of `table.terms` on, buckets pass on states (`with_rows`).
        stage: prices of a stage by their parts, for what is not priced bucket by bucket.
        state_shifts, mask, sharing: those of the stage.
        reduction: of gradients, and gathering of parameters, once a step.

    Args:
        problem: model, hardware (`dynamic_cp/data/hardware/` has each coefficient with its source), topology, and of
            the options exchanges, recomputation, bytes of an element and limits.

    Raises:
        UnsupportedFeatureError: no allowed CP size can use any of the exchanges, or latents of a model that has none.

    Limits: the optimizer step is not priced; all stages are priced as the one with most weights; no link contention."""

    def __init__(self, problem: Problem) -> None:
        self.model, self.topology, self.options = problem.model, problem.topology, problem.options
        check_latents(self.options.cp_comm_types, self.model.kv_lora_rank)
        self.stage = StagePrices(problem)
        self.sharing = self.stage.sharing
        self.reduction = Reduction.of(problem)
        self.table, self.attentions = make_table(problem, self.stage)
        self.first_row_of_states = len(self.attentions)
        self.state_shifts, self.mask = self.stage.state_shifts, self.stage.mask
        if not self.table.capacities.any():
            for cp_size in (1 << k for k in range(len(self.table.capacities))):
                if token_capacity(cp_size, self.topology, self.options):
                    self._check_possible(self.options.cp_comm_types, cp_size)
        # A tuple, because indexing an array in every call would cost more than the price itself.
        self._edges = tuple(self.table.edges_s_per_token.tolist())

    def bucket_cost(self, bucket: Bucket) -> BucketCost:
        """Return the seconds of `bucket` with its padding; an empty place costs its minimal padding sequence. Experts
        shared with other lanes are not in it: their time depends on all these lanes (`longest_path.couple_lanes`)."""
        padded = padded_of(bucket, self.topology.rank_token_multiple)
        squares = squared_tokens(bucket.samples, padded, self.model)
        place = bucket.cp_size, bucket.first_lane
        terms, row = self._price(*place, sum(padded), squares, *bucket.attention, is_level=False)
        if bucket.exchanges_states:
            terms, row = terms[row] + self.states_over_heads([bucket]), 0
        return self._seconds(terms, row, bucket.cp_size, sum(padded), squares)

    @property
    def may_pass_on_states(self) -> bool:
        """Whether plans may have buckets that pass on states of linear attention."""
        return self.model.linear_attention is not None and self.options.state_exchange != "heads"

    def states_over_heads(self, buckets: Sequence[Bucket]) -> Floats:
        """Return by how much terms differ from those of exchanged heads, [bucket, forward or backward, NUM_TERMS]; 0
        for buckets that pass on no states. Raises UnsupportedFeatureError: a bucket passes on states of a model without
        linear attention."""
        from dynamic_cp.plans.stretches import samples_passed_on  # few jobs pass on states

        numbers = np.array([*map(samples_passed_on, buckets)])
        if numbers.any() and self.model.linear_attention is None:
            bucket = buckets[int(numbers.argmax())]
            raise UnsupportedFeatureError(
                f"the bucket at lane {bucket.first_lane} passes on states, and the model has no linear attention: "
                "leave state_exchange out"
            )
        places = np.array([self.place(one.cp_size, one.first_lane) for one in buckets], np.int64).reshape(-1, 2)
        return self.shifts_of_states(places[:, 0], places[:, 1], numbers)

    def shifts_of_states(self, log2_cp_sizes: Ints, links: Ints, num_samples: Ints | Floats) -> Floats:
        """Return `states_over_heads` of groups by their size and link; 0 where no samples are passed on."""
        shifts = self.state_shifts[log2_cp_sizes, links]
        numbers = num_samples[:, None, None]
        return np.where(numbers > 0, shifts[:, 0] + numbers * shifts[:, 1], 0.0)

    def with_rows(self, terms: Floats, level_terms: Floats, attentions: Sequence[Attention]) -> CostModel:
        """Return this model with more rows in its table, for buckets that pass on states."""
        other = copy(self)
        table = self.table
        other.attentions = (*self.attentions, *attentions)
        other.table = table._replace(
            terms=np.concatenate([table.terms, terms]), level_terms=np.concatenate([table.level_terms, level_terms])
        )
        return other

    def cost(
        self,
        cp_size: int,
        first_lane: int,
        tokens: float,
        tokens_squared: float,
        cp_comm_type: str | None = None,
        inner_cp_size: int | None = None,
    ) -> BucketCost:
        """Return the seconds of a bucket from its sums; other lanes that share its experts hold as many tokens.

        Args:
            cp_size, first_lane: of the group; both decide which link the exchange uses.
            tokens: sum of the (padded) lengths.
            tokens_squared: sum of the squares of the (padded) lengths, by density (`work.squared_tokens`).
            cp_comm_type: exchange; None = the fastest of the options.
            inner_cp_size: of the exchange; None = what it implies, a2a+p2p: the largest possible.

        Raises UnsupportedFeatureError: an exchange or inner size that this CP size cannot use."""
        terms, row = self._price(
            cp_size, first_lane, tokens, tokens_squared, cp_comm_type, inner_cp_size, is_level=True
        )
        return self._seconds(terms, row, cp_size, tokens, tokens_squared)

    def _seconds(self, terms: Floats, row: int, cp_size: int, tokens: float, tokens_squared: float) -> BucketCost:
        tokens, tokens_squared = float(tokens), float(tokens_squared)
        forward_s, backward_s = (price(terms, row, direction, tokens, tokens_squared) for direction in range(2))
        return self._with_edges(forward_s, backward_s, tokens / cp_size)

    def costs_lane_by_lane(
        self, bucket: Bucket, micro_batch: MicroBatch, *, with_padding: bool = True, with_exchange: bool = True
    ) -> list[BucketCost]:
        """Return the seconds of each lane of a bucket of `micro_batch` whose mechanism has no closed form.

        Args:
            with_padding: else lanes have even shares of the true tokens, which costs as much in the mean.
            with_exchange: else attention is its kernels alone.
        """
        seconds, tokens = self.seconds_lane_by_lane(
            bucket, micro_batch, with_padding=with_padding, with_exchange=with_exchange
        )
        forward_s, backward_s = seconds.tolist()
        return [self._with_edges(*lane) for lane in zip(forward_s, backward_s, tokens, strict=True)]

    def seconds_lane_by_lane(
        self,
        bucket: Bucket,
        micro_batch: MicroBatch,
        *,
        with_padding: bool = True,
        with_exchange: bool = True,
        with_host: bool = True,
    ) -> tuple[Floats, Sequence[float]]:
        """Return ([forward or backward, lane] seconds, tokens of each lane) of `costs_lane_by_lane`, without edges.
        With `with_host` a lane takes at least its host's time; without, placements with a slow host still differ."""
        tokens: Sequence[float] = [bucket.num_tokens / bucket.cp_size] * bucket.cp_size
        if with_padding:
            tokens = lane_tokens(bucket, self.topology.rank_token_multiple)
        how = {"with_exchange": with_exchange, "with_host": with_host}
        return self.stage.lane_costs(bucket, micro_batch, tokens, **how), tokens

    def _with_edges(self, forward_s: float, backward_s: float, rank_tokens: float) -> BucketCost:
        embedding_forward, embedding_backward, head_forward, head_backward = self._edges
        return BucketCost(
            forward_s,
            backward_s,
            rank_tokens * self.table.hop_s_per_token,
            rank_tokens * embedding_forward,
            rank_tokens * embedding_backward,
            rank_tokens * head_forward,
            rank_tokens * head_backward,
        )

    def duration_ns(self, cp_size: int, first_lane: int, tokens: float, tokens_squared: float) -> int:
        """Return forward + backward of `cost` on the slowest stage in whole nanoseconds, at the fastest exchange."""
        k, link = self.place(cp_size, first_lane)
        self._check_served(k, link)
        return int(duration_ns(self.table, k, link, float(tokens), float(tokens_squared)))

    def best_exchange(self, cp_size: int, first_lane: int, tokens: float, tokens_squared: float) -> Attention:
        """Return the fastest exchange of the options and its inner size; `Attention()` for cp_size 1."""
        return self.attentions[self._best_row(cp_size, first_lane, tokens, tokens_squared)]

    def with_only(self, cp_comm_type: CpCommType, search: SearchEffort | None = None) -> CostModel:
        """Return this model for buckets that use `cp_comm_type` wherever the options have it for their CP size;
        `search` replaces the effort of the options."""
        first, end = self.table.first_option.copy(), self.table.end_option.copy()
        for place in np.ndindex(first.shape):
            rows = [row for row in range(first[place], end[place]) if self.attentions[row].cp_comm_type == cp_comm_type]
            if rows:
                first[place], end[place] = rows[0], rows[-1] + 1
        other = copy(self)
        other.table = self.table._replace(first_option=first, end_option=end)
        other.options = replace(self.options, search=search or self.options.search)
        return other

    def held_to(self, k: int, capacity: int) -> CostModel:
        """Return this model for plans whose buckets all have the CP size 2^k and hold `capacity` tokens."""
        other = copy(self)
        capacities = np.zeros_like(self.table.capacities)
        capacities[k] = capacity
        other.table = self.table._replace(capacities=capacities)
        return other

    def row_of(self, cp_size: int, first_lane: int, cp_comm_type: str, inner_cp_size: int | None = None) -> int | None:
        """Return the row of the table that a bucket pays; None if the options do not have its exchange. inner_cp_size:
        None = the first, and largest, that the exchange has."""
        k, link = self.place(cp_size, first_lane)
        first, end = int(self.table.first_option[k, link]), int(self.table.end_option[k, link])
        if cp_size == 1:
            return first
        for row in range(first, end):
            if (cp_comm_type, inner_cp_size or self.attentions[row].inner_cp_size) == self.attentions[row]:
                return row
        return None

    def _price(
        self,
        cp_size: int,
        first_lane: int,
        tokens: float,
        tokens_squared: float,
        cp_comm_type: str | None,
        inner_cp_size: int | None,
        *,
        is_level: bool,
    ) -> tuple[Floats, int]:
        """Return (terms, the row of them that the bucket pays)."""
        table_terms = self.table.level_terms if is_level else self.table.terms
        if cp_comm_type is None or cp_size == 1:
            return table_terms, self._best_row(cp_size, first_lane, tokens, tokens_squared)
        row = self.row_of(cp_size, first_lane, cp_comm_type, inner_cp_size)
        if row is not None:
            return table_terms, row
        attention = self._check_possible((cp_comm_type,), cp_size, inner_cp_size)
        assert MECHANISMS[attention.cp_comm_type].has_closed_form, "`lane_costs` prices the others"
        link = self.place(cp_size, first_lane)[1]
        return np.array([self.stage.terms(attention, cp_size, link, is_level=is_level)]), 0

    def _best_row(self, cp_size: int, first_lane: int, tokens: float, tokens_squared: float) -> int:
        k, link = self.place(cp_size, first_lane)
        self._check_served(k, link)
        return int(best_option(self.table, k, link, float(tokens), float(tokens_squared)))

    def place(self, cp_size: int, first_lane: int) -> tuple[int, int]:
        """Return (log2 of the size, link) of a group."""
        k = cp_size.bit_length() - 1
        return k, int(self.table.links[k, first_lane >> k])

    def _check_served(self, k: int, link: int) -> None:
        if self.table.first_option[k, link] == self.table.end_option[k, link]:
            self._check_possible(self.options.cp_comm_types, 1 << k)

    def _check_possible(self, exchanges: tuple[str, ...], cp_size: int, inner_cp_size: int | None = None) -> Attention:
        """Return the first way in which a group can use one of `exchanges`, with this inner size if one is given."""
        known = [cast(CpCommType, name) for name in exchanges if name in MECHANISMS]
        for one in attentions_of(known, cp_size, self.sharing):
            if inner_cp_size in (None, one.inner_cp_size):
                return one
        inner = "" if inner_cp_size is None else f" with inner_cp_size {inner_cp_size}"
        raise UnsupportedFeatureError(
            f"cp_comm_types {' '.join(exchanges)}{inner} cannot serve a group of {cp_size} lanes: "
            f"{self.sharing.describe()}; {self.sharing.remedy}"
        )


def is_priced_lane_by_lane(bucket: Bucket) -> bool:
    """Return whether a bucket is priced by `CostModel.costs_lane_by_lane`, not from its tokens alone."""
    return bucket.cp_size > 1 and not MECHANISMS[bucket.cp_comm_type].has_closed_form


def lane_costs(micro_batch: MicroBatch, cost_model: CostModel) -> Iterator[tuple[int, BucketCost]]:
    """Yield (number of lanes, seconds of each of them) for neighbours that pay the same, in lane order. The price is
    exact: a bucket with a closed form is priced by itself, the others with all lanes in view."""
    for bucket in micro_batch.buckets:
        if is_priced_lane_by_lane(bucket):
            yield from ((1, cost) for cost in cost_model.costs_lane_by_lane(bucket, micro_batch))
        else:
            yield bucket.cp_size, cost_model.bucket_cost(bucket)
