"""Models with full attention: every exchange equals a dense softmax over each sequence, and nobody sees padding."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dynamic_cp.errors import DataError, UnsupportedFeatureError
from dynamic_cp.plans.lane_plan import PlanFacts, lane_plan
from dynamic_cp.types import CAUSAL, CP_COMM_TYPES, FULL, Bucket, CpCommType, Plan, Sample, Topology
from dynamic_cp.types.plan import MicroBatch, PlannedBatch
from examples.torch_device_mesh import problem_for
from megatron.dynamic_cp.attention import packs
from megatron.dynamic_cp.attention.kernels.choice import CPU, KERNELS
from megatron.dynamic_cp.attention.thd import Attention
from megatron.dynamic_cp.data.micro_batches import micro_batches, pack_step
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.layout.packed_seq_params import ExchangeStats
from megatron.dynamic_cp.layout.sharding import count_held, packed_shard_positions, shard_positions
from megatron.dynamic_cp.outside import PlannedCollator, scaled_dot_product_attention
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.naive_attention import SCALE, Exact, assert_all_close, exact, random_qkv, sees_of_pack

NUM_LANES = 4
# One token makes 7 of padding on four lanes, of which three then have nothing else.
ON_FOUR, ON_TWO, ALONE = (1, 37, 2, 16, 9, 30, 5, 1), (6, 1, 8, 3, 23), (5, 1, 12)


def bucket(first_lane: int, cp_size: int, seqlens: tuple[int, ...], exchange: CpCommType = "p2p") -> Bucket:
    samples = tuple(Sample(sample_id=100 * first_lane + i, seqlen=n) for i, n in enumerate(seqlens))
    inner = 2 if exchange == "a2a+p2p" else 1
    return Bucket(first_lane=first_lane, cp_size=cp_size, samples=samples, cp_comm_type=exchange, inner_cp_size=inner)


def steps(exchange: CpCommType) -> tuple[tuple[Bucket, ...], ...]:
    """Return micro-batches of four lanes, of two with an empty place beside them, of single lanes and of 1 token."""
    of_two: CpCommType = "p2p" if exchange == "a2a+p2p" else exchange
    return (
        (bucket(0, 4, ON_FOUR, exchange),),
        (bucket(0, 2, ON_TWO, of_two), bucket(2, 2, (), of_two)),
        tuple(bucket(lane, 1, ALONE) for lane in range(4)),
        (bucket(0, 4, (1,), exchange),),
    )


class Shard(NamedTuple):
    """What a lane computed of a bucket's pack.

    Attributes:
        tokens: which of the pack's they are. real: whether they are no padding.
        tensors: the output, and the gradients of queries, keys and values.
    """

    tokens: Tensor
    real: Tensor
    tensors: tuple[Tensor, ...]


def attend(exchanges: tuple[CpCommType, ...], kernel: str, shown: str) -> dict[CpCommType, list[Shard]]:
    """Return this lane's part of every micro-batch; gradients of the output of padding are 0, as it has no loss."""
    initialize_model_parallel()
    if shown == "padding":
        packs.count_held = lambda _seqlen, padded, size, _rank: padded // size
    topology = Topology(num_lanes=NUM_LANES)
    groups = DynamicCPGroups.build(topology, timeout_s=30, exchanges=CP_COMM_TYPES, inner_sizes=(2,))
    found = {}
    for exchange in exchanges:
        plan = Plan(
            topology=topology,
            max_tokens_per_rank=99,
            micro_batches=tuple(MicroBatch(buckets=buckets) for buckets in steps(exchange)),
        )
        facts = PlanFacts.of(PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,), reason=""))
        packed = pack_step(lane_plan(plan, groups.lane, facts), None)
        batches = micro_batches(packed, groups, torch.device("cpu"), "test", ExchangeStats(), FULL)
        found[exchange] = [
            attend_one(batch["packed_seq_params"], one.cp_size, groups.lane - one.first_lane, kernel)
            for batch, one in zip(batches, packed.buckets, strict=True)
        ]
    return found


def attend_one(params: packs.DynamicPackedSeqParams, cp_size: int, rank: int, kernel: str) -> Shard:
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


