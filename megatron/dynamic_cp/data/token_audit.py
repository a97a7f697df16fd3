"""Follows every token from its sample to its shard: `--dynamic-cp-verify full`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dynamic_cp.errors import DisagreementError
from dynamic_cp.plans.lane_plan import LanePlan
from megatron.dynamic_cp.agreement.verify import run_on_all_ranks
from megatron.dynamic_cp.data.micro_batches import PackedStep, ReadSample, shards_of
from megatron.dynamic_cp.data.token_checksum import combine, token_checksum


def check_tokens(plan: LanePlan, packed: PackedStep, read_sample: ReadSample, what: str, device: torch.device) -> None:
    """Check that the shards of all ranks hold each token, label and mask of the samples exactly once. Collective.

    Args:
        packed: this rank's, in host memory; its `columns` is None on ranks that read nothing.
        read_sample: called again for the samples of buckets that begin at this lane.

    Raises:
        DisagreementError: they do not; on all ranks.
        DynamicCPError: a sample could not be read again; on all ranks.
    """

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
    """Return the sum over the samples of buckets that begin at this lane, and over placed ones that do."""
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
        # Behind those of samples there may be one that is nothing but padding.
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
