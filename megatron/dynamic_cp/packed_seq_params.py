"""Which tokens of a packed bucket each CP rank holds, and what travels with a micro-batch through the model.

Each padded sequence is cut into 2 * cp chunks, so that causal work is equal on all ranks: rank r holds chunks r and
2 * cp - 1 - r (zigzag), sequence after sequence. At cp = 2 a sequence of 8 tokens lies as 0 1 | 6 7 on rank 0 and
2 3 | 4 5 on rank 1.

A prompt with several responses is as many sequences, each with the prompt; a tree of turns is one sequence per branch.
For what is counted or lost by sequence, tokens are numbered by segments, whose tokens belong to the same sequences; a
plain sample is one segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dynamic_cp.types import CAUSAL, STATE_EXCHANGES, Branches, CpCommType, Mask, Sample, StateExchange

NUM_COLUMNS = 3
"""Tokens, labels and position ids."""
Kept = TypeVar("Kept")
Levels = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
"""(Lanes that exchange heads, lanes that pass keys and values round); None: no lanes do."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FutureColumns:
    """Columns of every depth of multi-token prediction, for T local tokens, and the sums of their losses.

    The module of depth k (1, 2, ...) gets the token k places later in the same sample, and predicts the one after it.
    That place may be on another lane, so columns are shifted before they are sharded (`data.micro_batches`). After the
    end of a sample all of them are 0, and so is the loss.

    Attributes:
        columns: int64 [depth, NUM_COLUMNS, T].
        loss_mask: float32 [depth, T], 1 where the label counts.
        found: filled by the model's last chunk, depth after depth: [sum of the losses that count, their number].
    """

    columns: Tensor
    loss_mask: Tensor
    found: list[Tensor] = field(default_factory=list)

    def inputs(self, depth: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, position ids), each [1, T], of the module of `depth`, which counts from 1."""
        tokens, _, position_ids = self.columns[depth - 1]
        return tokens[None], position_ids[None]

    def targets(self, depth: int) -> tuple[Tensor, Tensor]:
        """Return (labels, loss mask), each [1, T], of the module of `depth`, which counts from 1."""
        return self.columns[depth - 1, 1][None], self.loss_mask[depth - 1][None]


try:
    from megatron.core.packed_seq_params import PackedSeqParams
except ImportError:  # loops outside Megatron need torch only: `megatron.integrations.outside`

    @dataclass
    class PackedSeqParams:  # type: ignore[no-redef]
        """The fields of megatron-core's class that `DynamicPackedSeqParams` sets."""

        qkv_format: str | None = None
        cu_seqlens_q: torch.Tensor | None = None
        cu_seqlens_kv: torch.Tensor | None = None
        cu_seqlens_q_padded: torch.Tensor | None = None
        cu_seqlens_kv_padded: torch.Tensor | None = None
        max_seqlen_q: int | None = None
        max_seqlen_kv: int | None = None
        local_cp_size: int | None = None
        cp_group: dist.ProcessGroup | None = None


@dataclass
class ExchangeStats:
    """Bytes that this rank had to send to other lanes for attention, forward and backward, since the step began. A
    collective over n lanes counts the share of the n - 1 others; gloo's own reduce-scatter moves twice as much."""

    bytes_sent: int = 0


class LayerCache:
    """What layers derive from a micro-batch, made by the first layer that asks; nothing else of a micro-batch changes.

    Layers with other masks share it; recomputed layers find what the first pass made.

    Attributes:
        placed: this lane's part of placed attention (`attention.placed_packs.PlacedLane`), in a pool that of the tick;
            None: attention is not placed.
        nano_batches: of the layers in a pool (`pool.nano_batches.NanoBatches`); None: layers run in one.
    """

    def __init__(self, placed: Any = None) -> None:
        self.placed = placed
        self.nano_batches: Any = None
        self._common: dict[str, Any] = {}
        self._of_masks: dict[tuple[Mask, str], Any] = {}

    def once(self, name: str, make: Callable[[], Kept]) -> Kept:
        """Return what `make` returned for the first layer of all."""
        if name not in self._common:
            self._common[name] = make()
        kept: Kept = self._common[name]
        return kept

    def once_for(self, mask: Mask, name: str, make: Callable[[], Kept]) -> Kept:
        """Return what `make` returned for the first layer with `mask`."""
        if (mask, name) not in self._of_masks:
            self._of_masks[mask, name] = make()
        kept: Kept = self._of_masks[mask, name]
        return kept

    def move_to(self, placed: Any) -> None:
        """Switch to another lane's part, and drop what was derived from the one before."""
        self.placed = placed
        self._of_masks.clear()


