"""What one bucket costs on one pipeline stage, and the table of all these prices.

linear    = LIN * (tokens / cp + T0)          T0: a short pack does not fill the device
tensor    = TPC * tokens / cp                 collectives of tensor and sequence parallelism
attention, exposed                            `mechanisms/`
forward   = overhead + linear + tensor + attention + exposed
backward  = the same at their backward ratios + what recomputation repeats (full: forward; selective: attention and
            exposed)
"""

from __future__ import annotations

from typing import cast

import numpy as np

from dynamic_cp.convex import Convex, Linear, merged
from dynamic_cp.mechanisms.heads import heads_of_rank
from dynamic_cp.mechanisms.links import lanes_in_one_node, links_of
from dynamic_cp.mechanisms.mechanism import Sharing
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.plans.padding import sample_multiple
from dynamic_cp.pricing.capacity import token_capacity
from dynamic_cp.pricing.edges import edges_s_per_token, tensor_s_per_token
from dynamic_cp.pricing.table import PriceTable
from dynamic_cp.pricing.terms import terms_of
from dynamic_cp.types import Attention, CpCommType, Hardware, ModelShape, PlanOptions, Topology


class StagePrices:
    """One pipeline stage's layers: the numbers of one row of the table.

    Attributes:
        sharing: what limits how lanes can share out heads.
    """

    def __init__(self, model: ModelShape, hardware: Hardware, topology: Topology, options: PlanOptions) -> None:
        node_lanes = lanes_in_one_node(topology)
        self.sharing = Sharing(heads_of_rank(model, topology.tp_size), node_lanes, options.inner_cp_sizes)
        self._attention = StageAttention(model, hardware, topology, options, node_lanes)
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

    def possible(self, cp_comm_type: str, cp_size: int) -> list[Attention]:
        """Return the ways in which groups of `cp_size` can use a mechanism, the largest inner size first."""
        mechanism = MECHANISMS.get(cast(CpCommType, cp_comm_type))
        if mechanism is None:
            return []
        return [Attention(mechanism.name, inner) for inner in mechanism.inner_sizes(cp_size, self.sharing)]

    def terms(self, of: Attention, cp_size: int, link: int) -> tuple[list[float], list[float]]:
        """Return the NUM_TERMS numbers of forward and of backward; `of`: one of `possible`."""
        hardware = self._hardware
        attention, attention_back = self._price(of, cp_size, link)
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

    def _price(self, of: Attention, cp_size: int, link: int) -> tuple[Convex, Convex]:
        if cp_size == 1:
            return self._attention.alone()
        inner = of.inner_cp_size
        return MECHANISMS[of.cp_comm_type].price(self._attention, cp_size, inner, self.sharing.copies(inner), link)


def make_table(
    model: ModelShape, hardware: Hardware, topology: Topology, options: PlanOptions, stage: StagePrices
) -> tuple[PriceTable, tuple[Attention, ...]]:
    """Return the table, and how a bucket that pays a row of its terms computes attention.

    A CP size that none of the options can serve has no rows and capacity 0.
    """
    num_sizes = topology.num_lanes.bit_length()
    first, end = np.zeros((num_sizes, 2), np.int64), np.zeros((num_sizes, 2), np.int64)
    links = links_of(topology)
    terms: list[tuple[list[float], list[float]]] = []
    attentions: list[Attention] = []
    for k in range(num_sizes):
        possible = [one for name in options.cp_comm_types for one in stage.possible(name, 1 << k)]
        for link in links.used[k]:
            # A link that no group of this size has gets the rows of the one that they have.
            first[k, link if len(links.used[k]) > 1 else slice(None)] = len(terms)
            for attention in possible if k else [Attention()]:
                terms.append(stage.terms(attention, 1 << k, link))
                attentions.append(attention)
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
    return table, tuple(attentions)
