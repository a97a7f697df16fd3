"""Which sample of its bucket each token of a lane belongs to: for what is counted or lost by sequence, not by pack."""

from __future__ import annotations

import numpy as np
import torch

from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.layout.sharding import packed_shard_positions


def num_owners(params: DynamicPackedSeqParams) -> int:
    """Return the number of samples that `token_owners` tells apart."""
    return len(params.padded_seqlens if params.placed is None else params.placed.samples)


def token_owners(params: DynamicPackedSeqParams) -> torch.Tensor:
    """Return the sample of each local token, int64 [T]: 0 is the first of the bucket, their number stands for padding.

    The lanes of a bucket number its samples alike; where attention is placed each numbers those that it knows.
    Computed by the first layer that asks.
    """
    if params.owners_cache is None:
        if params.placed is not None:
            shards = params.placed.shards()  # of its samples, and padding
            owners = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
        else:
            cp_size, number = params.cp_group.size(), len(params.padded_seqlens)
            held = np.array(params.padded_seqlens) // cp_size
            owners = np.repeat(np.arange(number), held)
            positions = packed_shard_positions(params.padded_seqlens, cp_size, params.cp_group.rank())
            seqlens = np.zeros(number, np.int64) if params.is_empty_place else np.array(params.seqlens)
            owners[positions >= np.repeat(seqlens, held)] = number
        params.owners_cache = torch.from_numpy(owners).to(params.positions.device, non_blocking=True)
    return params.owners_cache
