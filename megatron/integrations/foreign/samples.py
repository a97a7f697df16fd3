"""Checks what a foreign data iterator yields and cuts it into samples: single ones, or packs with `cu_seqlens`.

    {"tokens": [S], "labels"?, "loss_mask"?, "position_ids"?}              one sample
    {..., all [T], "cu_seqlens": [n + 1], "cu_seqlens_padded"?: [n + 1]}   n samples, one after the other
    {..., "mask"?: text, or one text or None for each of several samples}  which keys their tokens see (`parse_mask`)

Values are torch tensors or numpy arrays. Missing labels are the tokens moved by one within the sample, whose last
position then has no loss. Values travel as 4-byte words, so token ids and labels must fit into int32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.types import Branches, Mask, parse_mask
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForeignSample:
    """One sample's columns, int32 [seqlen] (loss_mask float32); None: not given, or read by no chunk of this rank.

    `own_labels`: labels came from the iterator. `mask`: of the sample; None: that of the layers.
    """

    seqlen: int
    tokens: NDArray[np.int32] | None
    position_ids: NDArray[np.int32] | None
    labels: NDArray[np.int32] | None
    loss_mask: NDArray[np.float32] | None
    own_labels: bool
    mask: Mask | None = None

    def column(self, name: str) -> NDArray[Any]:
        """Return a column as int32 words [seqlen], with its default where none was given."""
        if name == "position_ids" and self.position_ids is None:
            by_mask = None if self.mask is None else self.mask.positions(self.seqlen)
            return np.arange(self.seqlen, dtype=np.int32) if by_mask is None else by_mask.astype(np.int32)
        if name == "loss_mask":
            return self._mask().view(np.int32)
        values: NDArray[np.int32] = getattr(self, name)
        return values

    def _mask(self) -> NDArray[np.float32]:
        mask = np.ones(self.seqlen, np.float32) if self.loss_mask is None else self.loss_mask
        if self.own_labels:
            return mask
        return np.concatenate([mask[:-1], np.zeros(1, np.float32)])


def read_item(item: Any, needs: ChunkNeeds) -> list[ForeignSample]:
    """Return the samples of what the iterator yielded; DataError for a key that is missing or of a wrong type, shape or
    range, boundaries that contradict the tokens, or a mask that does not fit."""
    if not isinstance(item, Mapping):
        raise DataError(f"the data iterator yielded a {type(item).__name__}, a dict with the key 'tokens' is needed")
    if item.get("tokens") is None:
        raise DataError(f"key 'tokens' is missing; the data iterator yielded {sorted(map(str, item))}", key="tokens")
    tokens = _integers(item, "tokens")
    assert tokens is not None
    columns: dict[str, NDArray[Any] | None] = {"tokens": tokens}
    for name in ("labels", "position_ids"):
        columns[name] = _integers(item, name)
    columns["loss_mask"] = _mask(item)
    for name, column in columns.items():
        if column is not None and len(column) != len(tokens):
            raise DataError(
                f"key {name!r} has {len(column)} values, key 'tokens' has {len(tokens)}: they must be equally long",
                key=name,
            )
    boundaries = _boundaries(item, len(tokens))
    masks = _masks(item, [end - first for first, end in boundaries])
    if needs.labels and columns["labels"] is None and any(isinstance(mask, Branches) for mask in masks):
        raise DataError(
            "key 'labels' is missing, and in a shared_question or tree (key 'mask') a label is not the next token: "
            "give labels and loss_mask, as data.shared_question and data.turns make them",
            key="labels",
        )
    return [_cut(columns, *place, mask, needs) for place, mask in zip(boundaries, masks, strict=True)]


def _cut(
    columns: Mapping[str, NDArray[Any] | None], first: int, end: int, mask: Mask | None, needs: ChunkNeeds
) -> ForeignSample:
    def part(name: str, needed: bool) -> NDArray[Any] | None:
        column = columns[name]
        return None if column is None or not needed else column[first:end]

    labels = part("labels", needs.labels)
    own_labels = labels is not None
    if needs.labels and labels is None:
        tokens = part("tokens", True)
        assert tokens is not None
        labels = np.concatenate([tokens[1:], np.zeros(1, np.int32)])
    return ForeignSample(
        seqlen=end - first,
        tokens=part("tokens", needs.tokens),
        position_ids=part("position_ids", needs.tokens),
        labels=labels,
        loss_mask=part("loss_mask", needs.labels),
        own_labels=own_labels,
        mask=mask,
    )


def _masks(item: Mapping[str, Any], seqlens: Sequence[int]) -> list[Mask | None]:
    """Return the mask of each sample, once it is known to fit."""
    given = item.get("mask")
    if given is None:
        return [None] * len(seqlens)
    texts = [given] if isinstance(given, str | Mask) else given
    if not isinstance(texts, Sequence) or not all(one is None or isinstance(one, str | Mask) for one in texts):
        raise DataError(f"key 'mask' is a {type(given).__name__}, a text is needed for each sample", key="mask")
    if len(texts) != len(seqlens):
        raise DataError(
            f"key 'mask' has {len(texts)} masks, the item {len(seqlens)} samples: give one each", key="mask"
        )
    masks = []
    for text, seqlen in zip(texts, seqlens, strict=True):
        try:
            mask = parse_mask(text) if isinstance(text, str) else text
        except InvalidInputError as error:
            raise DataError(f"key 'mask': {error}", key="mask") from error
        reason = None if mask is None else mask.why_unfit(seqlen)
        if reason is not None:
            raise DataError(f"key 'mask' is {str(mask)[:60]}, which does not fit: {reason}", key="mask")
        masks.append(mask)
    return masks


def _boundaries(item: Mapping[str, Any], num_tokens: int) -> list[tuple[int, int]]:
    if item.get("cu_seqlens") is None:
        if num_tokens == 0:
            raise DataError("key 'tokens' is empty: drop empty samples in the data set", key="tokens")
        return [(0, num_tokens)]
    real = _boundary_array(item, "cu_seqlens")
    if item.get("cu_seqlens_padded") is None:
        _check_end(real, num_tokens, "cu_seqlens")
        return list(pairwise(real))
    padded = _boundary_array(item, "cu_seqlens_padded")
    _check_end(padded, num_tokens, "cu_seqlens_padded")
    if len(real) != len(padded):
        raise DataError(
            f"key 'cu_seqlens' has {len(real)} boundaries, 'cu_seqlens_padded' {len(padded)}: both need as many",
            key="cu_seqlens_padded",
        )
    seqlens = [end - first for first, end in pairwise(real)]
    for seqlen, (first, end) in zip(seqlens, pairwise(padded), strict=True):
        if seqlen > end - first:
            raise DataError(
                f"key 'cu_seqlens' has a sample of {seqlen} tokens, 'cu_seqlens_padded' gives it {end - first}: "
                "padding cannot be negative",
                key="cu_seqlens_padded",
            )
    return [(first, first + seqlen) for first, seqlen in zip(padded[:-1], seqlens, strict=True)]


def _boundary_array(item: Mapping[str, Any], name: str) -> list[int]:
    array = _integers(item, name)
    assert array is not None
    values: list[int] = array.tolist()
    if len(values) < 2 or values[0] != 0 or any(end <= first for first, end in pairwise(values)):
        shown = values if len(values) <= 8 else f"{values[:8]} ..."
        raise DataError(f"key {name!r} is {shown}: it must begin with 0 and ascend by at least 1 a sample", key=name)
    return values


def _check_end(values: list[int], num_tokens: int, name: str) -> None:
    if values[-1] != num_tokens:
        raise DataError(
            f"key {name!r} ends at {values[-1]}, key 'tokens' has {num_tokens}: the last boundary must be the end",
            key=name,
        )


def _integers(item: Mapping[str, Any], name: str) -> NDArray[np.int32] | None:
    array = _one_dimensional(item, name)
    if array is None:
        return None
    if array.dtype.kind not in "iu":
        raise DataError(f"key {name!r} has dtype {array.dtype}, integers are needed", key=name)
    limits = np.iinfo(np.int32)
    if len(array) and not limits.min <= int(array.min()) <= int(array.max()) <= limits.max:
        raise DataError(
            f"key {name!r} has values from {array.min()} to {array.max()}, they must fit into int32", key=name
        )
    return array.astype(np.int32)  # a copy: the iterator may use its buffer again


def _mask(item: Mapping[str, Any]) -> NDArray[np.float32] | None:
    array = _one_dimensional(item, "loss_mask")
    if array is None:
        return None
    if array.dtype.kind not in "fiub":
        raise DataError(f"key 'loss_mask' has dtype {array.dtype}, numbers or booleans are needed", key="loss_mask")
    return array.astype(np.float32)


def _one_dimensional(item: Mapping[str, Any], name: str) -> NDArray[Any] | None:
    value = item.get(name)
    if value is None:
        return None
    if not isinstance(value, torch.Tensor | np.ndarray):
        raise DataError(f"key {name!r} is a {type(value).__name__}, a torch tensor or numpy array is needed", key=name)
    if value.ndim != 1:
        raise DataError(
            f"key {name!r} has shape {tuple(value.shape)}, one dimension is needed: yield samples, not batches",
            key=name,
        )
    if isinstance(value, np.ndarray):
        return value
    on_host = value.detach().cpu()
    return (on_host.float() if on_host.dtype == torch.bfloat16 else on_host).numpy()
