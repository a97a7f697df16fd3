"""What one bucket costs on one pipeline stage, and the table of all these prices.

linear    = LIN * (tokens / cp + T0)          T0: a short pack does not fill the device
tensor    = TPC * tokens / cp                 collectives of tensor and sequence parallelism
attention, exposed                            `mechanisms/`
forward   = overhead + linear + tensor + attention + exposed
backward  = the same at their backward ratios + what recomputation repeats (full: forward; selective: attention and
            exposed)
"""

from __future__ import annotations

import numpy as np

from dynamic_cp.convex import Convex, Linear, merged
from dynamic_cp.mechanisms.attention_prices import AttentionPrices
from dynamic_cp.mechanisms.links import links_of
from dynamic_cp.padding import sample_multiple
from dynamic_cp.pricing.capacity import token_capacity
from dynamic_cp.pricing.edges import edges_s_per_token, tensor_s_per_token
from dynamic_cp.pricing.table import PriceTable
from dynamic_cp.pricing.terms import terms_of
from dynamic_cp.types import CpCommType, Hardware, ModelShape, PlanOptions, Topology

_ALONE: list[tuple[CpCommType, int]] = [("p2p", 1)]
"""What a bucket of one lane has for an exchange."""


class StagePrices:
    """One pipeline stage's layers: the numbers of one row of the table."""

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        topology: Topology,
        options: PlanOptions,
        attention: AttentionPrices,
    ) -> None:
        self.attention = attention
        self._hardware = hardware
        self._recompute = options.recompute
        layers = model.num_layers / topology.pp_size
        self._linear_s_per_token = (
            layers * 2 * model.linear_weights_per_layer / hardware.linear_flops_per_s / topology.tp_size
        )
        self._tensor_s_per_token = layers * tensor_s_per_token(model, hardware, topology, options)
        self._overheads_s = (
            layers * hardware.forward_overhead_s_per_layer + hardware.overhead_s_per_bucket_stage,
            layers * hardware.backward_overhead_s_per_layer + hardware.overhead_s_per_bucket_stage,
        )

    def terms(self, exchange: str, cp_size: int, inner: int, link: int) -> tuple[list[float], list[float]]:
        """Return the NUM_TERMS numbers of forward and of backward."""
        hardware = self._hardware
        attention, attention_back = self.attention.price(exchange, cp_size, inner, link)
        overhead_s, overhead_back_s = self._overheads_s
        floor_s = self._linear_s_per_token * hardware.linear_extra_tokens
        linear = Linear(floor_s, self._linear_s_per_token / cp_size)
        tensor = Linear(0.0, self._tensor_s_per_token / cp_size)
        forward = Linear(overhead_s).plus(linear).plus(tensor).plus(attention.linear)
        backward = Linear(overhead_back_s).plus(linear, hardware.linear_backward_over_forward).plus(tensor)
        backward = backward.plus(attention_back.linear)
        kinks = attention_back.kinks
        if self._recompute == "full":
            backward = backward.plus(forward).plus(Linear(-hardware.recompute_overhead_credit * overhead_s))
            kinks += attention.kinks
        elif self._recompute == "selective":
            backward = backward.plus(attention.linear)
            kinks += attention.kinks
        return terms_of(Convex(forward, attention.kinks)), terms_of(Convex(backward, merged(kinks)))


def make_table(
    model: ModelShape, hardware: Hardware, topology: Topology, options: PlanOptions, stage: StagePrices
) -> tuple[PriceTable, tuple[tuple[CpCommType, int], ...]]:
    """Return the table, and the exchange and inner size of each row of its terms.

    A CP size that none of the exchanges can serve has no rows and capacity 0.
    """
    num_sizes = topology.num_lanes.bit_length()
    first, end = np.zeros((num_sizes, 2), np.int64), np.zeros((num_sizes, 2), np.int64)
    links = links_of(topology)
    terms: list[tuple[list[float], list[float]]] = []
    exchanges: list[tuple[CpCommType, int]] = []
    for k in range(num_sizes):
        possible = [(one, inner) for one in options.cp_comm_types for inner in stage.attention.inner_sizes(one, 1 << k)]
        for link in links.used[k]:
            # A link that no group of this size has gets the rows of the one that they have.
            first[k, link if len(links.used[k]) > 1 else slice(None)] = len(terms)
            for exchange, inner in possible if k else _ALONE:
                terms.append(stage.terms(exchange, 1 << k, inner, link))
                exchanges.append((exchange, inner))
            end[k, link if len(links.used[k]) > 1 else slice(None)] = len(terms)
    capacities = [token_capacity(1 << k, topology, options) if end[k, 0] > first[k, 0] else 0 for k in range(num_sizes)]
    edges = np.array(edges_s_per_token(model, hardware, topology, options))
    embedding_s, head_s = float(edges[0] + edges[1]), float(edges[2] + edges[3])
    # Only sequence parallelism splits the activations that pipeline stages exchange over the TP ranks.
    hop_bytes = model.hidden_size * options.bytes_per_element / topology.rank_token_multiple
    table = PriceTable(
        terms=np.array(terms),
        first_option=first,
        end_option=end,
        links=links.of_group,
        multiples=np.array([sample_multiple(1 << k) for k in range(num_sizes)], np.int64),
        capacities=np.array(capacities, np.int64),
        rank_token_multiple=topology.rank_token_multiple,
        hop_s_per_token=hop_bytes / hardware.p2p_bandwidth_bytes_per_s if topology.pp_size > 1 else 0.0,
        edges_s_per_token=edges,
        slowest_s_per_token=embedding_s + head_s if topology.pp_size == 1 else max(embedding_s, head_s),
    )
    return table, tuple(exchanges)
