"""Attention of planned buckets on ranks beside a dense softmax over each of their samples."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynamic_cp.plans.lane_plan import PlanFacts, lane_plan
from dynamic_cp.types import CAUSAL, Bucket, Causal, Full, Mask, MicroBatch, Plan, PlannedBatch, Topology
from megatron.dynamic_cp.attention.kernels.choice import CPU, KERNELS
from megatron.dynamic_cp.attention.thd import Attention
from megatron.dynamic_cp.data.micro_batches import micro_batches, pack_step
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats, packed_shard_positions
from tests.distributed.naive_attention import SCALE, assert_all_close, exact, random_qkv, sees_of_pack


class Shard(NamedTuple):
    """Output and gradients of queries, keys and values of the pack's `tokens` that a lane has; `real`: no padding."""

    tokens: Tensor
    real: Tensor
    tensors: tuple[Tensor, ...]


def attend(
    rows: Sequence[tuple[Bucket, ...]], groups: DynamicCPGroups, mask: Causal | Full = CAUSAL,
    layers: Mask | None = None, kernel: str = CPU.name,
) -> list[Shard]:  # fmt: skip
    """Return this lane's part of the buckets of each micro-batch; `mask`: of samples that bring none."""
    plan = Plan(
        topology=Topology(num_lanes=groups.num_lanes),
        max_tokens_per_rank=99,
        micro_batches=tuple(MicroBatch(buckets=buckets) for buckets in rows),
    )
    facts = PlanFacts.of(PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,), reason=""))
    packed = pack_step(lane_plan(plan, groups.lane, facts), None)
    batches = micro_batches(packed, groups, torch.device("cpu"), "test", ExchangeStats(), mask)
    return [
        _attend_one(
            batch["packed_seq_params"].with_mask(layers or mask), one.cp_size, groups.lane - one.first_lane, kernel
        )
        for batch, one in zip(batches, packed.buckets, strict=True)
    ]


def _attend_one(params: DynamicPackedSeqParams, cp_size: int, rank: int, kernel: str) -> Shard:
    """Gradients of the output of padding are 0, as it has no loss."""
    padded = torch.tensor(params.padded_seqlens)
    local = padded // cp_size
    positions = torch.from_numpy(packed_shard_positions(params.padded_seqlens, cp_size, rank))
    tokens = positions + (padded.cumsum(0) - padded).repeat_interleave(local)
    real = positions < torch.tensor(params.seqlens).repeat_interleave(local)
    *inputs, grad = (x[tokens].float() for x in random_qkv(int(padded.sum()), int(padded.sum())))
    inputs = [x.requires_grad_() for x in inputs]
    out = Attention.apply(*inputs, params, SCALE, KERNELS[kernel])
    grads = torch.autograd.grad(out, inputs, grad * real[:, None, None])
    return Shard(tokens, real, (out.detach(), *grads))


def assert_equal_to_dense(bucket: Bucket, shards: Sequence[Shard], mask: Mask) -> None:
    """The lanes of a bucket computed what a softmax over each whole sample does; nobody saw padding."""
    multiple = 2 * bucket.cp_size if bucket.cp_size > 1 else 1
    padded = [-(-sample.seqlen // multiple) * multiple for sample in bucket.samples]
    seen = sees_of_pack(bucket.samples, padded, mask)
    expected_out, _, *expected = exact(random_qkv(sum(padded), sum(padded)), seen)
    tokens, real = (torch.cat([shard[part] for shard in shards]) for part in (0, 1))
    order = tokens.argsort()
    real = real[order]
    assert torch.equal(tokens[order], torch.arange(sum(padded)))
    assert torch.equal(real, seen.any(1)), "all but padding sees something"
    out, *grads = (torch.cat(parts)[order] for parts in zip(*(shard.tensors for shard in shards), strict=True))
    assert_all_close((out[real], *grads), [expected_out.of(real), *expected])
    assert not any(grad[~real].any() for grad in grads), "padding was seen"
