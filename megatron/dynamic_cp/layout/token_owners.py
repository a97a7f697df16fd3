"""Whose each token of a lane is: for what is counted or lost by sequence, not by pack.

A prompt with several responses is as many sequences, each of which has the prompt; a tree is those of its branches.
So samples are told apart by parts that belong to the same sequences: segments, or all of a sample that is one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dynamic_cp.types import Branches, Sample
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.layout.sharding import packed_shard_positions


class TokenOwners(NamedTuple):
    """The parts of a bucket, and whose they are.

    The lanes of a bucket number its parts alike; where attention is placed each numbers those that it knows.

    Attributes:
        parts: of each local token, from 0, int64 [T]; `num_parts` stands for padding.
        copies: of each local token the number of sequences that have it, 0 for padding, int64 [T].
        shares: a part, and one of the sequences that have it, int64 [2, shares].
        num_parts, num_sequences: of the bucket.
    """

    parts: torch.Tensor
    copies: torch.Tensor
    shares: torch.Tensor
    num_parts: int
    num_sequences: int


def token_owners(params: DynamicPackedSeqParams) -> TokenOwners:
    """Return whose the local tokens are. Computed by the first layer that asks."""

    def make() -> TokenOwners:
        if params.placed is not None:
            shards = params.placed.shards()  # of its samples, and padding
            parts = [*map(parts_of, params.placed.samples), Parts((), [])]
        else:
            cp_size, cp_rank = params.cp_group.size(), params.cp_group.rank()
            positions = packed_shard_positions(params.padded_seqlens, cp_size, cp_rank)
            shards = np.split(positions, np.cumsum(params.padded_seqlens)[:-1] // cp_size)
            if params.masked_samples is not None:
                parts = list(map(parts_of, params.masked_samples))
            else:
                parts = [Parts((0 if params.is_empty_place else seqlen,), [[0]]) for seqlen in params.seqlens]
        return _owners(shards, parts, params.positions.device)

    return params.cache.once("owners", make)


class Parts(NamedTuple):
    """The tokens of each part of a sample, and which of the parts each of its sequences has."""

    lengths: tuple[int, ...]
    sequences: list[list[int]]


def parts_of(sample: Sample) -> Parts:
    """Return the parts of a sample: those of a prompt with responses or of a tree of turns, or all of it as one."""
    mask = sample.mask
    return Parts(mask.shape()[0], mask.paths()) if isinstance(mask, Branches) else Parts((sample.seqlen,), [[0]])


def _owners(shards: Sequence[NDArray[np.int64]], parts: Sequence[Parts], device: torch.device) -> TokenOwners:
    """Return the owners of tokens.

    Args:
        shards: for each sample which of its tokens are here; what lies behind its parts is padding.
        parts: of each sample.
    """
    num_parts, num_sequences = sum(len(one.lengths) for one in parts), 0
    places, shares = [], []
    first = 0
    for shard, (lengths, sequences) in zip(shards, parts, strict=True):
        place = np.searchsorted(np.cumsum(lengths), shard, side="right")
        places.append(np.where(place < len(lengths), first + place, num_parts))
        for sequence in sequences:
            shares += [(first + part, num_sequences) for part in sequence]
            num_sequences += 1
        first += len(lengths)
    of_tokens = np.concatenate(places)
    copies = np.bincount([part for part, _ in shares], minlength=num_parts + 1)[of_tokens]
    on_tokens, on_parts = (
        torch.from_numpy(values).to(device, non_blocking=True)
        for values in (np.stack((of_tokens, copies)), np.array(shares, np.int64).T)
    )
    return TokenOwners(*on_tokens, on_parts, num_parts, num_sequences)
