"""Reads a checkpoint as data: the author of the --load folder cannot make this process run code.

Unpickling calls what the file names, and a torch_dist checkpoint is unpickled in three places:

    .metadata         torch's list of tensors       here with the classes of such a list and no others
    common.pt         values beside the tensors     by torch.load(weights_only=True), whatever the environment says
    objects           random states, in *.distcp    likewise
    tensors           in *.distcp                   torch itself does so

From megatron-core 0.19 on, the values beside the tensors are one of the objects. megatron-core itself protects only
these values, and only while TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is unset. The manifest's checksums do not help: whoever
forges a file writes its checksum, too.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import StackSummary
from typing import Any, TypeVar, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, serialization
from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, Metadata, ReadItem
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner

from dynamic_cp.errors import CheckpointError
from megatron.dynamic_cp.agreement.messages import all_gather_bytes
from megatron.dynamic_cp.agreement.verify import collective_device, run_on_all_ranks
from megatron.dynamic_cp.repairs import releases
from megatron.trainer.checkpoints.state import ask_as_found

T = TypeVar("T")

COMMON = "common.pt"
COMMON_OBJECT = ShardedObject("common_state", None, (1,), (0,)).unique_key
METADATA = ".metadata"
_FORMAT = "torch_dist"
ADMITTED = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "StorageMeta", "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    # written by earlier versions of torch and megatron-core
    "pathlib": ("PosixPath",),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
}
"""Classes of plain values that may be unpickled: module -> names. torch's dtypes may be, too."""


def load(sharded_state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what megatron-core's `dist_checkpointing.load` returns. Collective. Raises CheckpointError: a file is
    damaged or holds more than data; on every rank. Raises CheckpointException: the same of an object in a file of
    tensors, or a tensor that cannot be read."""
    reader = _Reader(folder)

    def read() -> dict[str, Any]:
        with _naming_damage(folder / METADATA):
            reader.read_metadata()
        with _naming_damage(reader.place_of_common):
            _check_format(folder)
            return reader.read_common()

    common = run_on_all_ranks(read)
    ask_as_found(sharded_state, reader.read_metadata().state_dict_metadata)
    with _in_place(*_reader_of_common(), lambda *_: common):
        return dist_checkpointing.load(sharded_state, str(folder), _ShardedPart(reader))


def read_common(folder: Path) -> Any:
    """Return the values beside the tensors. Raises CheckpointError: they hold more than data, or the checkpoint has
    another format. Raises Exception: whatever torch and json raise on damaged files."""
    _check_format(folder)
    return _Reader(folder).read_common()


def open_tensors(folder: Path) -> tuple[FileSystemReader, Metadata]:
    """Return a reader of a checkpoint's tensors, for this rank alone, and their list; CheckpointError as in `load`."""
    reader = _Reader(folder)
    with _naming_damage(folder / METADATA):
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
    with _naming_damage(folder / "metadata.json"):
        _check_format(folder)
    return reader, metadata


def _check_format(folder: Path) -> None:
    config = maybe_load_config(str(folder))
    if config is None or config.sharded_backend != _FORMAT:
        found = "no metadata.json" if config is None else f"format {config.sharded_backend!r}"
        raise CheckpointError(f"{folder} has {found}, {_FORMAT!r} is needed: convert it with Megatron-LM's tools")


class _Reader(FileSystemReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:  # type: ignore[override]  # there is none per rank
        if self._metadata is None:
            path = Path(self.path) / METADATA
            with path.open("rb") as file:
                found = _MetadataUnpickler(file, str(path)).load()
            if not isinstance(found, Metadata):
                raise CheckpointError(f"{path} holds a {type(found).__name__} and no list of tensors")
            self._metadata = found
        return self._metadata

    @property
    def place_of_common(self) -> Path:
        """The file that has the values beside the tensors."""
        found = self._common_object()
        return Path(self.path) / (COMMON if found is None else found.relative_path)

    def read_common(self) -> Any:
        path, found = self.place_of_common, self._common_object()
        if found is None:
            return _read_data(path, str(path))
        with path.open("rb") as file:
            file.seek(found.offset)
            (common,) = _read_data(io.BytesIO(file.read(found.length)), f"{path} ({COMMON_OBJECT})")
        return common

    def _common_object(self) -> Any:
        """Return where the common values lie among the tensors; None if they have their own file."""
        if (Path(self.path) / COMMON).exists() or not (Path(self.path) / METADATA).exists():
            return None
        found = self.read_metadata().storage_data.get(MetadataIndex(COMMON_OBJECT))
        if found is None:
            raise CheckpointError(
                f"{self.path} has neither {COMMON} nor {COMMON_OBJECT} among its tensors: resume from another"
            )
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        planner.load_bytes = functools.partial(self._load_object, planner)  # type: ignore[method-assign]
        return super().read_data(plan, planner)

    def _load_object(self, planner: Any, item: ReadItem, value: Any) -> None:
        """Load one object as `DefaultLoadPlanner.load_bytes` does, but without unpickling code."""
        path = Path(self.path) / self.storage_data[item.storage_index].relative_path
        name = item.dest_index.fqn
        read = _read_data(value, f"{path} ({name})")
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[name], read)
        else:
            planner.state_dict[name] = read


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: str) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "pathlib._local":  # its name in Python 3.13
            module = "pathlib"
        if name not in ADMITTED.get(module, ()):
            raise _foreign(self._path, f"{module}.{name}")
        return super().find_class(module, name)


