"""Zigzag shards, each token on one rank, and one table of angles for all micro-batches, also longer ones."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from dynamic_cp.plans.padding import padded_seqlens
from dynamic_cp.types import Sample
from megatron.dynamic_cp.model.self_attention import _TABLE_STEP_TOKENS, OneRotaryTable, rotary_cos_sin, rotate
from megatron.dynamic_cp.packed_seq_params import (
    DynamicPackedSeqParams,
    packed_shard_positions,
    shard_positions,
    take_shard,
)
from tests.distributed import reference
from tests.distributed.harness import params_of, run_ranks
from tests.distributed.parity import Layout, build_chunks, initialize_model_parallel

CP_SIZES = (1, 2, 4, 8, 16, 32)


def literal_owner(position: int, padded_seqlen: int, cp_size: int) -> int:
    """Return the rank of a token: chunks are dealt to ranks 0, 1, ... and, from the middle on, back again."""
    chunk = position * 2 * cp_size // padded_seqlen
    return chunk if chunk < cp_size else 2 * cp_size - 1 - chunk


@pytest.mark.parametrize("cp_size", CP_SIZES[1:])
@pytest.mark.parametrize("chunk", [1, 2, 3, 17])
def test_shards_are_the_literal_ones(cp_size: int, chunk: int) -> None:
    seqlen = 2 * cp_size * chunk
    for rank in range(cp_size):
        expected = [p for p in range(seqlen) if literal_owner(p, seqlen, cp_size) == rank]
        assert len(expected) == 2 * chunk
        assert shard_positions(seqlen, cp_size, rank).tolist() == expected


@pytest.mark.parametrize("rank_token_multiple", [1, 2, 4])
@pytest.mark.parametrize("cp_size", CP_SIZES[:4])
def test_pack_partitions_every_sequence(cp_size: int, rank_token_multiple: int) -> None:
    seqlens = padded_seqlens((5, 1, 64, 33), cp_size, rank_token_multiple)
    held: list[list[int]] = [[] for _ in seqlens]
    for rank in range(cp_size):
        positions = packed_shard_positions(seqlens, cp_size, rank)
        assert positions.dtype == np.int64
        assert len(positions) * cp_size == sum(seqlens)
        assert len(positions) % rank_token_multiple == 0
        starts = np.cumsum([0, *seqlens]) // cp_size
        for index, sequence in enumerate(held):
            sequence += positions[starts[index] : starts[index + 1]].tolist()
    assert [sorted(sequence) for sequence in held] == [list(range(seqlen)) for seqlen in seqlens]


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_take_shard_leaves_padding_zero(dtype: type) -> None:
    values = np.array([11, 12, 13, 14, 15], dtype=dtype)
    shard = take_shard(values, shard_positions(8, 2, 0))
    assert shard.dtype == dtype
    assert shard.tolist() == [11, 12, 0, 0]
    assert take_shard(values, shard_positions(8, 2, 1)).tolist() == [13, 14, 15, 0]


def test_take_shard_may_hold_padding_only() -> None:
    for values in (np.array([7], dtype=np.int64), np.array([], dtype=np.int64)):
        assert take_shard(values, shard_positions(4, 2, 1)).tolist() == [0, 0]


# Padded sequences of one micro-batch after another, on groups of any size; the table is made longer twice.
PACKS = [(64, 8), (4096, 16), (4104,), (24, 9000, 4200), (40,), (16384,)]
HEAD_DIM = 16


def params_on(seqlens: tuple[int, ...], cp_size: int, cp_rank: int) -> DynamicPackedSeqParams:
    group = SimpleNamespace(size=lambda: cp_size, rank=lambda: cp_rank)
    positions = torch.from_numpy(packed_shard_positions(seqlens, cp_size, cp_rank))
    return params_of(seqlens, positions, group, cp_comm_type="p2p")


def _rotate_on_all_lanes(rotary_percent: float, interleaved: bool) -> list[int]:
    """Compare every pack; return the number of positions that the table had after each."""

    def embedding() -> RotaryEmbedding:
        return RotaryEmbedding(HEAD_DIM, rotary_percent, rotary_interleaved=interleaved, use_cpu_initialization=True)

    table, theirs = OneRotaryTable(embedding()), embedding()
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=interleaved, multi_latent_attention=False)
    num_positions = []
    for seqlens in PACKS:
        # One more than the longest: as many as there are tokens would mean positions within the pack.
        angles = theirs.get_emb(max(seqlens) + 1)
        for cp_size, cp_rank in ((1, 0), (4, 0), (4, 2)):
            params = params_on(seqlens, cp_size, cp_rank)
            x_THD = torch.randn(len(params.positions), 2, HEAD_DIM)
            cos, sin = rotary_cos_sin(table(params.max_seqlen_q), params, torch.float32)
            rotated = rotate(x_THD[:, None], cos, sin, interleaved=interleaved)[:, 0]
            expected = apply_rotary_pos_emb(
                x_THD, angles, config, cu_seqlens=params.cu_seqlens_q, cp_group=params.cp_group
            )
            torch.testing.assert_close(rotated, expected, rtol=0, atol=1e-6)
        num_positions.append(len(table.table))
    return num_positions


@pytest.mark.parametrize(("rotary_percent", "interleaved"), [(1.0, False), (0.5, True)])
def test_sequences_longer_than_the_table_rotate_as_megatron_core_rotates_them(
    rotary_percent: float, interleaved: bool
) -> None:
    (num_positions,) = run_ranks(1, _rotate_on_all_lanes, rotary_percent, interleaved)
    assert [number / _TABLE_STEP_TOKENS for number in num_positions] == [1, 1, 2, 3, 3, 4], "it grows, never shrinks"


def _losses(first_seqlen: int, seqlen: int) -> torch.Tensor:
    """Return the losses of a sample after one of `first_seqlen` tokens."""
    initialize_model_parallel()
    layout = Layout(1, config={"num_layers": 1})
    _, (model,) = build_chunks(layout, reference.LLAMA)
    with torch.no_grad():
        for length in (first_seqlen, seqlen):
            tokens = torch.arange(length)[None] % reference.VOCAB_SIZE
            params = params_on((length,), 1, 0)
            losses = model(tokens, params.positions[None], None, labels=tokens, packed_seq_params=params)
    return losses[0]


def test_a_model_that_saw_short_sequences_first_sees_long_ones_as_another() -> None:
    """The reference that the parity suite compares with ends at 1024 positions."""
    seqlen = _TABLE_STEP_TOKENS + 200
    (after_short,), (alone,) = (run_ranks(1, _losses, first, seqlen) for first in (64, seqlen))
    assert len(after_short) == seqlen
    assert torch.equal(after_short, alone)


def test_a_lane_may_hold_the_end_of_a_sample_that_is_longer_than_all_it_holds() -> None:
    """Attention is placed: 4 tokens here, and the angles of the last of 9000."""
    positions, sample = torch.arange(8996, 9000), Sample(sample_id=0, seqlen=9000)
    group = SimpleNamespace(size=lambda: 4, rank=lambda: 3)
    placed = SimpleNamespace(samples=(sample,))
    params = params_of((4,), positions, group, cp_comm_type="blocks", placed=placed)

    def rotated() -> list[float]:
        table = OneRotaryTable(RotaryEmbedding(HEAD_DIM, 1.0, use_cpu_initialization=True))
        return rotary_cos_sin(table(params.max_seqlen_q), params, torch.float32)[0][:, 0, 0, 0].tolist()

    assert run_ranks(1, rotated)[0] == pytest.approx(positions.double().cos().tolist(), abs=1e-4)
