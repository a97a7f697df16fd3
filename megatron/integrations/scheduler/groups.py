"""A plan in the form of Megatron-LM's packing schedulers: groups[micro-batch][lane] -> the ids that the lane computes.

Lanes with the same ids are one CP group. No lane may be without samples there, so an empty place of a plan is filled by
giving more lanes to the buckets beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dynamic_cp.errors import IllegalPlanError, InvalidInputError
from dynamic_cp.packing.megatron_dev import pack_megatron_dev
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import Bucket, MicroBatch, Plan, PlanOptions, Sample, is_power_of_two

Groups = list[list[list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Samples that one CP group computes, on at least `cp_size` lanes."""

    cp_size: int
    ids: tuple[int, ...]


def groups_of(plan: Plan, *, multiple: int = 1, max_samples: int | None = None) -> Groups:
    """Return the plan's buckets on its lanes; micro-batches with empty places are spread over all lanes.

    Args:
        plan: of a power of two of lanes; sample ids are those of the groups.
        multiple: what the number of micro-batches must be a multiple of (interleaved pipelines).
        max_samples: of one pack; None: any.

    Raises InvalidInputError: lanes that are no power of two, or fewer samples than micro-batches are needed."""
    num_lanes = plan.topology.num_lanes
    if not is_power_of_two(num_lanes):
        raise InvalidInputError(
            f"{num_lanes} lanes are not a power of two: Megatron-LM builds dynamic CP groups for powers of two only"
        )
    rows = [
        [
            Pack(cp_size=bucket.cp_size, ids=tuple(sample.sample_id for sample in bucket.samples))
            for bucket in sorted(micro_batch.buckets, key=lambda bucket: bucket.first_lane)
        ]
        for micro_batch in plan.micro_batches
    ]
    return _filled(rows, num_lanes, multiple, max_samples)


def groups_of_greedy(
    seqlens: Mapping[int, int],
    cost_model: CostModel,
    options: PlanOptions,
    *,
    multiple: int = 1,
    max_samples: int | None = None,
) -> Groups:
    """Return what Megatron-LM's own greedy makes of the samples: it takes lengths as they are, without padding.

    Args:
        seqlens: id -> tokens.
        cost_model: of a power of two of lanes; its prices are not used.
        options: the limit of tokens and the smallest CP size.
        multiple, max_samples: as of `groups_of`.
    """
    num_lanes, table = cost_model.topology.num_lanes, cost_model.table
    ids = sorted(seqlens, key=lambda sample: (-seqlens[sample], sample))
    sizes = 1 << np.arange(len(table.capacities))
    unpadded = table._replace(
        multiples=np.ones_like(table.multiples),
        capacities=np.where(sizes < options.min_cp_size, 0, options.max_tokens_per_rank * sizes),
    )
    lengths = np.array([seqlens[sample] for sample in ids], np.int64)
    packing = pack_megatron_dev(lengths, unpadded, num_lanes, options.max_tokens_per_rank, multiple)
    members: list[list[int]] = [[] for _ in packing.rows]
    for sample, bucket in zip(ids, packing.bucket_of_sample.tolist(), strict=True):
        members[bucket].append(sample)
    rows: list[list[Pack]] = [[] for _ in range(packing.num_rows)]
    for bucket in np.lexsort((packing.first_lanes, packing.rows)).tolist():
        pack = Pack(cp_size=1 << int(packing.log2_cp_sizes[bucket]), ids=tuple(members[bucket]))
        rows[packing.rows[bucket]].append(pack)
    return _filled(rows, num_lanes, multiple, max_samples)


def groups_ns(groups: Groups, seqlens: Mapping[int, int], cost_model: CostModel) -> int:
    """Return the simulated nanoseconds of an iteration of `groups`, with the padding that their lanes need."""
    topology = cost_model.topology
    rows = []
    for lanes in groups:
        first, buckets = 0, []
        for pack in _packs_of(lanes):
            samples = tuple(Sample(sample_id=sample, seqlen=seqlens[sample]) for sample in pack.ids)
            buckets.append(Bucket(first_lane=first, cp_size=pack.cp_size, samples=samples))
            first += pack.cp_size
        rows.append(MicroBatch(buckets=tuple(buckets)))
    empty = MicroBatch(buckets=tuple(Bucket(first_lane=lane) for lane in range(topology.num_lanes)))
    rows += [empty] * (-len(rows) % topology.num_microbatches_multiple)
    limit = cost_model.options.max_tokens_per_rank
    return makespan_ns(Plan(topology=topology, micro_batches=tuple(rows), max_tokens_per_rank=limit), cost_model)


