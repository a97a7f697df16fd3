"""From the tensors of transformers to one of megatron-core, and back.

Every value is copied as it is, but those of a tensor that is theirs less one. They are kept in a wider type, in which
the difference is exact above 2 ** -14, so that they come back to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.integrations.weights.rows import Fused, Part, Section


def join(fused: Fused, parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor of `fused` out of its parts, whole tensors of transformers; contiguous, without padding."""
    parts = [taken(part, tensor) for part, tensor in zip(fused.parts, parts, strict=True)]
    if fused.joined == "less one":
        return parts[0].to(joined_dtype(fused, parts[0].dtype)) - 1
    if fused.joined == "KV head by KV head, with gates":
        queries, *rest = parts
        # [heads * (query, gate), ...] -> [groups, (its queries, its gates), ...]
        queries = queries.unflatten(0, (fused.num_groups, -1, 2, fused.num_channels)).transpose(1, 2)
        parts = [queries.flatten(0, 3), *rest]
    if fused.joined in _BY_KV_HEAD:
        if len(parts) == 1:
            parts = parts[0].split(_widths(fused))
        # [groups * width, ...] each -> [groups, its queries + a key + a value, ...]
        grouped = [part.reshape(fused.num_groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).reshape(fused.shape)
    if fused.joined in _OF_ALL_EXPERTS:
        return _turned(fused, parts[0]).contiguous()
    return torch.cat(list(parts))


_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


def joined_dtype(fused: Fused, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the tensor of `fused` out of parts of a type."""
    return _WIDER[dtype] if fused.joined == "less one" else dtype


def split_dtype(fused: Fused, dtype: torch.dtype, most: torch.dtype) -> torch.dtype:
    """Return the type of the parts of the tensor of `fused`, which is of type `dtype`: wider than the parts as it was
    imported, theirs if a run saved it. `most` is the type of most numbers of its checkpoint."""
    if fused.joined != "less one":
        return dtype
    return torch.float32 if dtype == torch.float64 else most if _WIDER.get(most) == dtype else dtype


def _widths(fused: Fused) -> list[int]:
    """Return the rows of queries, keys and values, which are three tensors or one."""
    if len(fused.parts) == 3:
        return [part.shape[0] for part in fused.parts]
    keys = fused.num_groups * fused.num_channels
    return [fused.parts[0].shape[0] - 2 * keys, keys, keys]


def taken(part: Part, tensor: Tensor) -> Tensor:
    """Return the rows of a whole tensor that a part means."""
    if part.section is None:
        return tensor
    groups, start, stop = part.section
    return tensor.unflatten(0, (groups, -1))[:, start:stop].flatten(0, 1)


def put_together(sections: Sequence[tuple[Section, Tensor]]) -> Tensor:
    ordered = sorted(sections, key=lambda one: one[0].start)
    return torch.cat([rows.unflatten(0, (section.num_groups, -1)) for section, rows in ordered], dim=1).flatten(0, 1)


_BY_KV_HEAD = ("KV head by KV head", "KV head by KV head, with gates", "queries, keys, values")
_OF_ALL_EXPERTS = ("transposed", "gate and up in turn", "gate and up in turn, transposed")


def _turned(fused: Fused, part: Tensor) -> Tensor:
    """Return the tensor of all experts out of theirs: the last two axes change places, rows in turn are sorted."""
    if fused.joined.endswith("transposed"):
        part = part.transpose(1, 2)
    if fused.joined.startswith("gate and up in turn"):
        # [experts, width * (gate, up), ...] -> [experts, (gate, up) * width, ...]
        part = part.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return part


def _turned_back(fused: Fused, joined: Tensor) -> Tensor:
    if fused.joined.startswith("gate and up in turn"):
        joined = joined.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return joined.transpose(1, 2) if fused.joined.endswith("transposed") else joined


def split(fused: Fused, joined: Tensor) -> list[Tensor]:
    """Return the parts of the tensor of `fused`, each contiguous and with memory of its own; padding is left out.

    They have its type, but where it is theirs less one: float64 then, and `split_dtype` says what it is to be.
    """
    if fused.joined in _BY_KV_HEAD:
        grouped = joined.reshape(fused.num_groups, -1, *joined.shape[1:])
        pieces: Sequence[Tensor] = grouped.split([width // fused.num_groups for width in _widths(fused)], dim=1)
        if len(fused.parts) == 1:
            pieces = (torch.cat([piece.flatten(0, 1) for piece in pieces]),)
        elif fused.joined.endswith("gates"):
            queries, *rest = pieces
            pieces = (queries.unflatten(1, (2, -1, fused.num_channels)).transpose(1, 2), *rest)
    elif fused.joined == "less one":
        pieces = (joined.double() + 1,)
    elif fused.joined in _OF_ALL_EXPERTS:
        pieces = (_turned_back(fused, joined),)
    elif fused.joined == "with rows of padding":
        pieces = (joined[: fused.parts[0].shape[0]],)
    else:
        pieces = joined.split([part.taken[0] for part in fused.parts])
    return [
        piece.reshape(part.taken).clone(memory_format=torch.contiguous_format)
        for part, piece in zip(fused.parts, pieces, strict=True)
    ]
