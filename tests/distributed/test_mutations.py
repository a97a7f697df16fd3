"""The parity suite notices the mistakes that are easy to make: each fault planted here must make it fail.

Faults are planted inside forked ranks, so nothing has to be put back.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from megatron.dynamic_cp.attention import merge
from megatron.dynamic_cp.attention.mechanisms import all_gather, heads, row_order
from megatron.dynamic_cp.data import micro_batches
from megatron.dynamic_cp.model import norm, self_attention
from megatron.dynamic_cp.step import loss
from tests.distributed.harness import run_ranks
from tests.distributed.parity import BATCHES, Layout, assert_equal_to_reference, mixed_plan, run_step


def skip_ring_steps() -> None:
    """The keys of earlier lanes are not seen."""
    original = merge.RowSums.attend

    def all_but_earlier(self, pack, kv_2SHD):
        if pack.columns is None:
            original(self, pack, kv_2SHD)

    merge.RowSums.attend = all_but_earlier


def rotate_with_the_static_group() -> None:
    """As megatron-core 0.16.1 does: its static group has one rank, so a shard's positions count from 0."""
    original = self_attention.rotary_cos_sin

    def static_positions(frequencies, params, dtype, concentration):
        cp_size = params.cp_group.size()
        positions = torch.cat([torch.arange(seqlen // cp_size) for seqlen in params.padded_seqlens])
        return original(frequencies, replace(params, positions=positions), dtype, concentration)

    self_attention.rotary_cos_sin = static_positions


def shift_labels_after_sharding() -> None:
    original = micro_batches.read_shard

    def shifted(*of_bucket):
        columns = original(*of_bucket)
        return columns | {"labels": np.roll(columns["tokens"], -1)}

    micro_batches.read_shard = shifted


def drop_the_token_count_of_lane_0() -> None:
    original = loss.sum_of_losses

    def without_count(*args, **future):
        total, num_tokens, logs = original(*args, **future)
        first_lane = parallel_state.get_data_parallel_rank() == 0
        return total, num_tokens * 0 if first_lane else num_tokens, logs

    loss.sum_of_losses = without_count


def leave_padding_unmasked() -> None:
    original = micro_batches.take_shard

    def unmasked(values, positions):
        shard = original(values, positions)
        return np.ones_like(shard) if values.dtype == np.float32 else shard

    micro_batches.take_shard = unmasked


def count_an_empty_place() -> None:
    original = micro_batches.read_shard

    def unmasked(bucket, *shards_and_places):
        columns = original(bucket, *shards_and_places)
        return columns if bucket.samples else columns | {"loss_mask": np.ones_like(columns["loss_mask"])}

    micro_batches.read_shard = unmasked


def forget_a_gradient_of_the_ring() -> None:
    """Keys and values of other lanes get no gradient from here."""
    original = merge.RowGradients.attend

    def only_diagonal(self, pack, kv_2SHD, total_2SHD=None):
        grad_2SHD = original(self, pack, kv_2SHD, total_2SHD)
        if not pack.causal:
            grad_2SHD[0] = 0
        return grad_2SHD

    merge.RowGradients.attend = only_diagonal


def forget_the_past_of_a_chunk() -> None:
    """All-gather: every chunk sees itself only."""
    original = all_gather.gathered_packs
    all_gather.gathered_packs = lambda *args: [pack for pack in original(*args) if pack.causal]


def leave_gathered_shards_in_the_order_of_ranks() -> None:
    row_order.gathered_order = lambda padded_seqlens, num_lanes: np.arange(sum(padded_seqlens))


def swap_heads_of_lanes() -> None:
    """All-to-all: the lanes' heads come back in another order than they went."""
    original = heads.HeadExchange.gather_heads
    heads.HeadExchange.gather_heads = lambda self, x_RHD: original(self, x_RHD).flip(1)


def take_the_wrong_kv_heads() -> None:
    """Copies of KV heads one round after the other, not each next to the last."""
    original = heads.HeadExchange.sent_kv

    def in_rounds(self, x_THD):
        return original(self, x_THD).unflatten(1, (-1, self._copies)).transpose(1, 2).flatten(1, 2)

    heads.HeadExchange.sent_kv = in_rounds


def forget_a_replica_of_a_kv_head() -> None:
    """The owner of a row keeps one of the gradients that lanes return for a KV head, instead of their sum."""
    heads.HeadExchange._returned_kv = lambda self, grad_TPHD: grad_TPHD.flatten(1, 2)[:, :: self._copies]


def forget_that_mirrored_chunks_come_in_reverse() -> None:
    """a2a+p2p: the second chunks of the inner lanes are merged in the order of the lanes, as the first ones are."""

    def straight(padded_seqlens, num_lanes):
        rows, start, num_rows = [], 0, sum(padded_seqlens) // num_lanes
        for seqlen in padded_seqlens:
            chunk = seqlen // (2 * num_lanes)
            for first in (start, start + chunk):
                rows += [lane * num_rows + np.arange(first, first + chunk) for lane in range(num_lanes)]
            start += 2 * chunk
        return np.concatenate(rows)

    row_order.gathered_order = straight


def leave_exchanged_rows_in_the_order_of_lanes() -> None:
    leave_gathered_shards_in_the_order_of_ranks()


def untag_norms() -> None:
    """Sequence parallelism: gradients of norms are no longer summed over the tensor-parallel ranks."""
    original = norm.TorchNorm.__new__

    def untagged(cls, config, hidden_size, **kwargs):
        built = original(cls, config, hidden_size, **kwargs)
        for parameter in built.parameters():
            parameter.sequence_parallel = False
        return built

    norm.TorchNorm.__new__ = untagged


OTHER_LAYOUTS = {
    forget_the_past_of_a_chunk: Layout(4, exchange="all_gather"),
    leave_gathered_shards_in_the_order_of_ranks: Layout(4, exchange="all_gather"),
    untag_norms: Layout(2, tp=2, sp=True),
    swap_heads_of_lanes: Layout(4, exchange="a2a"),
    take_the_wrong_kv_heads: Layout(4, exchange="a2a"),
    forget_a_replica_of_a_kv_head: Layout(4, exchange="a2a"),
    leave_exchanged_rows_in_the_order_of_lanes: Layout(4, exchange="a2a"),
    forget_that_mirrored_chunks_come_in_reverse: Layout(4, exchange="a2a+p2p"),
}
SYMPTOMS = {
    **dict.fromkeys(OTHER_LAYOUTS, "gradients differ"),
    skip_ring_steps: "gradients differ",
    rotate_with_the_static_group: "gradients differ",
    shift_labels_after_sharding: "gradients differ",
    drop_the_token_count_of_lane_0: "gradients differ",
    leave_padding_unmasked: "gradients differ",
    count_an_empty_place: "gradients differ",
    forget_a_gradient_of_the_ring: "gradients differ",
}


@pytest.mark.by_day("count_an_empty_place", "forget_a_gradient_of_the_ring")
@pytest.mark.parametrize("sabotage", SYMPTOMS, ids=lambda fault: fault.__name__)
def test_fault_is_noticed(sabotage, reference_of) -> None:
    layout, samples = OTHER_LAYOUTS.get(sabotage, Layout(4)), BATCHES["long_tail"]
    expected = reference_of(layout, "long_tail")
    # Every rank finishes its step: the comparison finds the fault, not a crash.
    comparisons = run_ranks(4, run_step, layout, samples, mixed_plan(samples, layout), expected, sabotage)
    with pytest.raises(AssertionError, match=SYMPTOMS[sabotage]):
        assert_equal_to_reference(comparisons, layout, expected)
