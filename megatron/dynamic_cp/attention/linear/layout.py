"""Where the tokens of a pack are for linear attention: chunks of samples, whole samples, and what comes before a chunk.

A lane of cp holds of each sample the chunks r and 2 * cp - 1 - r (`layout.sharding`), so two runs; alone it holds whole
samples. Padding lies behind a sample and cannot reach its tokens: it is computed like them, and needs no case.

Everything is made on the host, once for each micro-batch, and kept in its `LayerCache`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.dynamic_cp.attention.linear.runs import Runs
from megatron.dynamic_cp.attention.mechanisms.row_order import gathered_order
from megatron.dynamic_cp.attention.packs import to_device
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams


def sample_runs(params: DynamicPackedSeqParams, device: torch.device) -> Runs:
    """Return the runs of whole samples, as a lane sees them that has the tokens of its whole group."""
    return params.cache.once("runs of samples", lambda: Runs.build(params.padded_seqlens, device))


def chunk_runs(params: DynamicPackedSeqParams, device: torch.device) -> Runs:
    """Return the runs of this lane: two chunks of each sample."""

    def make() -> Runs:
        chunks = np.array(params.padded_seqlens) // (2 * params.cp_group.size())
        return Runs.build(np.repeat(chunks, 2).tolist(), device)

    return params.cache.once("runs of chunks", make)


class GatheredRows(NamedTuple):
    """Rows of all lanes, lane after lane, and the same in the order of samples, int64 [cp * T] each.

    Attributes:
        in_order: for each token in the order of samples, its row.
        by_lane: for each row, its token.
    """

    in_order: Tensor
    by_lane: Tensor


def gathered_rows(params: DynamicPackedSeqParams, device: torch.device) -> GatheredRows:
    """Return where the tokens of the group are once lanes have exchanged them."""

    def make() -> GatheredRows:
        order = gathered_order(params.padded_seqlens, params.cp_group.size())
        return GatheredRows(to_device(order, device), to_device(np.argsort(order), device))

    return params.cache.once("rows of all lanes", make)


class Halo(NamedTuple):
    """The last tokens before each chunk of this lane, which its convolution sees, and who has them.

    Attributes:
        sent: [lane] which of this lane's rows it needs, int64.
        num_received: [lane] rows that come from it.
        extended: of this lane's rows and those received behind them: each chunk behind what comes before it, int64.
        runs: the chunks so extended; one that begins a sample has nothing before it.
        own: which of the extended rows are this lane's, in order, int64 [T].
    """

    sent: tuple[Tensor, ...]
    num_received: tuple[int, ...]
    extended: Tensor
    runs: Runs
    own: Tensor


def halo(params: DynamicPackedSeqParams, num_before: int, device: torch.device) -> Halo:
    """Return who has the `num_before` tokens before each chunk; where chunks are shorter, those are several lanes."""
    cp_size, rank = params.cp_group.size(), params.cp_group.rank()
    return params.cache.once(
        f"{num_before} tokens before chunks",
        lambda: _halo(np.array(params.padded_seqlens) // (2 * cp_size), cp_size, rank, num_before, device),
    )


def _halo(chunks: NDArray[np.int64], cp_size: int, rank: int, num_before: int, device: torch.device) -> Halo:
    """Return the halo of lane `rank`; `chunks`: tokens of a chunk of each sample."""
    first_rows = np.cumsum(2 * chunks) - 2 * chunks
    # Of all samples, chunks and steps back, in this order: who needs which row of whom. Both sides agree on the order.
    sample, chunk, back = (
        part.reshape(-1) for part in np.indices((len(chunks), 2 * cp_size, num_before), dtype=np.int64)
    )
    size = chunks[sample]
    position = chunk * size - num_before + back
    there = position >= 0
    sample, chunk, size, position = sample[there], chunk[there], size[there], position[there]
    source = position // size
    owner, user = _lane_of(source, cp_size), _lane_of(chunk, cp_size)
    row = first_rows[sample] + (source >= cp_size) * size + position % size
    num_rows = int(2 * chunks.sum())

    mine = user == rank
    by_owner = np.argsort(owner[mine], kind="stable")  # as they come: lane after lane
    place = np.empty_like(by_owner)
    place[by_owner] = num_rows + np.arange(len(by_owner))
    slot = 2 * sample[mine] + (chunk[mine] >= cp_size)

    lengths = np.repeat(chunks, 2)
    before = np.bincount(slot, minlength=len(lengths))
    starts = np.cumsum(lengths) - lengths
    parts = [
        part
        for number in np.arange(len(lengths))
        for part in (place[slot == number], starts[number] + np.arange(lengths[number]))
    ]
    own = np.arange(num_rows) + np.repeat(np.cumsum(before), lengths)
    return Halo(
        sent=tuple(to_device(row[(owner == rank) & (user == lane)], device) for lane in range(cp_size)),
        num_received=tuple(np.bincount(owner[mine], minlength=cp_size).tolist()),
        extended=to_device(np.concatenate(parts), device),
        runs=Runs.build((lengths + before).tolist(), device),
        own=to_device(own, device),
    )


def _lane_of(chunk: NDArray[np.int64], cp_size: int) -> NDArray[np.int64]:
    return np.where(chunk < cp_size, chunk, 2 * cp_size - 1 - chunk)