def _filled(rows: Sequence[Sequence[Pack]], num_lanes: int, multiple: int, max_samples: int | None) -> Groups:
    """Return rows of packs, in the order of their lanes, as groups that leave no lane empty."""
    groups: Groups = []
    overflow: list[Pack] = []
    for row in rows:
        packs = []
        for pack in row:
            first, *more = [Pack(cp_size=pack.cp_size, ids=part) for part in _parts(pack.ids, max_samples)] or [pack]
            packs.append(first)
            overflow += more
        if all(pack.ids for pack in packs) and sum(pack.cp_size for pack in packs) == num_lanes:
            groups.append([list(pack.ids) for pack in packs for _ in range(pack.cp_size)])
        elif any(pack.ids for pack in packs):
            groups.append(spread([pack for pack in packs if pack.ids], num_lanes))
    while overflow:
        taken: list[Pack] = []
        while overflow and sum(pack.cp_size for pack in taken) + overflow[0].cp_size <= num_lanes:
            taken.append(overflow.pop(0))
        groups.append(spread(taken, num_lanes))
    while len(groups) % multiple:
        _split_one(groups, multiple)
    return groups


def spread(packs: Sequence[Pack], num_lanes: int) -> list[list[int]]:
    """Return the ids of each of `num_lanes` lanes, none of them empty; packs get aligned lanes, at least their own.
    `packs`: at least one; together they need no more than `num_lanes`, a power of two."""
    if len(packs) == 1:
        return [list(packs[0].ids) for _ in range(num_lanes)]
    halves: tuple[list[Pack], list[Pack]] = ([], [])
    taken = [0, 0]
    # Descending powers of two on the emptier half always fit, and both halves get some.
    for pack in sorted(packs, key=lambda pack: -pack.cp_size):
        side = 0 if taken[0] <= taken[1] else 1
        halves[side].append(pack)
        taken[side] += pack.cp_size
    return spread(halves[0], num_lanes // 2) + spread(halves[1], num_lanes // 2)


def check_groups(
    groups: Groups, seqlens: Mapping[int, int], *, num_lanes: int, max_tokens_per_rank: int, multiple: int = 1
) -> Counter[int]:
    """Check that groups are what Megatron-LM's data path takes; return CP size -> number of packs. `seqlens`: id ->
    padded tokens, of all samples. Raises IllegalPlanError: a sample that is not there once, a lane without samples, a
    CP group that is not an aligned power of two of lanes, too many tokens, or a wrong number of micro-batches."""
    seen: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    if len(groups) % multiple:
        raise IllegalPlanError(f"{len(groups)} micro-batches are not a multiple of {multiple}")
    for index, lanes in enumerate(groups):
        if len(lanes) != num_lanes:
            raise IllegalPlanError(f"micro-batch {index} has {len(lanes)} lanes, {num_lanes} are there")
        lane = 0
        while lane < num_lanes:
            ids = lanes[lane]
            if not ids:
                raise IllegalPlanError(f"micro-batch {index} leaves lane {lane} without samples")
            end = lane
            while end < num_lanes and lanes[end] == ids:
                end += 1
            cp_size = end - lane
            if not is_power_of_two(cp_size) or lane % cp_size:
                raise IllegalPlanError(
                    f"micro-batch {index} has a CP group of lanes {lane} to {end - 1}, not an aligned power of two"
                )
            tokens = sum(seqlens.get(sample, 0) for sample in ids)
            if tokens > max_tokens_per_rank * cp_size:
                raise IllegalPlanError(
                    f"micro-batch {index} has {tokens} tokens on {cp_size} lanes, {max_tokens_per_rank} fit on each"
                )
            seen.update(ids)
            sizes[cp_size] += 1
            lane = end
    wrong = sorted(set(seqlens) ^ set(seen)) + [sample for sample, count in seen.items() if count != 1]
    if wrong:
        raise IllegalPlanError(f"sample {wrong[0]} is in {seen[wrong[0]]} packs, 1 is needed", sample_id=wrong[0])
    return sizes


def _parts(ids: tuple[int, ...], max_samples: int | None) -> list[tuple[int, ...]]:
    size = max_samples or max(1, len(ids))
    return [ids[first : first + size] for first in range(0, len(ids), size)]


def _packs_of(lanes: list[list[int]]) -> list[Pack]:
    packs: list[Pack] = []
    for ids in lanes:
        if packs and packs[-1].ids == tuple(ids):
            packs[-1] = Pack(cp_size=packs[-1].cp_size + 1, ids=packs[-1].ids)
        else:
            packs.append(Pack(cp_size=1, ids=tuple(ids)))
    return packs


def _split_one(groups: Groups, multiple: int) -> None:
    """Split the micro-batch with the most samples into two, in place."""
    most = max(range(len(groups)), key=lambda index: (sum(len(pack.ids) for pack in _packs_of(groups[index])), -index))
    packs, num_lanes = _packs_of(groups[most]), len(groups[most])
    if len(packs) == 1:
        (only,) = packs
        if len(only.ids) == 1:
            raise InvalidInputError(
                f"{len(groups)} samples cannot fill a multiple of {multiple} micro-batches: raise the batch size"
            )
        half = len(only.ids) // 2
        packs = [Pack(cp_size=only.cp_size, ids=only.ids[:half]), Pack(cp_size=only.cp_size, ids=only.ids[half:])]
    groups[most : most + 1] = [spread(packs[::2], num_lanes), spread(packs[1::2], num_lanes)]
