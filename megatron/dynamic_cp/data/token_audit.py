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
from megatron.dynamic_cp.data.micro_batches import PackedStep, ReadSample, places_in_sequences
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
        return _as_read(plan, read_sample), _as_packed(plan, packed, values)

    sums = torch.tensor(run_on_all_ranks(both_sums, device), device=device)
    dist.all_reduce(sums)
    read, found = (combine(total) for total in sums.tolist())
    if read != found:
        raise DisagreementError(
            f"the tokens of {what} changed between reading and sharding: checksum {read:013x} as read, {found:013x} "
            "in the shards; this is a bug or bad memory"
        )


def _as_read(plan: LanePlan, read_sample: ReadSample) -> int:
    total = 0
    for bucket in plan.buckets:
        if bucket.first_lane == plan.lane:
            for sample in bucket.samples:
                values = read_sample(sample.sample_id)
                positions = np.arange(sample.seqlen)
                for column, name in enumerate(("tokens", "labels", "loss_mask")):
                    total += token_checksum(sample.sample_id, positions, getattr(values, name), column=column)
    return combine(total)


def _as_packed(plan: LanePlan, packed: PackedStep, columns: Sequence[NDArray[Any]]) -> int:
    ids, seqlens = [], []
    for bucket, shape in zip(plan.buckets, packed.buckets, strict=True):
        local = [padded // bucket.cp_size for padded in shape.padded_seqlens]
        samples = [(sample.sample_id, sample.seqlen) for sample in bucket.samples] or [(0, 0)]
        ids.append(np.repeat([sample_id for sample_id, _ in samples], local))
        seqlens.append(np.repeat([seqlen for _, seqlen in samples], local))
    positions = places_in_sequences(packed, plan.lane)
    is_real = positions < np.concatenate(seqlens)
    owners = np.concatenate(ids)[is_real]
    return combine(
        sum(
            token_checksum(owners, positions[is_real], values[is_real], column=column)
            for column, values in enumerate(columns)
        )
    )
