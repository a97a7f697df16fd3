"""Nothing in the folder of --load is run: whoever can write there could run what they like as the user who trains."""

import contextlib
import dataclasses
import importlib
import io
import os
import pickle
import queue
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as EarlierProperties
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from dynamic_cp.errors import CheckpointError
from megatron.trainer.checkpoints import checkpoint_files, interchange, manifest, safe_loading
from megatron.trainer.checkpoints.checkpoint_files import reporting
from tests.distributed.harness import outcome_of, run_ranks
from tests.payload import Payload, planted, works
from tests.trainer.training_ranks import run_command, train

NEVER_RUN = "so it is refused"


COMMON_OBJECT = "common_state/shard_0_1"


def state_of(rank: int, filled: bool = False) -> dict[str, Any]:
    """Return what a rank saves or asks for: its half of a weight, and an object of its own."""
    weight = torch.arange(4.0) + 10 * rank if filled else torch.zeros(4)
    states = {"cpu": torch.tensor([rank]), "tracker": {"a": torch.tensor([1])}} if filled else None
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", weight, (0, rank, 2)),
        "rng": ShardedObject("rng", states, (2,), (rank,)),
    }


def save(folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    filesystem_async._results_queue = queue.SimpleQueue()
    dist_checkpointing.save({**state_of(dist.get_rank(), True), "iteration": 3}, str(folder))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("saved") / "whole"
    run_ranks(2, save, folder, timeout_s=60)
    return folder


def _metadata(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(planted(mark))


def _metadata_of_a_rank(folder: Path, mark: Path) -> None:
    """torch looks for it where there is no other."""
    (folder / ".metadata").unlink()
    for rank in range(2):
        (folder / f"__{rank}.metadata").write_bytes(planted(mark))


def _within_metadata(folder: Path, mark: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = {"weight": Payload(mark)}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _common(folder: Path, mark: Path, **how: Any) -> None:
    """From megatron-core 0.19 on there is no such file; one that is there is read."""
    torch.save({**safe_loading.read_common(folder), "more": Payload(mark)}, folder / "common.pt", **how)


def _plain_common(folder: Path, mark: Path) -> None:
    (folder / "common.pt").write_bytes(planted(mark))


def _in_place_of(key: str) -> Callable[[Path, Path], None]:
    """Return what makes `key` an object with code."""

    def poison(folder: Path, mark: Path) -> None:
        content = io.BytesIO()
        torch.save(Payload(mark), content)
        (folder / "__9_9.distcp").write_bytes(content.getvalue())
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        (name, *_) = [name for name in metadata.state_dict_metadata if name.startswith(key)] or [COMMON_OBJECT]
        for index in [index for index in metadata.storage_data if index.fqn == name]:
            del metadata.storage_data[index]
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = _StorageInfo("__9_9.distcp", 0, len(content.getvalue()))
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return poison


def _common_among_the_tensors(folder: Path, mark: Path) -> None:
    """As megatron-core 0.19 saves them; every release reads both."""
    (folder / "common.pt").unlink(missing_ok=True)
    _in_place_of(COMMON_OBJECT)(folder, mark)


CASES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    ".metadata": (_metadata, f".metadata holds posix.mkdir, .*{NEVER_RUN}"),
    ".metadata of one rank": (_metadata_of_a_rank, r"\.metadata cannot be read \(FileNotFoundError"),
    "within .metadata": (_within_metadata, f".metadata holds posix.mkdir, .*{NEVER_RUN}"),
    "common.pt": (_common, f"common.pt holds posix.mkdir, .*{NEVER_RUN}"),
    "common.pt in the old format": (lambda folder, mark: _common(folder, mark, _use_new_zipfile_serialization=False),
        f"common.pt holds posix.mkdir, .*{NEVER_RUN}"),
    "a plain pickle as common.pt": (_plain_common, r"common.pt cannot be read \(UnpicklingError"),
    "common values among the tensors": (_common_among_the_tensors,
        rf"__9_9.distcp \({COMMON_OBJECT}\) holds posix.mkdir, .*{NEVER_RUN}"),
    "random states": (_in_place_of("rng"), rf"__9_9.distcp \(rng/shard_\d_2\) holds posix.mkdir, .*{NEVER_RUN}"),
    "a weight": (_in_place_of("weight"), "cannot be read"),
}  # fmt: skip


def load_all(folders: dict[str, Path]) -> dict[str, Any]:
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # scripts set it to load checkpoints of before torch 2.6

    def load(folder: Path) -> Any:
        with reporting(f"--load {folder}: {folder.name}", str(folder), "read", "resume from another"):
            return safe_loading.load(state_of(dist.get_rank()), folder)

    return {name: outcome_of(lambda folder=folder: load(folder)) for name, folder in folders.items()}


def test_code_in_any_file_is_refused_by_all_ranks_and_not_run(whole: Path, tmp_path: Path) -> None:
    assert works(tmp_path)
    folders = {name: tmp_path / str(number) / name.replace(" ", "_") for number, name in enumerate(CASES)}
    for name, folder in folders.items():
        shutil.copytree(whole, folder)
        CASES[name][0](folder, folder.parent / "ran")
    ranks = run_ranks(2, load_all, {"whole": whole, **folders}, timeout_s=90)
    for name, folder in folders.items():
        assert not (folder.parent / "ran").exists(), name
        for kind, text, _ in (found[name] for found in ranks):
            assert kind is CheckpointError, name
            assert re.search(CASES[name][1], text), (name, text)
            assert "rank 1" not in text, "all ranks say the same, once"
    for rank, found in enumerate(ranks):
        assert found["whole"]["iteration"] == 3
        assert found["whole"]["weight"].tolist() == [10.0 * rank + number for number in range(4)]
        assert found["whole"]["rng"]["cpu"].tolist() == [rank]


def test_stock_reading_runs_what_ours_refuses(whole: Path, tmp_path: Path) -> None:
    """The payloads above are good ones: with megatron-core's own reader they run."""
    for name in (".metadata", "within .metadata", "common.pt", "random states"):
        folder = tmp_path / name.replace(" ", "_")
        shutil.copytree(whole, folder)
        CASES[name][0](folder, tmp_path / f"ran {name}")
    run_ranks(1, stock_load_all, tmp_path, timeout_s=60)
    ran = {path.name for path in tmp_path.glob("ran *")}
    assert ran == {"ran .metadata", "ran within .metadata", "ran common.pt", "ran random states"}


def stock_load_all(parent: Path) -> None:
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    for folder in sorted(path for path in parent.iterdir() if (path / "metadata.json").exists()):
        with contextlib.suppress(Exception, CheckpointException):  # some end so after the payload ran
            dist_checkpointing.load(state_of(0), str(folder), validate_access_integrity=False)


def test_every_class_that_a_list_of_tensors_may_name_holds_values_only() -> None:
    for module, names in safe_loading.ADMITTED.items():
        for name in names:
            found = getattr(importlib.import_module(module), name)
            assert isinstance(found, type) or found is torch.serialization._get_layout, name


@pytest.mark.parametrize(
    "name", ["posix.system", "builtins.eval", "torch.load", "torch.hub.load", "torch.float32.__class__", "torch.jit.x"]
)
def test_other_names_are_not_looked_up(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    if name == "torch.float32.__class__":
        module, attribute = "torch", "float32.__class__"
    with pytest.raises(CheckpointError, match=f"file holds {module}.{attribute}, "):
        safe_loading._MetadataUnpickler(io.BytesIO(), "file").find_class(module, attribute)


def test_a_list_of_tensors_of_earlier_versions_is_read() -> None:
    values = [EarlierProperties(dtype=torch.bfloat16), Path("/a"), torch.Size([2]), torch.float8_e4m3fn]
    assert safe_loading._MetadataUnpickler(io.BytesIO(pickle.dumps(values)), "file").load() == values
    of_3_13 = pickle.dumps(Path("/a"), protocol=2).replace(b"cpathlib\n", b"cpathlib._local\n")
    assert safe_loading._MetadataUnpickler(io.BytesIO(of_3_13), "file").load() == Path("/a")


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"no": "list"}), b"\x80\x04."])
def test_a_damaged_list_of_tensors_is_named(whole: Path, tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    (folder / ".metadata").write_bytes(content)
    (kind, text, _) = run_ranks(1, load_all, {"damaged": folder}, timeout_s=60)[0]["damaged"]
    assert kind is CheckpointError
    assert ".metadata" in text


class Settings:
    """Of somebody's own program."""


def test_a_class_that_the_user_allows_is_read(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(whole, folder)
    torch.save({"own": Settings()}, folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt holds tests\.trainer\.test_safe_loading\.Settings, "):
        safe_loading.read_common(folder)
    with torch.serialization.safe_globals([Settings]):
        assert isinstance(safe_loading.read_common(folder)["own"], Settings)


def test_another_format_is_refused_before_its_files_are_read(tmp_path: Path) -> None:
    """megatron-core's earlier format, zarr, has filters that unpickle."""
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    (tmp_path / "common.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="format 'zarr', 'torch_dist' is needed"):
        interchange.read_run(tmp_path, {}, weights_only=True)


BASE = "--dynamic-cp --max-seqlen-per-dp-cp-rank 64 --mock-data --lr-decay-iters 8 --train-iters 2"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "flags"), [(".metadata", "--finetune"), ("random states", ""), ("common.pt", "--finetune")]
)
def test_the_command_ends_with_one_error(saved: Path, tmp_path: Path, name: str, flags: str) -> None:
    """Also of a checkpoint whose manifest was made to fit, and of one of converted weights, which has none."""
    top = tmp_path / "top"
    shutil.copytree(saved, top)
    (folder,) = top.glob("iter_*")
    poison = _in_place_of("rng_state") if name == "random states" else CASES[name][0]
    poison(folder, tmp_path / "ran")
    if name == "common.pt":
        (folder / manifest.NAME).unlink()
        folder.rename(top / "release")
        (top / checkpoint_files.TRACKER).write_text("release")
    else:
        forged = dataclasses.replace(manifest.read_manifest(folder), files={})
        (folder / manifest.NAME).write_bytes(manifest.encode(forged))
    ended = run_command(2, BASE, f"--load {top}", flags)
    assert not (tmp_path / "ran").exists()
    assert [end.code for end in ended] == [2, 2]
    assert len({end.error for end in ended}) == 1
    assert f"posix.mkdir, which is no data of a checkpoint: loading it would run it, {NEVER_RUN}" in ended[0].error


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    train(2, BASE, f"--train-iters 1 --save {folder}")
    return folder
