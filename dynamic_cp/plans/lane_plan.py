"""What one lane needs of a plan: its own buckets and the figures of the whole, small enough to send to every rank.

A plan of 4096 lanes is a megabyte; a lane's part of it some hundred bytes. Rank 0 publishes one message per lane, so
the traffic of a step grows with the samples, not with samples times ranks. Placed buckets of hybrids are an exception:
each lane knows all stretches that states pass through (`stretches`), some kilobytes on 64 lanes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dynamic_cp.errors import DisagreementError
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.plans.extension import kind_of
from dynamic_cp.plans.padding import padding_fraction
from dynamic_cp.plans.serialize import digest
from dynamic_cp.types import STATE_EXCHANGES, Bucket, ModelShape, Plan, PlannedBatch, Sample, Topology, parse_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """What every rank knows of a whole plan.

    Attributes:
        predicted_s, imbalance: simulated time of the iteration; max / mean of the lanes' simulated busy seconds.
        seqlen_sum, seqlen_squared_sum: over the samples, without padding; squares times the density of masks.
        cp_histogram: cp size -> number of non-empty buckets.
        padding_fraction: share of padding in all tokens computed.
        rank_token_multiple: what the padded tokens of a rank are rounded up to.
        fallback: why this is the static plan instead of the planner's, or None.
    """

    digest: str
    policy: str
    num_microbatches: int
    predicted_s: float
    imbalance: float
    reason: str
    num_samples: int
    seqlen_sum: int
    seqlen_squared_sum: int
    cp_histogram: Mapping[int, int]
    padding_fraction: float
    rank_token_multiple: int
    planner_s: float = 0.0
    fallback: str | None = None
    num_servers: int = 0

    @classmethod
    def of(
        cls,
        planned: PlannedBatch,
        model: ModelShape | None = None,
        *,
        planner_s: float = 0.0,
        fallback: str | None = None,
    ) -> PlanFacts:
        """Return the facts of `planned`; `model`: whose windows count; None: one without windows."""
        plan = planned.plan
        samples = tuple(plan.samples)
        squares = (sample.squared_tokens if model is None else model.squared_tokens(sample) for sample in samples)
        return cls(
            digest=digest(plan),
            policy=plan.policy,
            num_microbatches=plan.num_microbatches,
            predicted_s=planned.predicted_s,
            imbalance=planned.imbalance,
            reason=planned.reason,
            num_samples=len(samples),
            seqlen_sum=plan.num_tokens,
            seqlen_squared_sum=round(sum(squares)),
            cp_histogram=plan.cp_histogram,
            padding_fraction=padding_fraction(plan),
            rank_token_multiple=plan.topology.rank_token_multiple,
            planner_s=planner_s,
            fallback=fallback,
            num_servers=plan.num_servers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """A plan as one lane sees it.

    Attributes:
        buckets: those of this lane, one per micro-batch; a placed one has only the samples that the lane works with,
            and no placement: `parts` says what the lane does.
        parts: micro-batch -> what only this lane knows (`Mechanism.lane_parts`), with `Stretches` if states are passed
            on.
        extension: texts of what else this lane does, read by the plan's kind (`PlanKind.encode`); (): nothing.
    """

    lane: int
    buckets: tuple[Bucket, ...]
    facts: PlanFacts
    parts: Mapping[int, object] = field(default_factory=dict)
    extension: tuple[str, ...] = ()


def lane_plan(plan: Plan, lane: int, facts: PlanFacts) -> LanePlan:
    buckets = tuple(micro_batch.bucket_of_lane(lane) for micro_batch in plan.micro_batches)
    parts = {index: _parts(bucket, plan.topology) for index, bucket in enumerate(buckets)}
    own = {index: of_lanes[lane - buckets[index].first_lane] for index, of_lanes in parts.items() if of_lanes}
    return LanePlan(
        lane=lane,
        buckets=tuple(_of_lane(bucket, lane) for bucket in buckets),
        facts=facts,
        parts=own,
        extension=_extensions(plan)[lane],
    )


def _extensions(plan: Plan) -> Sequence[tuple[str, ...]]:
    kind = kind_of(plan)
    return [()] * plan.topology.num_lanes if kind is None else kind.encode(plan)


def _of_lane(bucket: Bucket, lane: int) -> Bucket:
    """Return what one of its lanes knows of a bucket."""
    if bucket.placement is None:
        return bucket
    group = (lane - bucket.first_lane) // bucket.inner_cp_size
    samples = tuple(bucket.samples[number] for number in bucket.placement.samples_of(group))
    return replace(bucket, samples=samples, placement=None)


def _parts(bucket: Bucket, topology: Topology) -> Sequence[object] | None:
    """Return what each lane of `bucket` alone must know; None for a single lane."""
    if bucket.cp_size == 1:
        return None
    parts = MECHANISMS[bucket.cp_comm_type].lane_parts(bucket, topology)
    if parts is None or not bucket.exchanges_states:
        return parts
    from dynamic_cp.plans.stretches import Stretches  # few jobs pass on states

    runs = Stretches.of_placement(bucket, topology.rank_token_multiple)
    return [[part, runs.known_to(lane).as_json()] for lane, part in enumerate(parts)]


def encode_lanes(plan: Plan, facts: PlanFacts) -> list[bytes]:
    """Return one message per lane, in lane order, for `decode_lane`."""
    buckets: list[list[str]] = [[] for _ in range(plan.topology.num_lanes)]
    parts: list[dict[int, object]] = [{} for _ in range(plan.topology.num_lanes)]
    for index, micro_batch in enumerate(plan.micro_batches):
        for bucket in micro_batch.buckets:
            text = None if bucket.placement else _encode_bucket(bucket)
            for lane in bucket.lanes:
                buckets[lane].append(text or _encode_bucket(_of_lane(bucket, lane)))
            for lane, part in zip(bucket.lanes, _parts(bucket, plan.topology) or (), strict=False):
                parts[lane][index] = part
    head = json.dumps(asdict(facts), separators=(",", ":"))
    of_lanes = zip(buckets, parts, _extensions(plan), strict=True)
    return [_message(lane, head, *of_lane) for lane, of_lane in enumerate(of_lanes)]


def decode_lane(message: bytes) -> LanePlan:
    """Return what `encode_lanes` wrote. Raises DisagreementError: the message was changed on its way, or is none."""
    checksum, _, body = message.partition(b"\n")
    found = hashlib.sha256(body).hexdigest()
    if checksum.decode("latin-1") != found:
        raise DisagreementError(
            f"a lane's part of the plan arrived with digest {found[:15]}, it was sent with {checksum[:15]!r}: "
            "the job's store returned other bytes than were written; restart the job",
        )
    try:
        lane, head, rows, parts, *extension = json.loads(body)
        head["cp_histogram"] = {int(size): number for size, number in head["cp_histogram"].items()}
        return LanePlan(
            lane=lane,
            buckets=tuple(_decode_bucket(row) for row in rows),
            facts=PlanFacts(**head),
            parts={int(index): part for index, part in parts.items()},
            extension=tuple(extension),
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DisagreementError(
            f"a lane's part of the plan is {body[:60]!r}, which is none ({type(error).__name__}: {error}): all ranks "
            "must run the same version, and no other program may reach the job's store; restart the job"
        ) from error


def _message(
    lane: int, head: str, buckets: Sequence[str], parts: Mapping[int, object], extension: Sequence[str]
) -> bytes:
    more = "".join("," + json.dumps(text) for text in extension)
    body = f"[{lane},{head},[{','.join(buckets)}],{json.dumps(parts, separators=(',', ':'))}{more}]".encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _encode_bucket(bucket: Bucket) -> str:
    ids = [sample.sample_id for sample in bucket.samples]
    seqlens = [sample.seqlen for sample in bucket.samples]
    row: list[Any] = [bucket.first_lane, bucket.cp_size, bucket.cp_comm_type, bucket.inner_cp_size, ids, seqlens]
    if any(sample.mask is not None for sample in bucket.samples) or bucket.exchanges_states:
        row.append([None if sample.mask is None else str(sample.mask) for sample in bucket.samples])
    if bucket.exchanges_states:
        row.append(bucket.state_exchange)
    return json.dumps(row, separators=(",", ":"))


def _decode_bucket(row: Sequence[Any]) -> Bucket:
    first_lane, cp_size, cp_comm_type, inner_cp_size, ids, seqlens, *more = row
    masks = [None if text is None else parse_mask(text) for text in more[0]] if more else [None] * len(ids)
    return Bucket(
        first_lane=first_lane,
        cp_size=cp_size,
        cp_comm_type=cp_comm_type,
        inner_cp_size=inner_cp_size,
        state_exchange=more[1] if len(more) > 1 else STATE_EXCHANGES[0],
        samples=tuple(Sample(sample_id=i, seqlen=s, mask=m) for i, s, m in zip(ids, seqlens, masks, strict=True)),
    )