def boundaries(padded_seqlens: Sequence[int]) -> NDArray[np.int32]:
    """Return where the sequences of a pack begin and end, int32 [num_sequences + 1]."""
    return np.concatenate([[0], np.cumsum(padded_seqlens)]).astype(np.int32)


@dataclass
class DynamicPackedSeqParams(PackedSeqParams):
    """megatron-core's `PackedSeqParams` (THD) with what a micro-batch's own CP group needs.

    TransformerEngine sees the fields of the base class only. All four `cu_seqlens*` are the SAME int32 tensor of padded
    boundaries over the whole group [num_sequences + 1], and padding is at the end of each sequence. `max_seqlen_*` is
    the longest padded length; with placed attention at least that of the longest sample. `cp_group` and `local_cp_size`
    are always set, also for one lane. Nothing but `cache` changes after it is built.

    Attributes:
        padded_seqlens: the boundaries on the host, so that no layer has to ask the device for them.
        seqlens: tokens of each sequence, in an empty place with its padding; no other token may see keys of padding.
        is_empty_place: no token is a sample's.
        mask: of the layers that get these parameters; layers with others take `with_mask`.
        masked_samples: the samples of the pack, where one brings a mask; padding behind a sample is a causal sequence
            of its own. None: all have the mask of the layers.
        positions: position of each local token for rotary embedding, int64 [T]: within its sequence, or by its mask.
        cp_comm_type, state_exchange: how keys and values, and layers with linear attention ("heads", "states"), are
            shared.
        heads_group, ring_group: lanes that exchange heads for rows, and that pass keys and values round; None: none do.
        label, stats: the place in the run, for messages; a counter shared by all micro-batches of the step.
        future: what modules of multi-token prediction read; None: there are none on this rank.
        cache: what layers derive from all this.
    """

    padded_seqlens: tuple[int, ...] = ()
    seqlens: tuple[int, ...] = ()
    is_empty_place: bool = False
    mask: Mask = CAUSAL
    masked_samples: tuple[Sample, ...] | None = None
    positions: torch.Tensor | None = None
    cp_comm_type: CpCommType = "p2p"
    state_exchange: StateExchange = STATE_EXCHANGES[0]
    heads_group: dist.ProcessGroup | None = None
    ring_group: dist.ProcessGroup | None = None
    label: str = ""
    stats: ExchangeStats = field(default_factory=ExchangeStats)
    future: FutureColumns | None = None
    cache: LayerCache = field(default_factory=LayerCache)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise FrozenInstanceError(f"{name} of a micro-batch's parameters stays as it was built: use replace()")
        super().__setattr__(name, value)

    @classmethod
    def checked(cls, params: object) -> DynamicPackedSeqParams:
        """Return the parameters that a layer was given; TypeError if they are megatron-core's, or None."""
        if not isinstance(params, DynamicPackedSeqParams):
            raise TypeError(f"DynamicPackedSeqParams needed, got {type(params).__name__}")
        return params

    @property
    def placed(self) -> Any:
        return self.cache.placed

    @property
    def nano_batches(self) -> Any:
        return self.cache.nano_batches

    @property
    def inner_cp_size(self) -> int:
        """Lanes that exchange heads, as in `dynamic_cp.types.Bucket`."""
        return 1 if self.heads_group is None else self.heads_group.size()

    @property
    def ring_size(self) -> int:
        return 1 if self.ring_group is None else self.ring_group.size()

    @property
    def ring_rank(self) -> int:
        return 0 if self.ring_group is None else self.ring_group.rank()

    @property
    def ring_seqlens(self) -> tuple[int, ...]:
        """Tokens of each sequence that a member of the ring attends with."""
        return tuple(seqlen // self.ring_size for seqlen in self.padded_seqlens)

    def with_mask(self, mask: Mask) -> DynamicPackedSeqParams:
        """Return these parameters for layers with `mask`, the same object for all of them."""
        if mask == self.mask:
            return self
        return self.cache.once_for(mask, "parameters", lambda: replace(self, mask=mask))

    def once(self, name: str, make: Callable[[], Kept]) -> Kept:
        """Return what `make` returned for the first layer with this mask."""
        return self.cache.once_for(self.mask, name, make)

    @classmethod
    def build(
        cls,
        padded_seqlens: tuple[int, ...],
        positions: torch.Tensor,
        cp_group: dist.ProcessGroup,
        *,
        label: str,
        stats: ExchangeStats,
        cp_comm_type: CpCommType = "p2p",
        cu_seqlens: torch.Tensor | None = None,
        levels: Levels | None = None,
        seqlens: tuple[int, ...] | None = None,
        mask: Mask = CAUSAL,
        masked_samples: tuple[Sample, ...] | None = None,
        placed: Any = None,
        state_exchange: StateExchange = STATE_EXCHANGES[0],
        is_empty_place: bool = False,
        future: FutureColumns | None = None,
    ) -> DynamicPackedSeqParams:
        """Return the parameters of a bucket with sequences of `padded_seqlens` tokens over `cp_group`.

        Args:
            cu_seqlens: `boundaries(padded_seqlens)` where it is on the device already.
            levels: (heads group, ring group) of the bucket; None: no heads are exchanged, the ring is the whole group.
            seqlens: as the attribute; None: there is no padding. placed: as of `LayerCache`. Others: as the attributes.
        """
        heads_group, ring_group = (None, cp_group) if levels is None else levels
        if cu_seqlens is None:
            cu_seqlens = torch.from_numpy(boundaries(padded_seqlens)).to(positions.device)
        longest = max(padded_seqlens)
        if placed is not None:  # a lane may hold the end of a sample that is longer than all it holds
            longest = max([longest, *(sample.seqlen for sample in placed.samples)])
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            local_cp_size=cp_group.size(),
            cp_group=cp_group,
            padded_seqlens=padded_seqlens,
            seqlens=padded_seqlens if seqlens is None else seqlens,
            is_empty_place=is_empty_place,
            mask=mask,
            masked_samples=masked_samples,
            positions=positions,
            cp_comm_type=cp_comm_type,
            state_exchange=state_exchange,
            heads_group=heads_group,
            ring_group=ring_group,
            label=label,
            stats=stats,
            future=future,
            cache=LayerCache(placed),
        )


