"""The tensors of a checkpoint (megatron-core's torch_dist), written and read one at a time, in one process.

A checkpoint lists the pieces of each tensor, wherever they are, so what is written here in one piece per layer loads on
any TP and PP, and what any layout has written is read here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemWriter,
    LoadPlan,
    SavePlan,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dynamic_cp.errors import CheckpointError
from megatron.integrations.weights.rows import Fused
from megatron.trainer.checkpoints import safe_loading

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write(
    folder: Path,
    tensors: Sequence[Fused],
    dtypes: Mapping[str, torch.dtype],
    make: Callable[[Fused], Tensor],
    common: Mapping[str, Any],
) -> None:
    """Write a checkpoint of `tensors` alone into `folder`, a file per layer, or raise OSError. One tensor is in memory
    at a time: `make` returns it when it is its turn. `common` are the values beside the tensors."""
    by_index: dict[MetadataIndex, Fused] = {}
    plans: dict[int | str, list[WriteItem]] = {}
    for one in tensors:
        item = _write_item(one, dtypes[one.name])
        by_index[item.index] = one
        plans.setdefault(one.name if one.layer is None else one.layer, []).append(item)
    planned, metadata = create_default_global_save_plan([SavePlan(items) for items in plans.values()])
    writer = FileSystemWriter(folder, sync_files=True)
    writer.set_up_storage_writer(True)
    planned = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in planned])
    planner = _OnDemand(lambda index: make(by_index[MetadataIndex(index.fqn, index.offset)]))
    writer.finish(metadata, [writer.write_data(plan, planner).wait() for plan in planned])
    torch.save(dict(common), folder / safe_loading.COMMON)
    (folder / "metadata.json").write_text(json.dumps(_FORMAT), encoding="utf-8")


def _write_item(one: Fused, dtype: torch.dtype) -> WriteItem:
    offsets = (*one.place, *(0 for _ in one.shape))
    sizes = (*(1 for _ in one.place), *one.shape)
    size = (*one.stacks, *one.shape)
    return WriteItem(
        index=MetadataIndex(one.name, torch.Size(offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(size),
        ),
    )


class _OnDemand(DefaultSavePlanner):
    """Hands tensors to the writer that are made when they are written."""

    def __init__(self, make: Callable[[MetadataIndex], Tensor]) -> None:
        super().__init__()
        self._make = make

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = write_item.tensor_data
        assert data is not None
        return self._make(write_item.index).reshape(data.chunk.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor of a checkpoint: all of its layers and experts, all of its pieces."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class CheckpointTensors:
    """The weights in the `folder` of one iteration, or of converted weights, whoever saved it on whichever layout; in
    `saved` by name, without the optimizer's. CheckpointError if its list cannot be read, or is more than data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader, self._metadata = safe_loading.open_tensors(folder)
        self.saved = {
            name: Saved(shape=tuple(entry.size), dtype=entry.properties.dtype)
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith("optimizer.")
        }

    def read(self, name: str, place: tuple[int, ...] = ()) -> Tensor:
        """Return a tensor, or what is at `place` of its first axes; raise CheckpointError if it cannot be read."""
        saved = self.saved[name]
        offsets = (*place, *(0 for _ in saved.shape[len(place) :]))
        sizes = (*(1 for _ in place), *saved.shape[len(place) :])
        wanted = torch.empty(sizes, dtype=saved.dtype)
        items = create_read_items_for_chunk_list(
            name,
            self._metadata.state_dict_metadata[name],
            [ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))],
        )
        found = sum(item.lengths.numel() for item in items)
        if found != wanted.numel():
            raise CheckpointError(
                f"{self._folder}: {found} of the {wanted.numel()} numbers of {name} are there: export another"
            )
        into = _Into(wanted)
        try:
            self._reader.read_data(LoadPlan(items), into).wait()
        except Exception as error:  # what is damaged makes torch raise anything
            reason = str(error).strip().splitlines() or [""]
            raise CheckpointError(
                f"{self._folder}: {name} cannot be read ({type(error).__name__}: {reason[-1]}): export another"
            ) from error
        finally:
            into.wanted = None  # the reader refers to its planner by the planner: only the garbage collector ends that
        return wanted.reshape(sizes[len(place) :])


class _Into(DefaultLoadPlanner):
    """Has the reader fill a tensor."""

    def __init__(self, wanted: Tensor) -> None:
        super().__init__()
        self.wanted: Tensor | None = wanted

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        piece = self.wanted
        assert piece is not None
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            piece = piece.narrow(axis, start, length)
        return piece

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
