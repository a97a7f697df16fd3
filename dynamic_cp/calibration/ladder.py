"""Synthetic global batches of growing size, which the ranks of a run train on to show how fast they are."""

from __future__ import annotations

from itertools import count, cycle, islice

from dynamic_cp.plans.padding import sample_multiple
from dynamic_cp.pricing.capacity import allowed_cp_sizes, capacity_tokens
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.lengths import squared_tokens
from dynamic_cp.types import Bucket, MicroBatch, Plan, Sample, largest_power_of_two

_FEWEST_TOKENS = 32
_PARTS = 4
_GROWTH = 4


def ladder(cost_model: CostModel, max_seqlen: int) -> tuple[Plan, ...]:
    """Return plans in which ranks hold more and more tokens: four times as many in each, the maximum in the last.

    Each has micro-batches of every CP size that plans may use, the same on all lanes, with samples as long as possible.
    All but the last plan, which takes longest, also have them with four times as many shorter samples. So the parts of
    a price that grow with tokens, with their squares, and with neither can be told apart.

    Args:
        cost_model: with the topology and options of the run; says which exchange a bucket uses.
        max_seqlen: longest sample of the run, tokens.
    """
    topology, options = cost_model.topology, cost_model.options
    ids = count()
    sizes = [one for one in allowed_cp_sizes(topology, options) if cost_model.table.capacities[one.bit_length() - 1]]

    def bucket(first_lane: int, cp_size: int, rank_tokens: int, longest: int) -> Bucket:
        multiple, room = (
            sample_multiple(cp_size),
            min(cp_size * rank_tokens, capacity_tokens(cp_size, topology, options)),
        )
        seqlens: list[int] = []
        while room >= multiple:
            seqlens.append(max(multiple, min(room, longest) // multiple * multiple))
            room -= seqlens[-1]
        if not seqlens:
            return Bucket(first_lane=first_lane)
        samples = tuple(Sample(sample_id=next(ids), seqlen=seqlen) for seqlen in seqlens)
        squared = squared_tokens(samples, seqlens, cost_model.model)
        attention = cost_model.best_exchange(cp_size, first_lane, sum(seqlens), squared)
        return Bucket(
            first_lane=first_lane,
            cp_size=cp_size,
            samples=samples,
            cp_comm_type=attention.cp_comm_type,
            inner_cp_size=attention.inner_cp_size,
        )

    def micro_batch(cp_size: int, rank_tokens: int, parts: int) -> MicroBatch:
        longest = max(1, min(max_seqlen, cp_size * rank_tokens // parts))
        whole = topology.num_lanes - topology.num_lanes % cp_size
        groups = [bucket(first, cp_size, rank_tokens, longest) for first in range(0, whole, cp_size)]
        rest = range(whole, topology.num_lanes)
        if sizes[0] > 1:
            return MicroBatch(buckets=(*groups, *(Bucket(first_lane=lane) for lane in rest)))
        return MicroBatch(buckets=(*groups, *(bucket(lane, 1, rank_tokens, longest) for lane in rest)))

    def plan(rank_tokens: int) -> Plan:
        kinds = [(cp_size, parts) for cp_size in sizes for parts in ((1,) if rank_tokens == largest else (1, _PARTS))]
        number = -(-len(kinds) // topology.num_microbatches_multiple) * topology.num_microbatches_multiple
        return Plan(
            topology=topology,
            max_tokens_per_rank=options.max_tokens_per_rank,
            micro_batches=tuple(
                micro_batch(cp_size, rank_tokens, parts) for cp_size, parts in islice(cycle(kinds), number)
            ),
        )

    largest = largest_power_of_two(options.max_tokens_per_rank)
    rungs = [largest]
    while rungs[-1] >= _GROWTH * _FEWEST_TOKENS:
        rungs.append(rungs[-1] // _GROWTH)
    return tuple(plan(rank_tokens) for rank_tokens in reversed(rungs))
