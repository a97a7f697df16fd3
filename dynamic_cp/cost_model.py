"""Seconds of one bucket on one pipeline stage: linear layers, attention, exposed exchange, fixed overheads.

The price of a bucket is NOT the sum of its samples' prices: the exchange of the whole bucket hides behind the attention
of the whole bucket. For a fixed CP size it is convex, piecewise linear and increasing in (tokens, tokens squared).

    linear    = LIN * (tokens / cp + T0)                              T0: a short pack does not fill the device
    attention = ATT * (tokens_squared / cp + C0 * tokens)             C0: short chunks lose efficiency
    step      = tokens / cp * KV + LAT                                one exchange step (cp > 1)
    exposed   = (cp - 1) * max(0, step - attention / cp)              p2p ring
              = (cp - 1) * step                                       all_gather: hides behind nothing
    forward   = overhead + linear + attention + exposed
    backward  = overhead + linear, attention, exposed at their backward ratios + what recomputation repeats

Structure matters most: planning by tokens squared alone costs 1.2 to 8.8 times the step time and ignoring the exchange
1.03 to 1.8 times, while a 20 % error in one coefficient costs at most 4 %.
"""

from __future__ import annotations

from typing import NamedTuple

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.padding import padded_seqlens
from dynamic_cp.types import Bucket, Hardware, ModelShape, PlanOptions, Topology

PRICED_CP_COMM_TYPES = ("p2p", "all_gather")


def nanoseconds(seconds: float) -> int:
    """Return `seconds` in whole nanoseconds: every comparison of the planner is one of integers."""
    return round(seconds * 1e9)


class BucketCost(NamedTuple):
    """Seconds of one bucket on one pipeline stage, all its model chunks together.

    Attributes:
        forward_s, backward_s: compute and exposed exchange; backward_s includes recomputation.
        p2p_s: delay of one hop to the next pipeline stage (0 without pipelining).
    """

    forward_s: float
    backward_s: float
    p2p_s: float


class CostModel:
    """Prices buckets of one model on one kind of device.

    Args:
        model: shape of the GPT.
        hardware: coefficients, each with its source in `dynamic_cp/data/hardware/`.
        topology: tensor, pipeline and lane layout.
        options: exchange type, recomputation and bytes of an element.

    Raises:
        UnsupportedFeatureError: for an exchange that has no price yet.

    Limits: embedding, LM head, loss, optimizer and gradient reduction are not priced; all stages are alike
    (num_layers / pp_size layers); TP collectives count only through the linear efficiency; no link contention; the
    zigzag split of a sample over its group is taken as perfectly even.
    """

    def __init__(self, model: ModelShape, hardware: Hardware, topology: Topology, options: PlanOptions) -> None:
        self.topology = topology
        self.options = options
        self._check_cp_comm_type(options.cp_comm_type)
        tp_size = topology.tp_size
        layers = model.num_layers / topology.pp_size
        self._linear_s_per_token = layers * 2 * model.linear_weights_per_layer / hardware.linear_flops_per_s / tp_size
        # A causal forward has 2 * query_size flops per squared token: half of QK^T and PV together.
        self._attention_s_per_token2 = layers * 2 * model.query_size / hardware.attention_flops_per_s / tp_size
        # With fewer KV heads than TP ranks every rank keeps a whole head.
        kv_channels_of_rank = max(model.kv_size / tp_size, model.kv_channels)
        kv_bytes_per_token = layers * 2 * kv_channels_of_rank * options.bytes_per_element
        self._step_s_per_token_in_node = kv_bytes_per_token / hardware.bandwidth_in_node_bytes_per_s
        self._step_s_per_token_across = kv_bytes_per_token / hardware.bandwidth_across_nodes_bytes_per_s
        self._step_latency_s = layers * hardware.exchange_latency_s_per_layer
        self._forward_overhead_s = layers * hardware.forward_overhead_s_per_layer + hardware.overhead_s_per_bucket_stage
        self._backward_overhead_s = (
            layers * hardware.backward_overhead_s_per_layer + hardware.overhead_s_per_bucket_stage
        )
        # Only sequence parallelism splits the activations that pipeline stages exchange over the TP ranks.
        p2p_split = tp_size if topology.sequence_parallel else 1
        p2p_bytes_per_token = model.hidden_size * options.bytes_per_element / p2p_split
        self._p2p_s_per_token = (
            p2p_bytes_per_token / hardware.p2p_bandwidth_bytes_per_s if topology.pp_size > 1 else 0.0
        )
        self._hardware = hardware

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

    def duration_ns(self, cp_size: int, first_lane: int, tokens: float, tokens_squared: float) -> int:
        """Return forward + backward of one stage in whole nanoseconds, for comparisons."""
        forward_s, backward_s, _ = self.cost(cp_size, first_lane, tokens, tokens_squared)
        return nanoseconds(forward_s + backward_s)

    def cost(
        self,
        cp_size: int,
        first_lane: int,
        tokens: float,
        tokens_squared: float,
        *,
        cp_comm_type: str | None = None,
    ) -> BucketCost:
        """Return the seconds of a bucket from its sums.

        Args:
            cp_size: lanes of the group.
            first_lane: its first lane; decides which link the exchange uses.
            tokens: sum of the (padded) lengths.
            tokens_squared: sum of the squares of the (padded) lengths.
            cp_comm_type: exchange; None = the one of the options.
        """
        hardware = self._hardware
        rank_tokens = tokens / cp_size
        linear_s = self._linear_s_per_token * (rank_tokens + hardware.linear_extra_tokens)
        attention_s = self._attention_s_per_token2 * (
            tokens_squared / cp_size + hardware.attention_extra_tokens * tokens
        )
        exposed_forward_s = exposed_backward_s = 0.0
        if cp_size > 1:
            if cp_comm_type is not None and cp_comm_type != self.options.cp_comm_type:
                self._check_cp_comm_type(cp_comm_type)
            across = self.topology.spans_nodes(first_lane, cp_size)
            step_s_per_token = self._step_s_per_token_across if across else self._step_s_per_token_in_node
            step_s = rank_tokens * step_s_per_token + self._step_latency_s
            hiding_s = attention_s / cp_size if (cp_comm_type or self.options.cp_comm_type) == "p2p" else 0.0
            exposed_forward_s = (cp_size - 1) * max(0.0, step_s - hiding_s)
            exposed_backward_s = (cp_size - 1) * max(
                0.0,
                hardware.exchange_backward_over_forward * step_s - hardware.attention_backward_over_forward * hiding_s,
            )
        forward_s = self._forward_overhead_s + linear_s + attention_s + exposed_forward_s
        if self.options.recompute == "full":
            repeated_s = forward_s - hardware.recompute_overhead_credit * self._forward_overhead_s
        elif self.options.recompute == "selective":
            repeated_s = attention_s + exposed_forward_s
        else:
            repeated_s = 0.0
        backward_s = (
            self._backward_overhead_s
            + hardware.linear_backward_over_forward * linear_s
            + hardware.attention_backward_over_forward * attention_s
            + exposed_backward_s
            + repeated_s
        )
        return BucketCost(forward_s, backward_s, rank_tokens * self._p2p_s_per_token)

    @staticmethod
    def _check_cp_comm_type(cp_comm_type: str) -> None:
        if cp_comm_type not in PRICED_CP_COMM_TYPES:
            raise UnsupportedFeatureError(
                f"--cp-comm-type {cp_comm_type} has no price yet: use one of {', '.join(PRICED_CP_COMM_TYPES)}",
                cp_comm_type=cp_comm_type,
            )
