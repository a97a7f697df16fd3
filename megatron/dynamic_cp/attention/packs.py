"""What one kernel call computes: for each sequence of a pack, a rectangle of queries against keys.

A step of the ring is one `Pack` for any number of sequences, which flash kernels take in one launch. With L local
tokens of a sequence, the steps are (L, L) causal for the lane's own keys, (L, L/2) for those of an earlier lane (the
first of its two chunks) and (L/2, L) for those of a later one (the second half of the queries). With full attention
every step is (L, L) without the keys of padding, which a causal mask hides by itself. Layers with a window are on no
ring.

Masks that consist of few rectangles give a pack of causal squares and packs of full rectangles. All others give
*ranged* packs, with two ranges of keys for every row; rows that see more are in several packs. Kernels learn from
`SeenKeys` which keys a block of rows touches. The host makes everything from the plan's lengths, once per micro-batch,
and keeps it in `LayerCache`: no layer waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynamic_cp.types import CAUSAL, FULL, Lambda, Mask, Rectangle, Sample
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, boundaries, count_held, packed_shard_positions


class RowBlock(NamedTuple):
    """Neighbouring rows of a rectangle, and the columns that all or only some of them see, ascending, none twice."""

    rows: slice
    seen_by_all: tuple[slice, ...]
    seen_by_some: tuple[slice, ...]


class SeenKeys(NamedTuple):
    """What the rows of one rectangle see of its columns. `ranges` are two half-open ranges of columns for each row,
    int32 [rows, 4] on the device; `blocks` the same on the host."""

    ranges: Tensor
    blocks: tuple[RowBlock, ...]

    def sees(self, rows: slice, columns: Tensor) -> Tensor:
        """Return which of `columns` each of `rows` sees, bool [rows, columns]."""
        begin, end, second, last = self.ranges[rows, :, None].unbind(1)
        return ((columns >= begin) & (columns < end)) | ((columns >= second) & (columns < last))


def row_blocks(ranges: NDArray[np.int32], block_rows: int) -> tuple[RowBlock, ...]:
    """Return the keys that each block of rows sees, from ranges [rows, 4] that name no key of a row twice."""
    return tuple(
        _row_block(slice(start, min(start + block_rows, len(ranges))), ranges[start : start + block_rows])
        for start in range(0, len(ranges), block_rows)
    )


def _row_block(rows: slice, ranges: NDArray[np.int32]) -> RowBlock:
    begins, ends = ranges[:, 0::2].reshape(-1), ranges[:, 1::2].reshape(-1)
    kept = begins < ends
    points, where = np.unique(np.concatenate((begins[kept], ends[kept])), return_inverse=True)
    begun, ended = np.split(where, 2)
    steps = np.bincount(begun, minlength=len(points)) - np.bincount(ended, minlength=len(points))
    number = np.cumsum(steps)  # of rows that see the columns from each point to the next
    return RowBlock(rows, _runs(points, number == len(ranges)), _runs(points, (number > 0) & (number < len(ranges))))


def _runs(points: NDArray[np.int32], chosen: NDArray[np.bool_]) -> tuple[slice, ...]:
    """Return the chosen intervals between neighbouring points; those that touch are joined."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))  # the last point begins nothing
    return tuple(slice(*run) for run in points[edges].reshape(-1, 2).tolist())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """Rectangles of one kernel call; sequence i of the queries meets sequence i of the keys and nothing else.

    Attributes:
        mask: which keys of its rectangle a row sees; with CAUSAL, rectangles are aligned squares and row i sees keys
            0..i. None: the pack is ranged, `key_ranges` says it.
        row_seqlens, column_seqlens: queries and keys of each sequence, at least 1.
        cu_rows, cu_columns: their boundaries on the device, int32 [num_sequences + 1].
        rows: which local tokens the queries are, none twice, int64 [sum(row_seqlens)]; None: all, in order.
        columns: which of the keys at hand, int64 [sum(column_seqlens)]; None: all, in order. The gradient of a key that
            several sequences have is the sum of theirs.
        key_ranges: two disjoint half-open ranges of keys for each row, counted from the first column of its rectangle,
            int32 [sum(row_seqlens), 4]; both may be empty. None: the pack is not ranged.
        host_ranges: the same on the host.
        kept: what kernels derive from it, by name, filled by the first layer.
    """

    mask: Mask | None
    row_seqlens: tuple[int, ...]
    column_seqlens: tuple[int, ...]
    cu_rows: Tensor
    cu_columns: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None
    key_ranges: Tensor | None = None
    host_ranges: NDArray[np.int32] | None = None
    kept: dict[tuple[str | int, ...], Any] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        row_seqlens: Sequence[int],
        column_seqlens: Sequence[int] | None = None,
        *,
        mask: Mask = FULL,
        device: torch.device,
        rows: NDArray[np.int64] | None = None,
        columns: NDArray[np.int64] | None = None,
        key_ranges: NDArray[np.int32] | None = None,
    ) -> Pack:
        """Return the pack with its tensors on `device`; `column_seqlens` None: as many keys as queries. `mask` is that
        of all rectangles, unless `key_ranges` makes the pack ranged."""
        row_seqlens = tuple(row_seqlens)
        column_seqlens = row_seqlens if column_seqlens is None else tuple(column_seqlens)
        ranged = key_ranges is not None
        assert ranged or mask != CAUSAL or row_seqlens == column_seqlens, "a causal rectangle is a square"
        assert not ranged or _are_inside(key_ranges, np.repeat(column_seqlens, row_seqlens)), "ranges cross or leave"
        cu_rows = to_device(boundaries(row_seqlens), device)
        same = column_seqlens == row_seqlens
        return cls(
            mask=None if ranged else mask,
            row_seqlens=row_seqlens,
            column_seqlens=column_seqlens,
            cu_rows=cu_rows,
            cu_columns=cu_rows if same else to_device(boundaries(column_seqlens), device),
            rows=None if rows is None else to_device(rows, device),
            columns=None if columns is None else to_device(columns, device),
            key_ranges=to_device(key_ranges, device) if ranged else None,
            host_ranges=key_ranges,
        )

    @property
    def causal(self) -> bool:
        """Whether no row sees the keys after it."""
        return self.mask == CAUSAL

    @property
    def max_rows(self) -> int:
        """Queries of the longest sequence."""
        return max(self.row_seqlens)

    @property
    def max_columns(self) -> int:
        """Keys of the longest sequence."""
        return max(self.column_seqlens)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        row = column = 0
        for num_rows, num_columns in zip(self.row_seqlens, self.column_seqlens, strict=True):
            yield slice(row, row + num_rows), slice(column, column + num_columns)
            row, column = row + num_rows, column + num_columns

    def seen_keys(self, block_rows: int) -> list[SeenKeys | None]:
        """Return for each sequence what its rows see, in blocks of `block_rows`; None where `mask` says it."""
        if self.key_ranges is None or self.host_ranges is None:
            return [None] * len(self.row_seqlens)
        name = ("seen keys", block_rows)
        if name not in self.kept:
            self.kept[name] = [
                SeenKeys(self.key_ranges[rows], row_blocks(self.host_ranges[rows], block_rows))
                for rows, _ in self.slices()
            ]
        found: list[SeenKeys | None] = self.kept[name]
        return found


