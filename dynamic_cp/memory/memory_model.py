"""Bytes of a rank on every pipeline stage: what a plan needs at its peak, and how many tokens a rank may hold.

Weights, gradients and optimizer state follow Megatron-LM's theoretical memory report: 2 bytes of bf16 weight, 4 of
fp32 gradient and 12 of fp32 master weight and Adam's moments, the 12 divided by the lanes with the distributed
optimizer (fp32 training: 4 + 4 + 8); less where `StateDtypes` say so. Of routed experts a rank has 1 / EP of
those of a stage, and shares the 12 with the ranks that have the same. Activations: `activations.py`, times the tokens
in flight on the stage, which come from the actual micro-batches of a plan and the order of the schedule.

Each process group that carries a tensor of a device has buffers of its own, a *communicator* of NCCL. NCCL makes one
when a group is used for the first time. A rank uses these from the start: that of all ranks (outcomes,
losses), of its TP ranks, of its pipeline stages, of its lanes (gradients), of the optimizer's norm, of tied embeddings,
and of experts. CP groups, and rings and inner groups of mechanisms, are warmed at start, so that what they take is
known before the first step; none is made later. Those that are created but never used (megatron-core creates some 20)
take nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.errors import InvalidInputError, MemoryLimitError
from dynamic_cp.mechanisms.mechanism import Sharing
from dynamic_cp.mechanisms.registry import MECHANISMS, attentions_of, chosen_inner_sizes
from dynamic_cp.memory.activations import activation_bytes, chunk_bytes
from dynamic_cp.pipeline.schedule import peak_in_flight_tokens
from dynamic_cp.plans.extension import kind_of, kind_of_all
from dynamic_cp.plans.padding import lane_tokens
from dynamic_cp.pricing.allowed import may_place
from dynamic_cp.types import STATIC_POLICIES, Attention, ModelShape, Plan, PlanOptions, Problem, Topology
from dynamic_cp.types.linear_attention import CHUNKS_PER_LANE


def num_communicators(model: ModelShape, topology: Topology, options: PlanOptions, sharing: Sharing) -> int:
    """Return how many communicators a rank of the stage with most of them makes."""
    pp_size, is_alone = topology.pp_size, topology.world_size == 1
    shares_table = model.share_embeddings_and_output_weights or model.mtp_num_layers > 0
    of_megatron = (
        2 * (not is_alone)  # of all ranks: the job's, and that of the optimizer's norm
        + (topology.tp_size > 1)
        # Interleaved stages send to each neighbour apart, so each is a pair; of two stages both are one pair.
        + (pp_size > 1)
        + (pp_size > 2 and topology.vp_size > 1)
        + (pp_size > 1 and shares_table)
        + (topology.num_lanes > 1)
        + 2 * (topology.ep_size > 1)  # of the block, and of the ranks with the same experts
    )
    largest = options.largest_cp_size(topology)
    sizes = [1 << k for k in range(1, largest.bit_length())]
    used = [size for size in sizes if size >= options.min_cp_size]
    mechanisms = [MECHANISMS[name] for name in options.cp_comm_types]
    of_mechanisms = sum(mechanism.num_more_groups(size, sharing) for mechanism in mechanisms for size in used)
    # Inner groups of a mechanism are CP groups of smaller sizes.
    inner = chosen_inner_sizes(options.cp_comm_types, largest, sharing) if of_mechanisms else ()
    return of_megatron + len({*used, *inner}) + of_mechanisms + (options.pool != "off")


SAFETY_FRACTION = 0.92
"""Share of the memory left by hbm_reserved_bytes that planning uses; the rest is for fragmentation. An estimate."""
_MANY_GROUPS = 0.25
"""Share of what is available from which communicators are worth a word."""


class StageMemory(NamedTuple):
    """Peak bytes of the rank of one stage that needs most. `step_bytes`: fp32 copies of bf16 gradients that the
    optimizer's step makes, beyond the room of activations."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    communicators_bytes: float
    activations_bytes: float
    working_bytes: float
    logits_bytes: float
    exchange_bytes: float
    step_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        return sum(self)

    @property
    def state_bytes(self) -> float:
        """Parts that no number of tokens changes."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.communicators_bytes

    @property
    def micro_batch_bytes(self) -> float:
        """Parts that grow with the tokens of micro-batches, and are free while the optimizer steps."""
        return self.activations_bytes + self.working_bytes + self.logits_bytes + self.exchange_bytes


class MemoryModel:
    """Memory of one model on one kind of device.

    Args:
        problem: whose plans have to fit.

    Attributes:
        topology, options: of the problem; a static policy has groups of its one CP size only.
        layer_bytes: kind of layer -> its activations.
        num_communicators: that a rank makes.

    Limits: no biases; the working set of a layer is that of its MLP; memory of
    the input pipeline and fragmentation only through SAFETY_FRACTION."""

    def __init__(self, problem: Problem) -> None:
        model, topology, options = problem.model, problem.topology, problem.options
        size = options.static_cp_size
        if problem.policy in STATIC_POLICIES and size is not None:
            options = replace(options, min_cp_size=size, max_cp_size=size)
        self._model, self.topology, self.options = model, topology, options
        self._hardware = problem.hardware
        self._data_parallel = problem.data_parallel
        self._stages = model.stages(topology.pp_size)
        # All chunks of a stage are taken as its largest, which keeps most whole layers.
        largest = [(max(chunks),) for chunks in model.chunks(topology.pp_size, topology.vp_size)]
        shares = map(options.recompute_layers.share_of, largest)
        self._stage_bytes = [
            {layer: activation_bytes(model, topology, options, layer, share) for _, layer in stage.layers}
            for stage, share in zip(self._stages, shares, strict=True)
        ]
        self.layer_bytes = {layer: kept for kinds in self._stage_bytes for layer, kept in kinds.items()}
        self._sharing = Sharing.of(model, topology, options)
        self.num_communicators = num_communicators(model, topology, options, self._sharing)

    @property
    def available_bytes(self) -> float:
        """Bytes that a rank may plan with. Raises InvalidInputError: the hardware file does not say how much memory
        there is."""
        if not self._hardware.hbm_bytes:
            raise InvalidInputError(
                f"hardware {self._hardware.name!r} gives no hbm_bytes, so no token limit can follow from memory: "
                "give max_tokens_per_rank (--max-seqlen-per-dp-cp-rank) in tokens"
            )
        return SAFETY_FRACTION * (self._hardware.hbm_bytes - self._hardware.hbm_reserved_bytes)

    def num_weights(self, stage: int) -> float:
        """Return the weights of a rank on `stage` but those of routed experts; norms are not split by TP."""
        model, topology = self._model, self.topology
        weights = self._stages[stage].sum(lambda layer: layer.held_weights / topology.tp_size + layer.norm_weights)
        weights += self._vocabulary_weights(stage)
        return weights + (model.hidden_size if stage == topology.pp_size - 1 else 0)

    def _vocabulary_weights(self, stage: int) -> float:
        return self._model.vocabulary_weights_on(stage, self.topology.pp_size) / self.topology.tp_size

    def num_expert_weights(self, stage: int) -> float:
        """Return the weights of the routed experts of a rank on `stage`."""
        return self._stages[stage].sum(lambda layer: layer.held_expert_weights) / self.topology.ep_size

    def num_trained(self, stage: int) -> tuple[float, float]:
        """Return the weights of a rank on `stage` that have gradients: those but of routed experts, and those."""
        adapters = self._data_parallel.adapters
        if adapters is None:
            return self.num_weights(stage), self.num_expert_weights(stage)
        return adapters.weights(self._stages[stage], self._model, self.topology.tp_size), 0.0

    def peak(self, plan: Plan) -> tuple[StageMemory, ...]:
        """Return the memory of every stage when it runs `plan`, on its worst lane."""
        kind = kind_of(plan)
        if kind is not None:
            return kind.peak(self, plan)
        held = np.zeros((plan.num_microbatches, plan.topology.num_lanes), np.int64)
        exchanged, with_states = np.zeros(held.shape), np.zeros_like(held)
        for row, micro_batch in enumerate(plan.micro_batches):
            for bucket in micro_batch.buckets:
                tokens = lane_tokens(bucket, plan.topology.rank_token_multiple)
                lanes = slice(bucket.first_lane, bucket.first_lane + bucket.cp_size)
                held[row, lanes] = tokens
                if self._model.linear_attention is not None:
                    from dynamic_cp.plans.stretches import states_kept

                    with_states[row, lanes] = states_kept(bucket, plan.topology.rank_token_multiple)
                exchanged[row, lanes] = self._exchange_bytes(max(tokens), bucket.cp_size, bucket.attention)
        topology = plan.topology
        states = peak_in_flight_tokens(with_states, topology.pp_size, topology.vp_size)
        alive = peak_in_flight_tokens(held, topology.pp_size, topology.vp_size)
        most, buffers = held.max(axis=0).astype(np.float64), exchanged.max(axis=0)
        # Each rank of an EP block computes the mean of what its lanes hold.
        block = topology.expert_lanes
        of_block = np.repeat(held.reshape(len(held), -1, block).sum(axis=2), block, axis=1)
        routed = peak_in_flight_tokens(of_block, topology.pp_size, topology.vp_size) / block
        most_routed = of_block.max(axis=0) / block
        return tuple(
            self.worst_lane(
                stage,
                alive[stage].astype(np.float64),
                most,
                buffers + self._states_bytes(stage, states[stage], with_states.max(axis=0)),
                routed[stage],
                most_routed,
            )
            for stage in range(topology.pp_size)
        )

    def _states_bytes(self, stage: int, alive: Ints, most: Ints) -> Floats:
        """Return [lane] the bytes of states of runs whose buckets pass them on. `alive`, `most`: [lane] such runs alive
        (once a chunk), and in one micro-batch."""
        layers, kinds = self._stages[stage], self._stage_bytes[stage]
        kept = layers.sum(lambda layer: kinds[layer].states_per_layer) / self._largest_chunks(stage)
        working = max(one.states_working for one in kinds.values())
        return np.asarray(alive * kept + most * working) / CHUNKS_PER_LANE

    def peak_at(self, tokens_per_rank: int, cp_size: int = 1) -> tuple[StageMemory, ...]:
        """Return the memory of every stage when all micro-batches hold `tokens_per_rank`, in groups of `cp_size`.

        Where all plans are of a kind, no plan of that limit needs more. Lanes exchange heads of linear attention; where
        they pass on states, plans hold fewer tokens (`search.states`).
        """
        topology = self.topology
        kind = kind_of_all(self.options)
        if kind is not None:
            return kind.peak_at(self, tokens_per_rank)
        many = self.full_micro_batches(tokens_per_rank)
        alive = peak_in_flight_tokens(many, topology.pp_size, topology.vp_size)
        most = np.array([float(tokens_per_rank)])
        possible = attentions_of(self.options.cp_comm_types, cp_size, self._sharing)
        buffers = np.array([max((self._exchange_bytes(tokens_per_rank, cp_size, one) for one in possible), default=0)])
        num_states = 0
        if self._places_states:
            from dynamic_cp.plans.stretches import room_for_states

            num_states = room_for_states(tokens_per_rank)
        states = peak_in_flight_tokens(self.full_micro_batches(num_states), topology.pp_size, topology.vp_size)
        return tuple(
            self.worst_lane(
                stage,
                alive[stage].astype(np.float64),
                most,
                buffers + self._states_bytes(stage, states[stage], np.array([num_states])),
                alive[stage],
                most,
            )
            for stage in range(topology.pp_size)
        )

    @property
    def _places_states(self) -> bool:
        """Whether states of linear attention may follow homes, for which there is room beside tokens."""
        return self._model.linear_attention is not None and may_place(self.topology, self.options)

    def full_micro_batches(self, tokens_per_rank: int) -> Ints:
        """Return [micro-batch, one lane] tokens: so many micro-batches that no schedule holds fewer than it could."""
        return np.full((4 * self.topology.pp_size, 1), tokens_per_rank, np.int64)

    def max_tokens_per_rank(self, max_seqlen: int | None = None) -> int:
        """Return the largest token limit that fits on every stage: what `auto` means.

        A multiple of 2 * rank_token_multiple. All micro-batches in flight are taken as full, and buckets as large as
        the smallest CP size that holds `max_seqlen` under the limit (None: the largest allowed CP size).

        Raises MemoryLimitError: not even the smallest limit fits, or none that holds `max_seqlen`."""
        options, topology = self.options, self.topology
        multiple = 2 * topology.rank_token_multiple
        largest = options.largest_cp_size(topology)
        sizes = [1 << k for k in range(options.min_cp_size.bit_length() - 1, largest.bit_length())] or [largest]
        for cp_size in sizes if max_seqlen is not None else sizes[-1:]:
            limit = self._fitting_tokens(multiple, cp_size)
            if limit < multiple:
                self._refuse(
                    f"{multiple} tokens per rank at CP size {cp_size}", multiple, self.peak_at(multiple, cp_size)
                )
            if max_seqlen is None or limit * cp_size >= max_seqlen:
                return limit
        if max_seqlen is not None and may_place(topology, options):
            largest = topology.num_lanes
            if limit * largest >= max_seqlen:
                return limit
        raise MemoryLimitError(
            f"a sample of {max_seqlen} tokens needs {-(-(max_seqlen or 0) // largest)} tokens per rank at CP size "
            f"{largest}, memory holds {limit}: {'' if options.recomputes_all else 'use full recomputation, '}more "
            "lanes, a larger tp_size (--tensor-model-parallel-size) or lower seqlen (--seq-length)"
        )

    def _fitting_tokens(self, multiple: int, cp_size: int) -> int:
        """Return the largest multiple of tokens that all stages hold in groups of `cp_size`, 0 if none."""
        if self.options.loss_chunk_tokens or self._places_states:  # bytes do not grow in step with tokens
            above = 1
            while self._fits(above * multiple, cp_size):
                above *= 2
            counts = range(above // 2 + 1, above)
            fitting = bisect_left(counts, True, key=lambda count: not self._fits(count * multiple, cp_size))
            return (above // 2 + fitting) * multiple
        free = [
            (self.available_bytes - stage.state_bytes) / stage.micro_batch_bytes
            if stage.total_bytes <= self.available_bytes
            else 0
            for stage in self.peak_at(1, cp_size)
        ]
        return int(min(free) // multiple) * multiple

    def _fits(self, tokens: int, cp_size: int) -> bool:
        return max(stage.total_bytes for stage in self.peak_at(tokens, cp_size)) <= self.available_bytes

    def check_plan_fits(self, plan: Plan) -> None:
        """Refuse `plan` if a stage needs more than `available_bytes`. Raises MemoryLimitError: with the stage, both
        numbers of bytes and the remedy."""
        self._check("the plan", plan.max_tokens_per_rank, self.peak(plan))

    def check_limit_fits(self, tokens_per_rank: int, cp_size: int = 1) -> None:
        """Refuse a limit of `tokens_per_rank` in groups of `cp_size` if a stage needs more than `available_bytes`.

        Where all plans are of a kind, it has to hold those that need least: of others the ones that fit are taken.

        Raises MemoryLimitError: with the stage, both numbers of bytes and the remedy."""
        kind = kind_of_all(self.options)
        if kind is not None:
            what, peak = kind.least_at(self, tokens_per_rank)
        else:
            what = f"{tokens_per_rank} tokens per rank at CP size {cp_size}"
            peak = self.peak_at(tokens_per_rank, cp_size)
        self._check(what, tokens_per_rank, peak)

    def _check(self, what: str, limit: int, stages: tuple[StageMemory, ...]) -> None:
        if max(stage.total_bytes for stage in stages) > self.available_bytes:
            self._refuse(what, limit, stages)

    def _refuse(self, what: str, limit: int, stages: tuple[StageMemory, ...]) -> None:
        needed, stage = max((memory.total_bytes, -index) for index, memory in enumerate(stages))
        parts = stages[-stage]
        largest = max(parts._fields, key=lambda name: float(getattr(parts, name)))
        raise MemoryLimitError(
            f"{what} needs {needed / 1e9:.2f} GB on pipeline stage {-stage}, {self.available_bytes / 1e9:.2f} GB are "
            f"available ({SAFETY_FRACTION:.0%} of what {self._hardware.name} has beyond its reserve); most goes to "
            f"{largest.removesuffix('_bytes')} ({getattr(parts, largest) / 1e9:.2f} GB): {self._remedy(limit, parts)}",
            needed_bytes=needed,
            available_bytes=self.available_bytes,
            stage=-stage,
        )

    def _remedy(self, limit: int, parts: StageMemory) -> str:
        """Return what helps and is not done already."""
        least = 2 * self.topology.rank_token_multiple
        remedies = []
        if parts.state_bytes < self.available_bytes and not parts.step_bytes:  # else no fewer tokens help
            remedies += ["lower max_tokens_per_rank (--max-seqlen-per-dp-cp-rank)"] * (limit > least)
            remedies += ["recompute more"] * (not self.options.recomputes_all)
            of_logits = parts.logits_bytes > parts.activations_bytes + parts.working_bytes
            chunk = "compute losses over chunks of tokens (--loss-chunk-tokens auto)"
            remedies += [chunk] * (of_logits and not self.options.loss_chunk_tokens)
        experts, ep_size = self._model.experts, self.topology.ep_size
        ranks = self.topology.num_lanes * self.topology.tp_size
        if experts is not None and ep_size < min(ranks, experts.num_experts):
            remedies.append("use a larger ep_size (--expert-model-parallel-size)")
        if parts.communicators_bytes > _MANY_GROUPS * self.available_bytes:
            always = self._sharing.serves_always
            alone = num_communicators(
                self._model, self.topology, replace(self.options, cp_comm_types=(always,)), self._sharing
            )
            remedies += [f"exchange by {always} alone (--cp-comm-type)"] * (alone < self.num_communicators)
            remedies.append("lower max_cp_size (--max-dynamic-cp-size)")
        in_fp32 = self.options.element_bytes.weight < self._data_parallel.state.gradient_bytes
        remedies += ["reduce gradients in bf16 (--grad-reduce-in-bf16)"] * in_fp32
        remedies += ["use the distributed optimizer"] * (
            not self._data_parallel.distributed_optimizer and self.topology.num_lanes > 1
        )
        remedies.append(
            "use a larger tp_size (--tensor-model-parallel-size) or pp_size (--pipeline-model-parallel-size)"
        )
        return f"{', '.join(remedies[:-1])} or {remedies[-1]}" if len(remedies) > 1 else remedies[0]

    def _exchange_bytes(self, tokens: int, cp_size: int, attention: Attention) -> float:
        """Return what the exchange of one layer keeps: heads in their other layout, keys and values of the ring."""
        if cp_size == 1:
            return 0.0
        mechanism, inner = MECHANISMS[attention.cp_comm_type], attention.inner_cp_size
        copies = self._sharing.copies(inner)
        return tokens * max(
            mechanism.kept_bytes(cp_size, inner, one.a2a_queries, one.ring_per_bucket_token, copies, one.latents)
            + one.linear_heads
            for one in self.layer_bytes.values()
        )

    def worst_lane(
        self, stage: int, alive: Floats, most: Floats, buffers: Floats, routed: Floats, most_routed: Floats
    ) -> StageMemory:
        """Return the memory of `stage`.

        Args:
            alive, most, buffers: [lane] tokens alive (once a chunk), largest micro-batch, exchange bytes.
            routed, most_routed: [lane] the same tokens of the mean lane of its EP block.
        """
        topology, layers, kinds = self.topology, self._stages[stage], self._stage_bytes[stage]
        chunks = self._largest_chunks(stage)
        kept = layers.sum(lambda layer: kinds[layer].per_layer) / chunks
        routed_kept = layers.sum(lambda layer: kinds[layer].routed_per_layer) / chunks
        of_kinds = [kinds[layer] for _, layer in layers.layers]
        activations = alive * kept + routed * routed_kept
        working = np.max(
            [most * (one.working + one.hops) + most_routed * one.routed_working for one in of_kinds], axis=0
        )
        logits = np.zeros_like(most)
        if stage == topology.pp_size - 1:
            logits = most * of_kinds[0].head + chunk_bytes(self._model, topology, self.options, most)
        lane = int(np.argmax(activations + working + logits + buffers))
        held = self.num_weights(stage) + self.num_expert_weights(stage)
        weights, experts = self.num_trained(stage)
        lanes, copies = topology.num_lanes, topology.num_lanes * topology.tp_size / topology.ep_size
        sharded = weights / lanes + experts / copies if self._data_parallel.distributed_optimizer else weights + experts
        element, state = self.options.element_bytes.weight, self._data_parallel.state
        # Products in FP8 take weights by rows and by columns, a byte each: in the place of those in bf16, or besides.
        copied = 2 * (held - self._vocabulary_weights(stage)) if self.options.fp8 and not self.options.fp8_param else 0
        memory = StageMemory(
            weights_bytes=(held if self._data_parallel.adapters is None else held + weights) * element + copied,
            gradients_bytes=(weights + experts) * state.gradient_bytes,
            optimizer_bytes=sharded * state.optimizer_bytes(element),
            communicators_bytes=self.num_communicators * self._hardware.communicator_bytes_per_group,
            activations_bytes=float(activations[lane]),
            working_bytes=float(working[lane]),
            logits_bytes=float(logits[lane]),
            exchange_bytes=float(buffers[lane]),
        )
        copies_bytes = sharded * state.copied_gradient_bytes
        return memory._replace(step_bytes=max(0.0, copies_bytes - memory.micro_batch_bytes))

    def _largest_chunks(self, stage: int) -> float:
        """Return how many of its largest model chunk a stage is made of; all are taken as large as that."""
        model, topology = self._model, self.topology
        modules = model.mtp_num_layers if stage == topology.pp_size - 1 else 0
        is_even = not model.pipeline_layers or topology.pp_size == 1
        if is_even and not modules:
            return topology.vp_size
        chunks = model.chunks(topology.pp_size, topology.vp_size)[stage]
        return sum(chunks) / max(1.0, *chunks) or 1.0