class _ShardedPart(TorchDistLoadShardedStrategy):
    """megatron-core's strategy with our reader, which it takes no parameter for."""

    def __init__(self, reader: _Reader) -> None:
        super().__init__()
        self._reader = reader

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *how: Any) -> Any:
        def load() -> Any:
            with _in_place(torch_strategies, "_get_filesystem_reader", lambda *_args, **_kwargs: self._reader):
                return super(_ShardedPart, self).load(sharded_state_dict, checkpoint_dir, *how)

        return _failing_together(load) if releases.READ_ALONE.here else load()


def _failing_together(load: Callable[[], T]) -> T:
    """Return this rank's result of `load`; CheckpointException with all causes on all if one fails. Collective."""
    cause = loaded = None
    try:
        loaded = load()
    except CheckpointException as error:
        ((own, _),) = error.failures.values()
        cause = str(own)
    causes = [json.loads(text) for text in all_gather_bytes(json.dumps(cause).encode(), collective_device())]
    failures = {rank: (RuntimeError(text), StackSummary()) for rank, text in enumerate(causes) if text is not None}
    if failures:
        raise CheckpointException("load", failures)
    return cast(T, loaded)


def _reader_of_common() -> tuple[Any, str]:
    """Return the owner and the name of the function by which `dist_checkpointing.load` reads the common values."""
    if releases.COMMON_AS_OBJECT.here:
        return serialization, "load_common_state_dict"
    if releases.COMMON_BY_FUNCTION.here:
        return serialization, "load_common"
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    return TorchCommonLoadStrategy, "load_common"


@contextlib.contextmanager
def _in_place(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    replaced = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, replaced)


def _read_data(file: Any, name: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if refused is None:
            raise
        raise _foreign(name, refused[1]) from None


def _foreign(name: str, refused: str) -> CheckpointError:
    return CheckpointError(
        f"{name} holds {refused}, which is no data of a checkpoint: loading it would run it, so it is refused. Take a "
        "checkpoint that this program or Megatron-LM wrote; SECURITY.md says how to allow a class of your own"
    )


@contextlib.contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # unpickling damaged bytes raises anything
        reason = str(error).strip().splitlines() or [""]
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {reason[-1]}): resume from an older checkpoint"
        ) from error
