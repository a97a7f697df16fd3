"""Models with full attention: every exchange equals a dense softmax over each sequence, and nobody sees padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from unittest import mock

import pytest
import torch

from dynamic_cp.errors import DataError, UnsupportedFeatureError
from dynamic_cp.types import CAUSAL, CP_COMM_TYPES, FULL, Bucket, CpCommType, Sample, Topology
from examples.torch_device_mesh import problem_for
from megatron.dynamic_cp.attention import packs
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.layout.sharding import count_held, shard_positions
from megatron.integrations.outside import PlannedCollator, scaled_dot_product_attention
from tests.distributed.bucket_attention import Shard, assert_equal_to_dense, attend
from tests.distributed.harness import initialize_model_parallel, run_ranks

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


Found = dict[CpCommType, list[Shard]]


def attend_on_rank() -> tuple[Found, Found, Found]:
    """Return this lane's part of every micro-batch, by all exchanges; by portable blocks; and where padding is seen."""
    initialize_model_parallel()
    topology = Topology(num_lanes=NUM_LANES)
    groups = DynamicCPGroups.build(topology, timeout_s=30, exchanges=CP_COMM_TYPES, inner_sizes=(2,))
    found: Found = {exchange: attend(steps(exchange), groups, FULL) for exchange in CP_COMM_TYPES}
    portable: Found = {"a2a+p2p": attend(steps("a2a+p2p"), groups, FULL, kernel="portable")}
    with mock.patch.object(packs, "count_held", lambda _seqlen, padded, size, _rank: padded // size):
        with_padding: Found = {"p2p": attend(steps("p2p"), groups, FULL)}
    return found, portable, with_padding


@lru_cache
def on_ranks() -> list[tuple[Found, Found, Found]]:
    return run_ranks(NUM_LANES, attend_on_rank, timeout_s=60)


def assert_all_equal_to_dense(exchange: CpCommType, ranks: Sequence[Found]) -> None:
    for index, buckets in enumerate(steps(exchange)):
        for one in buckets:
            if one.samples:
                assert_equal_to_dense(one, [ranks[lane][exchange][index] for lane in one.lanes], FULL)


@pytest.mark.parametrize("exchange", CP_COMM_TYPES)
def test_every_exchange_equals_a_dense_softmax(exchange: CpCommType) -> None:
    ranks = [found for found, _, _ in on_ranks()]
    assert_all_equal_to_dense(exchange, ranks)
    empty = ranks[2][exchange][1]
    assert all(torch.isfinite(x).all() for x in empty.tensors)


def test_portable_blocks_compute_it_too() -> None:
    """What a CUDA device computes in float32."""
    assert_all_equal_to_dense("a2a+p2p", [portable for _, portable, _ in on_ranks()])


def test_seen_padding_is_noticed() -> None:
    with pytest.raises(AssertionError, match="error"):
        assert_all_equal_to_dense("p2p", [with_padding for _, _, with_padding in on_ranks()])


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