def _are_inside(ranges: NDArray[np.int32], num_columns: NDArray[np.int64]) -> bool:
    """Return whether the two ranges of every row lie in its columns and are disjoint."""
    begin, end, second, last = ranges.T
    ordered = (begin >= 0) & (begin <= end) & (second >= 0) & (second <= last)
    apart = (end <= second) | (last <= begin) | (begin == end) | (second == last)
    return bool((ordered & apart & (np.maximum(end, last) <= num_columns)).all())


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return `values` on the device, without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def exact_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of what heads sum over tokens: float64 on a CPU, elsewhere float32 at least."""
    return torch.float64 if x.device.type == "cpu" else torch.promote_types(x.dtype, torch.float32)


def dense_heads(x_THD: Tensor) -> Tensor:
    """Return the tensor with contiguous head widths, as kernels read it; usually the same tensor."""
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


def ring_packs(params: DynamicPackedSeqParams, kv_rank: int, device: torch.device) -> list[Pack]:
    """Return the packs that this lane computes with the keys and values of lane `kv_rank` of its ring, usually one."""
    samples = params.masked_samples
    if isinstance(params.mask, Lambda):
        assert params.ring_size == 1, "windows are planned for one lane or a2a"
        return params.once("window", lambda: [*_packs_of(_as_samples(params), params.padded_seqlens, device)])
    if samples is None:
        return full_packs(params, kv_rank, device) if params.mask == FULL else [ring_pack(params, kv_rank, device)]
    assert params.ring_size == 1, "masks are planned for one lane or a2a"
    return params.once("by mask", lambda: [*_packs_of(samples, params.padded_seqlens, device)])


def _as_samples(params: DynamicPackedSeqParams) -> list[Sample]:
    """Return the sequences as samples with the masks that these layers apply; no token sees the padding behind it."""
    if params.masked_samples is not None:
        return [replace(sample, mask=sample.mask_in(params.mask)) for sample in params.masked_samples]
    seqlens = params.padded_seqlens
    return [Sample(sample_id=index, seqlen=seqlen, mask=params.mask) for index, seqlen in enumerate(seqlens)]


def _packs_of(samples: Sequence[Sample], padded_seqlens: Sequence[int], device: torch.device) -> Iterator[Pack]:
    """Yield a pack of all causal squares, packs of all full rectangles, and ranged packs of the other masks."""
    squares: list[Rectangle] = []
    full: dict[int, list[Rectangle]] = {}
    ranged: list[Rectangle] = []
    key_ranges: list[NDArray[np.int32]] = []
    *starts, num_tokens = boundaries(padded_seqlens).tolist()
    for start, sample, padded in zip(starts, samples, padded_seqlens, strict=True):
        mask = sample.mask or CAUSAL
        found = mask.rectangles(sample.seqlen)
        if found is None:
            ranged.append(Rectangle.square(start, padded, causal=False))
            key_ranges.append(_with_padding(mask.key_ranges(sample.seqlen), padded))
            continue
        if padded > sample.seqlen:
            found += (Rectangle.square(sample.seqlen, padded - sample.seqlen, causal=True),)
        found = [one._replace(first_row=start + one.first_row, first_column=start + one.first_column) for one in found]
        squares += (one for one in found if one.causal)
        for level, one in _levels([one for one in found if not one.causal]):
            full.setdefault(level, []).append(one)
    if squares:
        yield _pack_of(squares, num_tokens, device, mask=CAUSAL)
    for of_level in full.values():
        yield _pack_of(of_level, num_tokens, device, mask=FULL)
    if ranged:
        for two in pairs_of_ranges(key_ranges):
            yield _pack_of(ranged, num_tokens, device, key_ranges=two)


def _levels(rectangles: Sequence[Rectangle]) -> Iterator[tuple[int, Rectangle]]:
    """Yield each rectangle with its level: how many others lie around its rows; those of one level share no rows."""
    ends: list[int] = []
    for one in sorted(rectangles, key=lambda one: (one.first_row, -one.num_rows)):
        while ends and ends[-1] <= one.first_row:
            ends.pop()
        yield len(ends), one
        ends.append(one.first_row + one.num_rows)


def pairs_of_ranges(ranges: Sequence[NDArray[np.int32]]) -> Iterator[NDArray[np.int32]]:
    """Yield the `Mask.key_ranges` of some sequences as those of packs, two for each row; empty ones come last."""
    width = max(one.shape[1] for one in ranges)
    if width == 4:
        yield np.concatenate(ranges)
        return
    parts = np.concatenate([np.pad(one, ((0, 0), (0, width - one.shape[1]))) for one in ranges]).reshape(
        -1, width // 2, 2
    )
    is_empty = parts[..., 0] >= parts[..., 1]
    parts = np.take_along_axis(parts, np.argsort(is_empty, axis=1, kind="stable")[..., None], axis=1)
    most = int((~is_empty).sum(axis=1).max())
    parts = np.pad(parts, ((0, 0), (0, width // 2 % 2), (0, 0)))
    for first in range(0, max(most, 1), 2):
        yield np.ascontiguousarray(parts[:, first : first + 2]).reshape(-1, 4)


def _with_padding(ranges: NDArray[np.int32], padded: int) -> NDArray[np.int32]:
    """Return the key ranges of a sequence and of its padding, which is a causal sequence of its own."""
    of_padding = np.zeros((padded - len(ranges), ranges.shape[1]), np.int32)
    of_padding[:, :4] = CAUSAL.key_ranges(len(of_padding))
    of_padding[:, :2] += len(ranges)
    return np.concatenate((ranges, of_padding))


def _pack_of(rectangles: Sequence[Rectangle], num_tokens: int, device: torch.device, **which: Any) -> Pack:
    first_row, num_rows, first_column, num_columns, _ = np.array(rectangles).T
    rows, columns = _ranges(first_row, num_rows), _ranges(first_column, num_columns)
    return Pack.build(
        num_rows.tolist(),
        num_columns.tolist(),
        device=device,
        rows=None if _is_all(rows, num_tokens) else rows,
        columns=None if _is_all(columns, num_tokens) else columns,
        **which,
    )


def _is_all(tokens: NDArray[np.int64], number: int) -> bool:
    return len(tokens) == number and bool((np.diff(tokens) == 1).all())


def ring_pack(params: DynamicPackedSeqParams, kv_rank: int, device: torch.device) -> Pack:
    """Return the one pack of `ring_packs` for causal sequences."""
    whole = params.ring_seqlens
    halves = tuple(seqlen // 2 for seqlen in whole)
    if kv_rank == params.ring_rank:
        return params.once("own", lambda: Pack.build(whole, mask=CAUSAL, device=device))
    if kv_rank < params.ring_rank:
        columns = partial(_half_rows, halves, second=False)
        return params.once("earlier", lambda: Pack.build(whole, halves, device=device, columns=columns()))
    rows = partial(_half_rows, halves, second=True)
    return params.once("later", lambda: Pack.build(halves, whole, device=device, rows=rows()))


def full_packs(params: DynamicPackedSeqParams, kv_rank: int, device: torch.device) -> list[Pack]:
    """Return `ring_packs` of sequences with full attention: none where that lane holds only padding."""

    def build() -> list[Pack]:
        of_sequences = zip(params.seqlens, params.padded_seqlens, strict=True)
        shown = [count_held(seqlen, padded, params.ring_size, kv_rank) for seqlen, padded in of_sequences]
        return _full_packs(params.ring_seqlens, params.ring_seqlens, shown, device)

    return params.once(f"keys of lane {kv_rank}", build)


def _full_packs(
    row_seqlens: Sequence[int], held: Sequence[int], shown: Sequence[int], device: torch.device
) -> list[Pack]:
    """Return a pack of all queries against the first `shown` of the `held` keys of their sequence, if there are any."""
    rows, keys, columns = np.array(row_seqlens), np.array(held), np.array(shown)
    seen = columns > 0
    if not seen.any():
        return []
    first_rows, first_columns = np.cumsum(rows) - rows, np.cumsum(keys) - keys
    pack = Pack.build(
        rows[seen].tolist(),
        columns[seen].tolist(),
        device=device,
        rows=None if seen.all() else _ranges(first_rows[seen], rows[seen]),
        columns=None if (columns == keys).all() else _ranges(first_columns[seen], columns[seen]),
    )
    return [pack]


def gathered_packs(params: DynamicPackedSeqParams, device: torch.device) -> list[Pack]:
    """Return the packs that this lane computes with the keys of its whole group, in the order of the sequences. Full
    attention and windows take one pack. Causal takes three, so that no key is twice in one: the diagonal squares of
    the lane's two chunks of each sequence, the keys before the second chunk, and those before the first."""
    size, rank = params.cp_group.size(), params.cp_group.rank()
    if params.mask == FULL:
        rows = [seqlen // size for seqlen in params.padded_seqlens]
        return params.once("all", lambda: _full_packs(rows, params.padded_seqlens, params.seqlens, device))
    if isinstance(params.mask, Lambda):
        assert params.masked_samples is None, "planned for no samples with masks"
        return params.once("window", lambda: [_windowed_pack(params.mask, params.padded_seqlens, size, rank, device)])
    chunks = np.array([seqlen // (2 * size) for seqlen in params.padded_seqlens])
    starts = boundaries(params.padded_seqlens)[:-1]

    def diagonal() -> Pack:
        held = np.stack((starts + rank * chunks, starts + (2 * size - 1 - rank) * chunks), axis=1).reshape(-1)
        lengths = np.repeat(chunks, 2)
        return Pack.build(lengths.tolist(), mask=CAUSAL, device=device, columns=_ranges(held, lengths))

    def past(num_chunks: int, *, second: bool) -> Pack:
        return Pack.build(
            chunks.tolist(),
            (chunks * num_chunks).tolist(),
            device=device,
            rows=_half_rows(chunks, second=second),
            columns=_ranges(starts, chunks * num_chunks),
        )

    packs = [
        params.once("diagonal", diagonal),
        params.once("past of second", lambda: past(2 * size - 1 - rank, second=True)),
    ]
    if rank:
        packs.append(params.once("past of first", lambda: past(rank, second=False)))
    return packs


def _windowed_pack(mask: Mask, padded_seqlens: Sequence[int], size: int, rank: int, device: torch.device) -> Pack:
    shards = (packed_shard_positions((seqlen,), size, rank) for seqlen in padded_seqlens)
    ranges = [mask.key_ranges(seqlen)[shard] for seqlen, shard in zip(padded_seqlens, shards, strict=True)]
    return Pack.build([len(one) for one in ranges], padded_seqlens, device=device, key_ranges=np.concatenate(ranges))


def _ranges(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return starts[i] .. starts[i] + lengths[i] - 1 for each i, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)


def _half_rows(halves: Sequence[int] | NDArray[np.integer], *, second: bool) -> NDArray[np.int64]:
    lengths = np.asarray(halves)
    starts = 2 * (np.cumsum(lengths) - lengths) + (lengths if second else 0)
    return _ranges(starts, lengths)
