"""The one judge of a plan: generator, loader, tests and ranks all call `check_plan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.mechanisms.registry import MECHANISMS, masks_are_served_by
from dynamic_cp.plans.extension import kind_of
from dynamic_cp.plans.padding import lane_tokens
from dynamic_cp.types import Bucket, MicroBatch, Plan, Sample

_SHOWN_SAMPLES = 4


def check_plan(plan: Plan, samples: Iterable[Sample] | None = None) -> None:
    """Raise unless every rank can run `plan` and every sample is in it once.

    The rules:
        1. There is a micro-batch, and their number is a multiple of topology.num_microbatches_multiple (any number in
           a plan of a kind).
        2. The buckets of a micro-batch, in lane order, tile lanes 0 .. num_lanes - 1 exactly once.
        3. A bucket is aligned: first_lane is a multiple of cp_size (a power of two by its type). A placed one need not.
        4. A bucket with samples holds at most max_tokens_per_rank padded tokens a rank.
        5. A bucket without samples (an empty place) has cp_size 1.
        6. No sample is in two places.
        7. If `samples` are given, the plan has exactly these, lengths and masks included.
        8. The lanes of a bucket can use its mechanism: the inner groups of a2a+p2p divide the lanes of a node, and each
           lies inside one node on every stage; only some mechanisms serve samples with masks of their own; a placement
           computes all that the masks allow, once, and nothing else (`placement.legal`).
        9. A bucket lies inside one EP block (`topology.expert_lanes` lanes) or holds whole ones. So all lanes of a
           block run the same operations of the same micro-batches in one order, as experts need.
        10. A bucket of one lane passes on no states of linear attention; whether the model has any, prices say.
        11. A plan of a kind (`extension`) keeps that kind's rules, which replace rule 8.

    Raises:
        IllegalPlanError: the first broken rule. The first line of the message is complete by itself; below it is the
            part of the grid that matters, with a mark under the cell. `micro_batch` and `first_lane` name it.
    """
    if not plan.micro_batches:
        raise IllegalPlanError("the plan has 0 micro-batches, at least 1 is needed: plan a non-empty global batch")
    multiple, rank_multiple = plan.topology.num_microbatches_multiple, plan.topology.rank_token_multiple
    kind = kind_of(plan)
    if kind is None and plan.num_microbatches % multiple:
        raise IllegalPlanError(
            f"the plan has {plan.num_microbatches} micro-batches, interleaving needs a multiple of {multiple}: "
            "add empty micro-batches"
        )
    place_of_sample: dict[int, tuple[int, int]] = {}
    for index, micro_batch in enumerate(plan.micro_batches):
        _check_tiling(plan, index, micro_batch)
        for position, bucket in enumerate(micro_batch.buckets):
            _check_bucket(plan, index, position, bucket, rank_multiple)
            place = (index, bucket.first_lane)
            for sample in bucket.samples:
                if sample.sample_id in place_of_sample:
                    other, lane = place_of_sample[sample.sample_id]
                    reason = (
                        f"sample {sample.sample_id} is twice in the plan, first in micro-batch {other} at lane {lane}"
                    )
                    raise _illegal(plan, index, position, f"{reason}: put every sample into one bucket", also=other)
                place_of_sample[sample.sample_id] = place
    if kind is not None:
        kind.check(plan)
    if samples is not None:
        _check_samples(plan, samples, place_of_sample)


def _check_tiling(plan: Plan, index: int, micro_batch: MicroBatch) -> None:
    lane = 0
    for position, bucket in enumerate(micro_batch.buckets):
        if bucket.first_lane != lane:
            what = "left out" if bucket.first_lane > lane else "covered before"
            reason = f"the bucket starts at lane {bucket.first_lane} but lane {lane} is next ({what})"
            remedy = "list buckets in lane order, each lane exactly once"
            raise _illegal(plan, index, position, f"{reason}: {remedy}")
        if bucket.placement is None and bucket.first_lane % bucket.cp_size:
            reason = f"first_lane {bucket.first_lane} is not a multiple of cp_size {bucket.cp_size}"
            raise _illegal(plan, index, position, f"{reason}: use aligned groups only, others are never created")
        lane += bucket.cp_size
        if lane > plan.topology.num_lanes:
            reason = f"the bucket needs lanes up to {lane - 1}, the last lane is {plan.topology.num_lanes - 1}"
            raise _illegal(plan, index, position, f"{reason}: use a smaller cp_size")
    if lane < plan.topology.num_lanes:
        reason = f"the buckets cover {lane} of {plan.topology.num_lanes} lanes"
        remedy = "fill the other lanes with empty places of cp_size 1"
        raise _illegal(plan, index, len(micro_batch.buckets), f"{reason}: {remedy}")


def _check_bucket(plan: Plan, index: int, position: int, bucket: Bucket, rank_multiple: int) -> None:
    if bucket.exchanges_states and bucket.cp_size == 1:
        alone = "states of linear attention are passed on among 1 lane: leave state_exchange out"
        raise _illegal(plan, index, position, alone)
    if not bucket.samples:
        if bucket.cp_size > 1:
            empty = f"the bucket is empty but has cp_size {bucket.cp_size}: an empty place has cp_size 1"
            raise _illegal(plan, index, position, empty)
        return
    # Most buckets have one lane, which exchanges nothing.
    reason = _why_block_cut(bucket, plan) or _why_illegal(bucket, plan) if bucket.cp_size > 1 else None
    # A placement that is wrong may be on lanes that do not exist.
    is_countable = reason is None or bucket.placement is None
    tokens = max(lane_tokens(bucket, rank_multiple)) if is_countable else 0
    if tokens > plan.max_tokens_per_rank:
        full = f"{tokens} padded tokens per rank, the limit is {plan.max_tokens_per_rank}"
        raise _illegal(plan, index, position, f"{full}: use a larger cp_size or fewer samples")
    if reason is not None:
        raise _illegal(plan, index, position, reason)


def _why_block_cut(bucket: Bucket, plan: Plan) -> str | None:
    block = plan.topology.expert_lanes
    first = bucket.first_lane % block
    if first + bucket.cp_size <= block or (first == 0 and bucket.cp_size % block == 0):
        return None
    return (
        f"{bucket.cp_size} lanes cut blocks of {block} lanes that share experts (ep_size {plan.topology.ep_size}): put "
        "the bucket into one block, or on whole ones"
    )


def _why_illegal(bucket: Bucket, plan: Plan) -> str | None:
    kind = kind_of(plan)
    if kind is not None:
        return kind.why_illegal(bucket, plan)
    mechanism = MECHANISMS[bucket.cp_comm_type]
    if not mechanism.serves_masks:
        for sample in bucket.samples:
            if sample.mask is not None:
                return (
                    f"{sample.mask_in_words}, which {mechanism.name} cannot serve on {bucket.cp_size} lanes: "
                    f"use {masks_are_served_by()}, or one lane"
                )
    return mechanism.why_illegal(bucket, plan.topology, plan.max_tokens_per_rank)


def _check_samples(plan: Plan, samples: Iterable[Sample], place_of_sample: dict[int, tuple[int, int]]) -> None:
    samples = tuple(samples)
    wanted = {sample.sample_id: sample for sample in samples}
    if len(wanted) < len(samples):
        raise IllegalPlanError(
            f"the global batch has {len(samples)} samples but {len(wanted)} different sample ids: number them uniquely"
        )
    if not wanted.keys() <= place_of_sample.keys():
        missing = [sample_id for sample_id in wanted if sample_id not in place_of_sample]
        raise IllegalPlanError(
            f"the plan lacks {len(missing)} of {len(wanted)} samples ({_shorten(missing)}): plan the whole batch"
        )
    for index, micro_batch in enumerate(plan.micro_batches):
        for position, bucket in enumerate(micro_batch.buckets):
            for sample in bucket.samples:
                given = wanted.get(sample.sample_id)
                if given is sample:
                    continue
                if given is None:
                    reason = f"sample {sample.sample_id} is not one of the {len(wanted)} samples of the global batch"
                elif given.seqlen != sample.seqlen:
                    reason = f"sample {sample.sample_id} has {sample.seqlen} tokens here but {given.seqlen} were given"
                elif given.mask != sample.mask:
                    reason = f"sample {sample.sample_id} has the mask {sample.mask} here but {given.mask} was given"
                else:
                    continue
                raise _illegal(plan, index, position, f"{reason}: plan these samples again")


def _illegal(plan: Plan, index: int, position: int, reason: str, *, also: int | None = None) -> IllegalPlanError:
    """Return the error for the bucket at `position` of micro-batch `index`, with the rows around it drawn."""
    buckets = plan.micro_batches[index].buckets
    if position < len(buckets):
        first_lane, where = buckets[position].first_lane, _lanes_text(buckets[position])
    else:
        first_lane = buckets[-1].lanes.stop if buckets else 0
        where = f"lane {first_lane}"
    shown = sorted(
        {max(index - 1, 0), index, min(index + 1, plan.num_microbatches - 1), index if also is None else also}
    )
    lines = []
    for row in shown:
        cells = [_cell_text(bucket) for bucket in plan.micro_batches[row].buckets]
        prefix = f"{row:>6} |"
        lines.append(prefix + "".join(f" {cell} |" for cell in cells))
        if row == index:
            width = len(cells[position]) if position < len(cells) else 4
            lines.append(" " * (len(prefix) + 1 + sum(len(cell) + 3 for cell in cells[:position])) + "^" * width)
    message = f"micro-batch {index}, {where}: {reason}\n" + "\n".join(lines)
    return IllegalPlanError(message, micro_batch=index, first_lane=first_lane)


def _lanes_text(bucket: Bucket) -> str:
    if bucket.cp_size == 1:
        return f"lane {bucket.first_lane}"
    return f"lanes {bucket.first_lane}-{bucket.lanes.stop - 1}"


def _cell_text(bucket: Bucket) -> str:
    if not bucket.samples:
        return f"{_lanes_text(bucket)}: -"
    ids = _shorten([sample.sample_id for sample in bucket.samples])
    return f"{_lanes_text(bucket)}: {ids} = {bucket.num_tokens} tokens"


def _shorten(ids: Sequence[int]) -> str:
    shown = " ".join(map(str, ids[:_SHOWN_SAMPLES]))
    return shown if len(ids) <= _SHOWN_SAMPLES else f"{shown} + {len(ids) - _SHOWN_SAMPLES} more"
