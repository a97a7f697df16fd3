"""Follows every token from its sample to its shard: `--dynamic-cp-verify full`.

Every token counts with a 50-bit hash of (sample, position, column, value). Their sum shows whether each token arrived
exactly once, in any order and any split over ranks; a lost, doubled, swapped or changed token goes unnoticed with
probability 2^-50. One all-reduce of int64 adds up the ranks' sums, and `combine` undoes wrap-around.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from dynamic_cp.errors import DisagreementError
from dynamic_cp.plans.lane_plan import LanePlan
from megatron.dynamic_cp.agreement.verify import run_on_all_ranks
from megatron.dynamic_cp.data.micro_batches import PackedStep, ReadSample, shards_of

CHECKSUM_BITS = 50
_MASK = (1 << CHECKSUM_BITS) - 1


def token_checksum(
    sample_ids: ArrayLike, positions: NDArray[np.int64], values: NDArray[np.generic], *, column: int = 0
) -> int:
    """Return the sum of the tokens' hashes, 0 <= sum < 2^50; 0 for no tokens.

    Args:
        sample_ids: whose token it is, int [T] or one for all.
        positions: position of each token within its sample, int [T].
        values: the tokens, labels (integers) or loss mask (float32, compared bit by bit), [T]; no padding.
        column: tells tokens, labels and mask of the same position apart.
    """
    ids = np.asarray(sample_ids, dtype=np.int64).astype(np.uint64)
    bits = values.view(np.int32) if values.dtype == np.float32 else values
    hashed = _mix(ids + np.uint64(column) * np.uint64(0x9E3779B97F4A7C15))
    hashed = _mix(hashed ^ positions.astype(np.uint64))
    hashed = _mix(hashed ^ bits.astype(np.int64).astype(np.uint64))
    return combine(int(hashed.sum(dtype=np.uint64)) if len(positions) else 0)


def combine(total: int) -> int:
    """Return a sum of checksums as the checksum of all their tokens; int64 wrap-around does no harm."""
    return total & _MASK


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a bijective hash of 64-bit integers: SplitMix64's finalizer (Steele, Lea and Flood 2014)."""
    x = np.atleast_1d(x)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def check_tokens(plan: LanePlan, packed: PackedStep, read_sample: ReadSample, what: str, device: torch.device) -> None:
    """Check that the shards of all ranks hold each token, label and mask of the samples exactly once. Collective.

    Args:
        packed: this rank's, in host memory; its `columns` is None on ranks that read nothing.
        read_sample: called again for the samples of buckets that begin at this lane.

    Raises DisagreementError: they do not; on all ranks. Raises DynamicCPError: a sample could not be read again; on all
    ranks."""

    def both_sums() -> tuple[int, int]:
        if packed.columns is None or packed.loss_mask is None:
            return 0, 0
        values = (*packed.columns.numpy()[:2], packed.loss_mask.numpy())
        return _as_read(plan, packed, read_sample), _as_packed(plan, packed, values)

    sums = torch.tensor(run_on_all_ranks(both_sums, device), device=device)
    dist.all_reduce(sums)
    read, found = (combine(total) for total in sums.tolist())
    if read != found:
        raise DisagreementError(
            f"the tokens of {what} changed between reading and sharding: checksum {read:013x} as read, {found:013x} "
            "in the shards; this is a bug or bad memory"
        )


def _as_read(plan: LanePlan, packed: PackedStep, read_sample: ReadSample) -> int:
    """Return the sum over samples of buckets that begin at this lane; placed ones count where their first token is."""
    total = 0
    for bucket, shape in zip(plan.buckets, packed.buckets, strict=True):
        samples = bucket.samples if bucket.first_lane == plan.lane else ()
        if shape.placed is not None:
            samples = tuple(bucket.samples[home.sample] for home in shape.placed.homes if home.start == 0)
        for sample in samples:
            values = read_sample(sample.sample_id)
            positions = np.arange(sample.seqlen)
            for column, name in enumerate(("tokens", "labels", "loss_mask")):
                total += token_checksum(sample.sample_id, positions, getattr(values, name), column=column)
    return combine(total)


def _as_packed(plan: LanePlan, packed: PackedStep, columns: Sequence[NDArray[Any]]) -> int:
    ids, seqlens, shards = [], [], []
    for bucket, shape in zip(plan.buckets, packed.buckets, strict=True):
        local = shards_of(shape, plan.lane)
        # A last shard without a sample is only padding.
        samples = [(sample.sample_id, sample.seqlen) for sample in bucket.samples]
        samples += [(0, 0)] * (len(local) - len(samples))
        lengths = [len(shard) for shard in local]
        ids.append(np.repeat([sample_id for sample_id, _ in samples], lengths))
        seqlens.append(np.repeat([seqlen for _, seqlen in samples], lengths))
        shards += local
    positions = np.concatenate(shards)
    is_real = positions < np.concatenate(seqlens)
    owners = np.concatenate(ids)[is_real]
    return combine(
        sum(
            token_checksum(owners, positions[is_real], values[is_real], column=column)
            for column, values in enumerate(columns)
        )
    )
