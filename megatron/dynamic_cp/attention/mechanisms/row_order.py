"""Where the tokens of a pack are in the gathered shards of several lanes.

A zigzag over cp lanes is a zigzag over outer lanes of zigzags over inner lanes: lane k * inner + i holds chunks
k * inner + i and 2 * cp - 1 - k * inner - i, so the lanes of inner group k together hold chunks k and
2 * outer - 1 - k of 2 * outer longer chunks, and that shard, taken as one sequence, lies zigzag on the inner lanes. So
one function orders the rows of a whole group (outer = 1) and of an inner group. At cp 4 and inner 2, in chunks:

    lanes 0..3                    0 7 | 1 6 | 2 5 | 3 4
    inner groups, in their order  0 1 6 7   | 2 3 4 5      = chunks 0 3 | 1 2 of a zigzag over 2 outer lanes
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron.dynamic_cp.attention.packs import to_device
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.layout.sharding import packed_shard_positions


def gathered_order(padded_seqlens: tuple[int, ...], num_lanes: int) -> np.ndarray:
    """Return, for each token of the pack in sequence order, its row in the gathered shards, int64 [num_lanes * T].

    Args:
        padded_seqlens: tokens of each sequence on all `num_lanes` lanes together.
    """
    starts = np.repeat(np.cumsum((0, *padded_seqlens[:-1])), np.asarray(padded_seqlens) // num_lanes)
    rows_to_tokens = np.concatenate(
        [starts + packed_shard_positions(padded_seqlens, num_lanes, rank) for rank in range(num_lanes)]
    )
    order = np.empty_like(rows_to_tokens)
    order[rows_to_tokens] = np.arange(len(order))
    return order


def row_order(params: DynamicPackedSeqParams, device: torch.device) -> Tensor:
    """Return `gathered_order` of the lanes that gather rows, on the device; computed by the first layer that asks.

    These are the inner group where heads are exchanged, else the whole CP group.
    """

    def make() -> Tensor:
        group = params.heads_group or params.cp_group
        outer_size = params.cp_group.size() // group.size()
        seqlens = tuple(seqlen // outer_size for seqlen in params.padded_seqlens)
        return to_device(gathered_order(seqlens, group.size()), device)

    return params.cache.once("order of rows", make)


def from_sequence_order(x_SHD: Tensor, order: Tensor) -> Tensor:
    """Return the rows where the lanes hold them: undoes `index_select(0, order)`."""
    return torch.empty_like(x_SHD, memory_format=torch.contiguous_format).index_copy_(0, order, x_SHD)