def dense(one: Bucket) -> list[Exact]:
    """Return the output and the gradients of all tokens; padding has 0."""
    multiple = 2 * one.cp_size if one.cp_size > 1 else 1
    padded = [-(-sample.seqlen // multiple) * multiple for sample in one.samples]
    out, _, *grads = exact(random_qkv(sum(padded), sum(padded)), sees_of_pack(one.samples, padded, FULL))
    return [out, *grads]


def compare(exchange: CpCommType, ranks: list[dict[CpCommType, list[Shard]]]) -> int:
    """Return how many buckets were compared."""
    compared = 0
    for index, buckets in enumerate(steps(exchange)):
        for one in buckets:
            if not one.samples:
                continue
            shards = [ranks[lane][exchange][index] for lane in one.lanes]
            order = torch.cat([shard.tokens for shard in shards]).argsort()
            real = torch.cat([shard.real for shard in shards])[order]
            out, *grads = (torch.cat(parts)[order] for parts in zip(*(s.tensors for s in shards), strict=True))
            expected_out, *expected = dense(one)
            assert_all_close((out[real], *grads), [expected_out.of(real), *expected])
            assert not any(grad[~real].any() for grad in grads), "padding was seen"
            compared += 1
    return compared


def test_every_exchange_equals_a_dense_softmax() -> None:
    ranks = run_ranks(NUM_LANES, attend, CP_COMM_TYPES, CPU.name, "", timeout_s=60)
    assert [compare(exchange, ranks) for exchange in CP_COMM_TYPES] == [7] * 4
    empty = ranks[2]["p2p"][1]
    assert all(torch.isfinite(x).all() for x in empty.tensors)


def test_portable_blocks_compute_it_too() -> None:
    """What a CUDA device computes in float32."""
    ranks = run_ranks(NUM_LANES, attend, ("a2a+p2p",), "portable", "", timeout_s=60)
    assert compare("a2a+p2p", ranks) == 7


def test_seen_padding_is_noticed() -> None:
    ranks = run_ranks(NUM_LANES, attend, ("p2p",), CPU.name, "padding", timeout_s=60)
    with pytest.raises(AssertionError, match="error"):
        compare("p2p", ranks)


def test_a_call_that_asks_for_another_mask_than_was_planned_is_refused() -> None:
    for mask, asked in ((FULL, True), (CAUSAL, False)):
        params = packs.DynamicPackedSeqParams(positions=torch.arange(3), mask=mask)
        with pytest.raises(UnsupportedFeatureError) as caught:
            scaled_dot_product_attention(*torch.zeros(3, 1, 4, 3, 8), is_causal=asked, packed_seq_params=params)
        assert f"is_causal={asked}" in str(caught.value)
        assert f"only {mask} attention" in str(caught.value)
        assert f"plan for a ModelShape with causal_attention={asked}" in str(caught.value)


def test_labels_of_full_attention_are_needed_and_not_shifted() -> None:
    problem = problem_for(1)
    collate = PlannedCollator(replace(problem, model=replace(problem.model, causal_attention=False)), 0)
    with pytest.raises(DataError, match=r"sample 1 has input_ids and 0 labels.*so give labels"):
        collate([{"input_ids": [1], "labels": [2]}, {"input_ids": [1, 2]}])
    packed = collate([{"input_ids": [4, 5, 6], "labels": [-100, 8, 9]}]).packed
    assert packed.columns is not None
    assert packed.loss_mask is not None
    assert (packed.columns[:2].tolist(), packed.loss_mask.tolist()) == ([[4, 5, 6], [0, 8, 9]], [0.0, 1.0, 1.0])


def test_a_lane_holds_what_is_no_padding_first() -> None:
    counts = set()
    for cp_size in (1, 2, 4, 8):
        for padded in (2 * cp_size, 6 * cp_size):
            for seqlen in range(1, padded + 1):
                for rank in range(cp_size):
                    held = shard_positions(padded, cp_size, rank) < seqlen
                    count = count_held(seqlen, padded, cp_size, rank)
                    assert held[:count].all()
                    assert not held[count:].any() or cp_size == 1
                    assert count == held.sum()
                    counts.add((count == 0, count == len(held)))
    assert counts >= {(True, False), (False, True), (False, False)}
