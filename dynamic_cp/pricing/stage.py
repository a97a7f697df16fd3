"""What one bucket costs on one pipeline stage, and the table of all these prices.

linear    = LIN * (tokens / cp + T0)          T0: a short pack does not fill the device
tensor    = TPC * tokens / cp                 collectives of tensor and sequence parallelism
copying   = CPY * tokens / cp                 copies of tokens for routed experts, and back; casts to FP8 (`experts.py`)
attention, exposed                            `mechanisms/`, and linear attention by heads (`linear_prices.py`)
forward   = overhead + linear + tensor + copying + attention + exposed, or what the host takes if that is more
backward  = the same at their backward ratios + what recomputation repeats (full: forward, in block the share of its
            layers; selective: attention and exposed, the MLP, experts; norms and activations by memory bandwidth)

Routed experts themselves are on top: here, where a lane has all that its tokens meet, else between lanes
(`pipeline/longest_path.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from dynamic_cp.arrays import Floats
from dynamic_cp.mechanisms.mechanism import LaneSeconds, Sharing
from dynamic_cp.mechanisms.registry import MECHANISMS, attentions_of
from dynamic_cp.mechanisms.stage_attention import Convex, Linear, StageAttention, merged
from dynamic_cp.mechanisms.transfers import lanes_in_one_node, links_of
from dynamic_cp.plans.padding import sample_multiple
from dynamic_cp.pricing.allowed import may_span_all, token_capacity
from dynamic_cp.pricing.edges import edges_s_per_token, memory_s, tensor_s_per_token
from dynamic_cp.pricing.experts import ExpertPrice, cast_s, copying_s_per_token, expert_prices, launched_layers
from dynamic_cp.pricing.table import NUM_TERMS, PriceTable, terms_of
from dynamic_cp.types import (
    ACROSS_NODES,
    Attention,
    Bucket,
    Layer,
    MicroBatch,
    Problem,
    Stage,
    Topology,
    is_placed,
)

_Terms = tuple[list[float], list[float]]


if TYPE_CHECKING:
    from dynamic_cp.pricing.linear_prices import StageLinearAttention


class _Floor(NamedTuple):
    """One row of `PriceTable.floors`."""

    num_lanes: int
    link: int
    is_allowed: bool
    terms: _Terms
    level_terms: _Terms


def _terms_of_both(both: tuple[Convex, Convex]) -> _Terms:
    return terms_of(both[0]), terms_of(both[1])


def _cast_channels(layer: Layer, hidden_size: int) -> float:
    """Return the channels that products of a layer take and put out, without those of routed experts."""
    linear = layer.linear_attention
    mixed = 0 if linear is None else linear.convolved_channels + 2 * linear.value_channels
    return 2 * layer.halves * hidden_size + 2 * (layer.query_size + layer.kv_size) + layer.mlp_kept_channels + mixed


def _expert_line(price: ExpertPrice, cp_size: int, mean: float, routed: float) -> Linear:
    """Return what experts cost for the tokens of a bucket, for so many mean and routed tokens for each of a lane."""
    return Linear(price.constant, (mean * price.per_mean + routed * price.per_routed) / cp_size)


class StagePrices:
    """One pipeline stage's layers, those of the stage with most weights: the numbers of one row of the table.

    Attributes:
        attention: of the stage, all its layers.
        mask: of the layers, of those without a window where only some have one.
        sharing: what limits how lanes can share out heads.
        experts: price of the routed experts (forward, backward).
        host_block_s: (forward, backward) that the host takes at least of lanes which share experts.
        expert_lanes: lanes that share them; imbalance: of what they get.
        share_before_attention: share of what is not attention that comes before it in a layer, without latents.
        state_shifts: [log2 of a CP size, link][of the bucket, of each sample][forward or backward][NUM_TERMS] seconds
            by which terms of a group grow where its lanes pass on states instead of exchanging heads.
    """

    def __init__(self, problem: Problem) -> None:
        model, hardware, topology = problem.model, problem.rates, problem.topology
        node_lanes = lanes_in_one_node(topology)
        self.sharing = Sharing.of(model, topology, problem.options)
        stages = model.stages(topology.pp_size)
        heaviest = max(range(len(stages)), key=lambda index: stages[index].sum(lambda layer: layer.linear_weights))
        stage = stages[heaviest]
        self.attention = StageAttention(stage, problem, node_lanes)
        self.mask = self.attention.mask
        self._linear_attention = _linear_attention_of(stage, problem)
        self._hardware, self._rank_token_multiple = hardware, topology.rank_token_multiple
        self._linear_back = problem.linear_backward_over_forward
        self._is_full, self._repeated = problem.options.recompute == "full", problem.options.repeated
        self._recomputed_share = problem.recomputed_share([heaviest])
        layers = stage.sum(lambda layer: layer.halves / 2)
        own_weights = stage.sum(lambda layer: layer.linear_weights - layer.expert_weights)
        # In bf16 the rate of GEMMs has what filling and emptying a tile takes; in FP8 that is a larger share.
        narrow = (hardware.expert_extra_channels - problem.hardware.expert_extra_channels) / model.hidden_size
        self._linear_s_per_token = 2 * own_weights / hardware.linear_flops_per_s / topology.tp_size * (1 + narrow)
        # Half of a layer's collectives are those of its MLP; routed experts need none, shared ones do.
        routed_only = stage.sum(lambda layer: layer.num_experts > 0 and not layer.mlp_kept_channels)
        dense = stage.sum(lambda layer: layer.mlp_weights > 0)
        shared = stage.sum(lambda layer: layer.num_experts > 0 and layer.mlp_kept_channels > 0)
        tensor_s = tensor_s_per_token(problem)
        self._tensor_s_per_token = (layers - 0.5 * routed_only) * tensor_s
        cast = cast_s(stage.sum(lambda layer: _cast_channels(layer, model.hidden_size)), problem)
        self._copying_s_per_token = copying_s_per_token(stage, problem) + cast
        normed = stage.sum(lambda layer: layer.halves) * model.hidden_size / topology.sequence_shares
        activated = stage.sum(lambda layer: layer.routed_kept_channels - layer.routed_channels) / topology.tp_size
        element_s = memory_s(problem.options.element_bytes.activation, hardware)
        weights = {
            "mlp": (stage.sum(lambda layer: layer.mlp_weights), 0.5 * dense * tensor_s),
            "moe": (stage.sum(lambda layer: layer.moe_weights), 0.5 * shared * tensor_s + self._copying_s_per_token),
            "mla_up_proj": (stage.sum(lambda layer: layer.up_weights + model.q_lora_rank * layer.query_size), 0.0),
            "layernorm": (0.0, 2 * normed * element_s),  # read and written
            "moe_act": (0.0, model.imbalance(topology.ep_size) * activated * element_s),
        }  # of what is computed again, and seconds per token of its collective, of copying and of passes through memory
        self._again = [(both[0] / own_weights, both[1]) for name, both in weights.items() if name in self._repeated]
        self.experts = expert_prices(stage, problem, self._recomputed_share)
        self.expert_lanes, self.imbalance = topology.expert_lanes, model.imbalance(topology.ep_size)
        ahead = stage.sum(lambda layer: model.hidden_size * (layer.query_size + layer.gate_size + 2 * layer.kv_size))
        self.share_before_attention = ahead / own_weights
        self._overheads_s = (
            layers * hardware.forward_overhead_s_per_layer + hardware.overhead_s_per_bucket_stage,
            layers * hardware.backward_overhead_s_per_layer + hardware.overhead_s_per_bucket_stage,
        )
        # The overhead of a bucket is the host's as well: Python of the schedule.
        self._host_overhead_s = hardware.overhead_s_per_bucket_stage if hardware.host_forward_s_per_layer else 0.0
        launched = layers + launched_layers(stage, problem)
        self._host_s = (
            launched * hardware.host_forward_s_per_layer + self._host_overhead_s,
            launched * hardware.host_backward_s_per_layer + self._host_overhead_s,
        )
        of_experts = stage.sum(lambda layer: layer.num_experts > 0) * np.array(
            [hardware.host_expert_forward_s_per_layer, hardware.host_expert_backward_s_per_layer]
        )
        repeats = np.array([[1.0, 0.0], [self._recomputed_share * ("moe" in self._repeated), 1.0]])
        self._host_experts_s: list[float] = (repeats @ of_experts).tolist()
        again = self._is_full * self._recomputed_share * (self._host_s[0] - self._host_overhead_s)
        self.host_block_s = np.array([self._host_s[0], self._host_s[1] + again]) + self._host_experts_s
        # Once more is one step more.
        self._host_attention_s = self.attention.layers * hardware.host_ring_step_s_per_layer
        self.state_shifts = self._states_over_heads(topology)

    def terms(self, of: Attention, cp_size: int, link: int, *, is_level: bool = False) -> _Terms:
        """Return the NUM_TERMS numbers of forward and of backward; without a closed form, of the least it takes.

        Args:
            of: one of `attentions_of` for groups of `cp_size`.
            cp_size, link: of the group.
            is_level: with experts that other lanes share, whose block has as many tokens on every lane.
        """
        own, level, _ = self.rows(of, cp_size, link)
        return level if is_level else own

    def rows(self, of: Attention, cp_size: int, link: int) -> tuple[_Terms, _Terms, _Terms]:
        """Return `terms`, the same with `is_level`, and those of the least that a bucket takes, whatever other lanes of
        its block hold.
        """
        both = self._with_attention(self._mixers_of(of, cp_size, link), cp_size)
        own = _terms_of_both(both)
        if self.expert_lanes == 1:  # experts are there already
            return own, own, own
        share = min(1.0, cp_size / self.expert_lanes)
        level = self._with_experts(both, cp_size, 1.0, self.imbalance)
        return own, level, self._with_experts(both, cp_size, share, max(1.0, share * self.imbalance))

    def _with_experts(self, both: tuple[Convex, Convex], cp_size: int, mean: float, routed: float) -> _Terms:
        """Return the terms of a bucket with shared experts, for so many mean and routed tokens for each of a lane."""
        forward, backward = (
            one._replace(linear=one.linear.plus(_expert_line(price, cp_size, mean, routed)))
            for one, price in zip(both, self.experts, strict=True)
        )
        return _terms_of_both((forward, backward))

    @property
    def repeats_attention(self) -> bool:
        """Whether backward computes attention again, with what its forward pass exchanges."""
        return self._is_full or "core_attn" in self._repeated

    def without_attention(self) -> tuple[Linear, Linear]:
        """Return (forward, backward) of all that is not attention, for the tokens of a rank; with recomputation."""
        forward, backward = self._with_attention((Convex(Linear()), Convex(Linear())), 1)
        return forward.linear, backward.linear

    def lane_costs(
        self,
        bucket: Bucket,
        micro_batch: MicroBatch,
        tokens: Sequence[float],
        *,
        with_exchange: bool = True,
        with_host: bool = True,
    ) -> Floats:
        """Return [forward or backward, lane] seconds of a bucket whose mechanism has no closed form.

        Args:
            bucket, micro_batch: as in `Mechanism.lane_seconds`.
            tokens: [lane of the bucket] padded tokens.
            with_exchange: with what is exposed of the exchange; with_host: at least what the host takes.
        """
        mechanism = MECHANISMS[bucket.cp_comm_type]
        if with_exchange:
            attention = mechanism.lane_seconds(self.attention, bucket, micro_batch)
        else:
            kernels_s = mechanism.kernel_seconds(self.attention, bucket)
            attention = LaneSeconds(kernels_s, np.zeros_like(kernels_s))
        per_token_s = np.zeros(2)
        if self._linear_attention is not None:
            linear = self._linear_attention.of_homes(bucket, self._rank_token_multiple, with_exchange=with_exchange)
            attention = LaneSeconds(attention.attention + linear.constant_s, attention.host + linear.host_s)
            per_token_s = linear.per_token_s
        # The numbers of all lanes take the place of one.
        of_lanes = [
            Convex(Linear(cast(float, gpu_s), float(token_s)), host_s=cast(float, host_s))
            for gpu_s, token_s, host_s in zip(attention.attention, per_token_s, attention.host, strict=True)
        ]
        both = self._with_attention((of_lanes[0], of_lanes[1]), 1)
        held = np.array(tokens, np.float64)
        seconds = [side.linear.constant + side.linear.per_token * held for side in both]
        return np.array([np.maximum(one, side.host_s * with_host) for one, side in zip(seconds, both, strict=True)])

    def _with_attention(self, of_attention: tuple[Convex, Convex], cp_size: int) -> tuple[Convex, Convex]:
        """Return (forward, backward) of all layers from those of attention, for tokens that `cp_size` lanes share."""
        hardware = self._hardware
        attention, attention_back = of_attention
        overhead_s, overhead_back_s = self._overheads_s
        host_s, host_back_s = self._host_s[0] + attention.host_s, self._host_s[1] + attention_back.host_s
        linear = Linear(self._linear_s_per_token * hardware.linear_extra_tokens, self._linear_s_per_token / cp_size)
        tensor = Linear(0.0, (self._tensor_s_per_token + self._copying_s_per_token) / cp_size)
        forward = Linear(overhead_s).plus(linear).plus(tensor).plus(attention.linear)
        backward = Linear(overhead_back_s).plus(linear, self._linear_back).plus(tensor).plus(attention_back.linear)
        kinks = attention_back.kinks
        if self._is_full:
            share = self._recomputed_share
            credit_s = share * hardware.recompute_overhead_credit * overhead_s
            backward = backward.plus(forward, share).plus(Linear(-credit_s))
            host_back_s += share * (host_s - self._host_overhead_s)  # the schedule is not repeated
            kinks += tuple(kink._replace(weight=share * kink.weight) for kink in attention.kinks)
        elif self._repeated:
            if "core_attn" in self._repeated:
                backward = backward.plus(attention.linear)
                kinks += attention.kinks
                host_back_s += attention.host_s + self._host_attention_s
            for share, token_s in self._again:
                backward = backward.plus(linear, share).plus(Linear(0.0, token_s / cp_size))
        if self.expert_lanes == 1:
            forward, backward = (
                own.plus(_expert_line(price, cp_size, 1.0, self.imbalance))
                for own, price in zip((forward, backward), self.experts, strict=True)
            )
            host_s, host_back_s = host_s + self._host_experts_s[0], host_back_s + self._host_experts_s[1]
        return Convex(forward, attention.kinks, host_s), Convex(backward, merged(kinks), host_back_s)

    def _states_over_heads(self, topology: Topology) -> Floats:
        """Return `state_shifts`: of links that no group of a size has, and of single lanes, zeros."""
        used, linear = links_of(topology).used, self._linear_attention
        shifts = np.zeros((len(used), 2, 2, 2, NUM_TERMS))
        if linear is None:
            return shifts
        for k, link in ((k, link) for k, links in enumerate(used) for link in links if k):
            ways = zip(linear.by_states(1 << k, link), linear.by_heads(1 << k, link), strict=True)
            for direction, (states, heads) in enumerate(ways):
                more = Convex(states.linear.plus(heads.linear, -1.0), host_s=states.host_s - heads.host_s)
                shifts[k, link, :, direction] = terms_of(more), terms_of(Convex(Linear(states.per_sample)))
        if self.repeats_attention:
            shifts[:, :, :, 1] += (self._recomputed_share if self._is_full else 1.0) * shifts[:, :, :, 0]
        return shifts

    def _mixers_of(self, of: Attention, cp_size: int, link: int) -> tuple[Convex, Convex]:
        """Return the price of attention and linear attention with their exchanges, of heads for linear attention.

        Placed attention is priced at the least that it takes, with nothing exchanged.
        """
        both, linear = self._attention_of(of, cp_size, link), self._linear_attention
        if linear is None:
            return both
        is_exchanged = cp_size > 1 and not is_placed(of.cp_comm_type)
        shares, seconds = (1, linear.by_heads(cp_size, link)) if is_exchanged else (cp_size, linear.alone())
        forward, backward = (
            Convex(one.linear.plus(more.linear, 1 / shares), one.kinks, one.host_s + more.host_s)
            for one, more in zip(both, seconds, strict=True)
        )
        return forward, backward

    def _attention_of(self, of: Attention, cp_size: int, link: int) -> tuple[Convex, Convex]:
        if cp_size == 1:
            return self.attention.alone()
        mechanism, inner = MECHANISMS[of.cp_comm_type], of.inner_cp_size
        price = mechanism.price if mechanism.has_closed_form else mechanism.floor
        return price(self.attention, cp_size, inner, self.sharing.copies(inner), link)


def _linear_attention_of(stage: Stage, problem: Problem) -> StageLinearAttention | None:
    """Return that of a stage; None: the model has none, and nothing of it is loaded."""
    sizes = problem.model.linear_attention
    if sizes is None:
        return None
    from dynamic_cp.pricing.linear_prices import StageLinearAttention

    return StageLinearAttention(stage, sizes, problem)


def make_table(problem: Problem, stage: StagePrices) -> tuple[PriceTable, tuple[Attention, ...]]:
    """Return the table, and how a bucket that pays a row of its terms computes attention.

    Mechanisms without a closed form have floors, no rows: packers do not see them. A CP size that none of the options
    can serve has no rows and capacity 0.
    """
    topology, options = problem.topology, problem.options
    grouped = [name for name in options.cp_comm_types if not is_placed(name)]
    num_sizes = topology.num_lanes.bit_length()
    first, end = np.zeros((num_sizes, 2), np.int64), np.zeros((num_sizes, 2), np.int64)
    links = links_of(topology)
    terms: list[_Terms] = []
    level_terms: list[_Terms] = []
    attentions: list[Attention] = []
    floors: list[_Floor] = []
    for k in range(num_sizes):
        possible = attentions_of(grouped, 1 << k, stage.sharing)
        allowed = token_capacity(1 << k, topology, options) > 0
        for link in links.used[k]:
            # A link that no group of this size has gets the rows of the one that they have.
            first[k, link if len(links.used[k]) > 1 else slice(None)] = len(terms)
            for attention in possible if k else [Attention()]:
                own, level, floor = stage.rows(attention, 1 << k, link)
                floors.append(_Floor(1 << k, link, allowed, floor, level))
                if MECHANISMS[attention.cp_comm_type].has_closed_form:
                    terms.append(own)
                    level_terms.append(level)
                    attentions.append(attention)
            end[k, link if len(links.used[k]) > 1 else slice(None)] = len(terms)
    capacities = [token_capacity(1 << k, topology, options) if end[k, 0] > first[k, 0] else 0 for k in range(num_sizes)]
    by_heads = tuple(floors)
    floors += _floors_of_placed(problem, stage)
    edges = np.array(edges_s_per_token(problem))
    embedding_s, head_s = float(edges[0] + edges[1]), float(edges[2] + edges[3])
    # Only sequence parallelism splits the activations that pipeline stages exchange over the TP ranks.
    hop_bytes = problem.model.hidden_size * options.element_bytes.residual / topology.sequence_shares
    table = PriceTable(
        terms=np.array(terms),
        floors=np.array([floor.terms for floor in floors]),
        floor_lanes=np.array([floor.num_lanes for floor in floors], np.int64),
        floor_allowed=np.array([floor.is_allowed for floor in floors]),
        is_even=all(MECHANISMS[name].has_closed_form for name in options.cp_comm_types),
        first_option=first,
        end_option=end,
        links=links.of_group,
        multiples=np.array([sample_multiple(1 << k) for k in range(num_sizes)], np.int64),
        capacities=np.array(capacities, np.int64),
        rank_token_multiple=topology.rank_token_multiple,
        hop_s_per_token=hop_bytes / problem.hardware.p2p_bandwidth_bytes_per_s if topology.pp_size > 1 else 0.0,
        edges_s_per_token=edges,
        slowest_s_per_token=embedding_s + head_s if topology.pp_size == 1 else max(embedding_s, head_s),
        expert_lanes=topology.expert_lanes,
        expert_terms=np.array(stage.experts),
        expert_host_s=stage.host_block_s,
        imbalance=stage.imbalance,
        level_terms=np.array(level_terms),
        level_floors=np.array([floor.level_terms for floor in floors]),
    )
    if problem.model.linear_attention is not None and options.state_exchange != "heads":
        table = _with_floors_by_states(table, by_heads, stage.state_shifts)
    return table, tuple(attentions)


def _with_floors_by_states(table: PriceTable, floors: Sequence[_Floor], state_shifts: Floats) -> PriceTable:
    """Return the table with floors of groups that pass on the states of one sample.

    Args:
        floors: its first ones, of groups that exchange heads.
        state_shifts: as of `StagePrices`.
    """
    shared = [index for index, floor in enumerate(floors) if floor.num_lanes > 1]
    log2_cp_sizes = [floors[index].num_lanes.bit_length() - 1 for index in shared]
    shifts = state_shifts[log2_cp_sizes, [floors[index].link for index in shared]].sum(axis=1)
    return table._replace(
        floors=np.concatenate([table.floors, table.floors[shared] + shifts]),
        floor_lanes=np.concatenate([table.floor_lanes, table.floor_lanes[shared]]),
        floor_allowed=np.concatenate([table.floor_allowed, table.floor_allowed[shared]]),
        level_floors=np.concatenate([table.level_floors, table.level_floors[shared] + shifts]),
    )


def _floors_of_placed(problem: Problem, stage: StagePrices) -> list[_Floor]:
    """Return the floors of placed buckets of all lanes: on fewer lanes one takes at least as long, and holds less."""
    topology, options = problem.topology, problem.options
    found = []
    for name in options.cp_comm_types:
        if is_placed(name) and may_span_all(topology, options):
            _, level, floor = stage.rows(Attention(name), topology.num_lanes, ACROSS_NODES)
            found.append(_Floor(topology.num_lanes, ACROSS_NODES, True, floor, level))
    return found
