"""Which sequences each token of a lane belongs to: for what is counted or lost by sequence, not by pack.

A prompt with several responses is as many sequences, each with the prompt; a tree of turns is one sequence per branch.
So tokens are numbered by segments, whose tokens belong to the same sequences; a plain sample is one segment.
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
    """The segments of a bucket, and which sequences have them.

    The lanes of a bucket number its segments alike; where attention is placed each lane numbers those that it knows.

    Attributes:
        segments: of each local token, from 0, int64 [T]; `num_segments` stands for padding.
        copies: of each local token the number of sequences that have it, 0 for padding, int64 [T].
        shares: pairs of a segment and a sequence that has it, int64 [2, shares].
        num_segments, num_sequences: of the bucket.
    """

    segments: torch.Tensor
    copies: torch.Tensor
    shares: torch.Tensor
    num_segments: int
    num_sequences: int


def token_owners(params: DynamicPackedSeqParams) -> TokenOwners:
    """Return the owners of the local tokens, computed by the first layer that asks."""

    def make() -> TokenOwners:
        if params.placed is not None:
            shards = params.placed.shards()  # of its samples, and padding
            segments = [*map(segments_of, params.placed.samples), Segments((), [])]
        else:
            cp_size, cp_rank = params.cp_group.size(), params.cp_group.rank()
            positions = packed_shard_positions(params.padded_seqlens, cp_size, cp_rank)
            shards = np.split(positions, np.cumsum(params.padded_seqlens)[:-1] // cp_size)
            if params.masked_samples is not None:
                segments = list(map(segments_of, params.masked_samples))
            else:
                segments = [Segments((0 if params.is_empty_place else seqlen,), [[0]]) for seqlen in params.seqlens]
        return _owners(shards, segments, params.positions.device)

    return params.cache.once("owners", make)


class Segments(NamedTuple):
    """The segments of a sample: the length of each, and which of them each of its sequences has."""

    lengths: tuple[int, ...]
    sequences: list[list[int]]


def segments_of(sample: Sample) -> Segments:
    """Return the segments of a sample: of a prompt with responses, of a tree of turns, or all of it as one."""
    mask = sample.mask
    return Segments(mask.shape()[0], mask.paths()) if isinstance(mask, Branches) else Segments((sample.seqlen,), [[0]])


def _owners(shards: Sequence[NDArray[np.int64]], segments: Sequence[Segments], device: torch.device) -> TokenOwners:
    """Return the owners of tokens; `shards` are each sample's tokens here, padding behind its segments."""
    num_segments, num_sequences = sum(len(one.lengths) for one in segments), 0
    places, shares = [], []
    first = 0
    for shard, (lengths, sequences) in zip(shards, segments, strict=True):
        place = np.searchsorted(np.cumsum(lengths), shard, side="right")
        places.append(np.where(place < len(lengths), first + place, num_segments))
        for sequence in sequences:
            shares += [(first + segment, num_sequences) for segment in sequence]
            num_sequences += 1
        first += len(lengths)
    of_tokens = np.concatenate(places)
    copies = np.bincount([segment for segment, _ in shares], minlength=num_segments + 1)[of_tokens]
    on_tokens, on_segments = (
        torch.from_numpy(values).to(device, non_blocking=True)
        for values in (np.stack((of_tokens, copies)), np.array(shares, np.int64).T)
    )
    return TokenOwners(*on_tokens, on_segments, num_segments, num_sequences)
