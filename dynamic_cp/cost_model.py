"""Seconds of one bucket on one pipeline stage: linear layers, attention, exposed exchange, edges, fixed overheads.

The price of a bucket is NOT the sum of its samples' prices: the exchange of the whole bucket hides behind the attention
of the whole bucket. For a fixed CP size it is convex, piecewise linear and increasing in (tokens, tokens squared);
`price_table.py` has the formulas, `exchanges.py` those of attention.

Structure matters most: plans made by tokens squared alone take 1.2 to
8.8 times the step time and without the exchange 1.03 to 1.8 times, with a 20 % error in one coefficient at most 1.04
(planner experiments on the frozen cost model, 2026-11-20).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp import prices
from dynamic_cp.edges import gradient_reduction_s
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.exchanges import PRICED_CP_COMM_TYPES, AttentionPrices
from dynamic_cp.padding import padded_seqlens
from dynamic_cp.price_table import StagePrices, make_table, token_capacity
from dynamic_cp.types import Bucket, CpCommType, Hardware, ModelShape, PlanOptions, Topology


def nanoseconds(seconds: float) -> int:
    """Return `seconds` in whole nanoseconds: every comparison of the planner is one of integers."""
    return round(seconds * 1e9)


class BucketCost(NamedTuple):
    """Seconds of one bucket on one pipeline stage, all its model chunks together.

    Attributes:
        forward_s, backward_s: compute and exposed exchange; backward_s includes recomputation.
        p2p_s: delay of one hop to the next pipeline stage (0 without pipelining).
        embedding_forward_s, embedding_backward_s: what the first virtual stage pays in addition.
        head_forward_s, head_backward_s: what the last virtual stage pays in addition, loss included.
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
        exchanges: row of `table.terms` -> exchange.
        gradient_reduction_s: end-of-step reduction of gradients and gathering of parameters, an upper bound (they may
            overlap); it does not depend on the plan.

    Args:
        model: shape of the transformer.
        hardware: coefficients, each with its source in `dynamic_cp/data/hardware/`.
        topology: tensor, pipeline and lane layout.
        options: exchanges, recomputation, bytes of an element, limits.

    Raises:
        UnsupportedFeatureError: an exchange that has no price yet, or none that any allowed CP size can use.

    Limits: the optimizer step is not priced; all stages have num_layers / pp_size layers; no link contention.
    """

    def __init__(self, model: ModelShape, hardware: Hardware, topology: Topology, options: PlanOptions) -> None:
        self.topology = topology
        self.options = options
        for exchange in options.cp_comm_types:
            _check_priced(exchange)
        self._attention = AttentionPrices(model, hardware, topology, options)
        self._stage = StagePrices(model, hardware, topology, options, self._attention)
        self.gradient_reduction_s = gradient_reduction_s(model, hardware, topology, options)
        self.table, self.exchanges = make_table(model, hardware, topology, options, self._stage)
        if not self.table.capacities.any():
            for cp_size in (1 << k for k in range(len(self.table.capacities))):
                if token_capacity(cp_size, topology, options):
                    self._check_possible(options.cp_comm_types, cp_size)
        # Rows of the table one by one: indexing an array for every call would cost more than the price itself.
        self._terms = [(both[0], both[1]) for both in self.table.terms]
        self._edges = tuple(self.table.edges_s_per_token.tolist())

    def bucket_cost(self, bucket: Bucket) -> BucketCost:
        """Return the seconds of `bucket` with its padding; an empty place costs its minimal padding sequence."""
        padded = padded_seqlens(
            (sample.seqlen for sample in bucket.samples), bucket.cp_size, self.topology.rank_token_multiple
        )
        return self.cost(
            bucket.cp_size,
            bucket.first_lane,
            sum(padded),
            sum(tokens * tokens for tokens in padded),
            cp_comm_type=bucket.cp_comm_type,
        )

    def cost(
        self,
        cp_size: int,
        first_lane: int,
        tokens: float,
        tokens_squared: float,
        cp_comm_type: str | None = None,
    ) -> BucketCost:
        """Return the seconds of a bucket from its sums.

        Args:
            cp_size: lanes of the group.
            first_lane: its first lane; decides which link the exchange uses.
            tokens: sum of the (padded) lengths.
            tokens_squared: sum of the squares of the (padded) lengths.
            cp_comm_type: exchange; None = the fastest of the options.

        Raises:
            UnsupportedFeatureError: an exchange without a price, or one that this CP size cannot use.
        """
        forward, backward = self._both_terms(cp_size, first_lane, tokens, tokens_squared, cp_comm_type)
        tokens, tokens_squared = float(tokens), float(tokens_squared)
        rank_tokens = tokens / cp_size
        embedding_forward, embedding_backward, head_forward, head_backward = self._edges
        return BucketCost(
            prices.seconds(forward, tokens, tokens_squared),
            prices.seconds(backward, tokens, tokens_squared),
            rank_tokens * self.table.hop_s_per_token,
            rank_tokens * embedding_forward,
            rank_tokens * embedding_backward,
            rank_tokens * head_forward,
            rank_tokens * head_backward,
        )

    def duration_ns(self, cp_size: int, first_lane: int, tokens: float, tokens_squared: float) -> int:
        """Return forward + backward on the slowest stage in whole nanoseconds, as `prices.duration_ns`."""
        forward, backward = self._both_terms(cp_size, first_lane, tokens, tokens_squared, None)
        tokens, tokens_squared = float(tokens), float(tokens_squared)
        both_s = prices.seconds(forward, tokens, tokens_squared) + prices.seconds(backward, tokens, tokens_squared)
        return nanoseconds(both_s + self.table.slowest_s_per_token * tokens / cp_size)

    def best_cp_comm_type(self, cp_size: int, first_lane: int, tokens: float, tokens_squared: float) -> CpCommType:
        """Return the fastest exchange of the options; "p2p" for cp_size 1, which exchanges nothing."""
        return self.exchanges[self._best_row(cp_size, first_lane, tokens, tokens_squared)]

    def _both_terms(
        self, cp_size: int, first_lane: int, tokens: float, tokens_squared: float, cp_comm_type: str | None
    ) -> tuple[prices.Floats, prices.Floats]:
        """Return the [NUM_TERMS] of forward and backward."""
        if cp_comm_type is None or cp_size == 1:
            return self._terms[self._best_row(cp_size, first_lane, tokens, tokens_squared)]
        k, link = self._place(cp_size, first_lane)
        first, end = int(self.table.first_option[k, link]), int(self.table.end_option[k, link])
        for row in range(first, end):
            if self.exchanges[row] == cp_comm_type:
                return self._terms[row]
        _check_priced(cp_comm_type)
        self._check_possible((cp_comm_type,), cp_size)
        both = np.array(self._stage.terms(cp_comm_type, cp_size, link))
        return both[0], both[1]

    def _best_row(self, cp_size: int, first_lane: int, tokens: float, tokens_squared: float) -> int:
        k, link = self._place(cp_size, first_lane)
        first = int(self.table.first_option[k, link])
        num_options = int(self.table.end_option[k, link]) - first
        if num_options == 0:
            self._check_possible(self.options.cp_comm_types, cp_size)
        if num_options == 1:
            return first
        return int(prices.best_option(self.table, k, link, float(tokens), float(tokens_squared)))

    def _place(self, cp_size: int, first_lane: int) -> tuple[int, int]:
        k = cp_size.bit_length() - 1
        return k, int(self.table.links[k, first_lane >> k])

    def _check_possible(self, exchanges: tuple[str, ...], cp_size: int) -> None:
        if not any(self._attention.is_possible(exchange, cp_size) for exchange in exchanges):
            raise UnsupportedFeatureError(
                f"--cp-comm-type {' '.join(exchanges)} cannot serve a group of {cp_size} lanes: "
                f"{self._attention.a2a_rule()}; use p2p or auto",
                cp_comm_types=exchanges,
                cp_size=cp_size,
            )


def _check_priced(cp_comm_type: str) -> None:
    if cp_comm_type not in PRICED_CP_COMM_TYPES:
        raise UnsupportedFeatureError(
            f"--cp-comm-type {cp_comm_type} has no price yet: use one of {', '.join(PRICED_CP_COMM_TYPES)}",
            cp_comm_type=cp_comm_type,
        )