def shard_positions(padded_seqlen: int, cp_size: int, cp_rank: int) -> NDArray[np.int64]:
    """Return the positions in its own sequence of each token that `cp_rank` holds, int64 [padded_seqlen / cp_size].
    `padded_seqlen` counts tokens over the whole group, a multiple of 2 * cp_size if cp_size > 1."""
    if cp_size == 1:
        return np.arange(padded_seqlen)
    chunk = padded_seqlen // (2 * cp_size)
    first = np.arange(cp_rank * chunk, (cp_rank + 1) * chunk)
    mirrored = 2 * cp_size - 1 - cp_rank
    second = np.arange(mirrored * chunk, (mirrored + 1) * chunk)
    return np.concatenate([first, second])


def packed_shard_positions(padded_seqlens: Sequence[int], cp_size: int, cp_rank: int) -> NDArray[np.int64]:
    """Return `shard_positions` of every sequence of a pack, one after the other, shape [rank tokens]."""
    return np.concatenate([shard_positions(seqlen, cp_size, cp_rank) for seqlen in padded_seqlens])


def count_held(seqlen: int, padded_seqlen: int, cp_size: int, cp_rank: int) -> int:
    """Return how many of the first `seqlen` tokens, which are not padding, `cp_rank` holds. They come first in its
    shard: its late chunk has some of them only where its early one is full of them."""
    if cp_size == 1:
        return seqlen
    chunk = padded_seqlen // (2 * cp_size)
    return sum(min(max(seqlen - place * chunk, 0), chunk) for place in (cp_rank, 2 * cp_size - 1 - cp_rank))


def take_shard(values: NDArray[np.generic], positions: NDArray[np.int64]) -> NDArray[np.generic]:
    """Return values[positions] where a position lies inside `values` [seqlen], 0 where it is padding."""
    shard = np.zeros(len(positions), dtype=values.dtype)
    inside = positions < len(values)
    shard[inside] = values[positions[inside]]
    return shard


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
