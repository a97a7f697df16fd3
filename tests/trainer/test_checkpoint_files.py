"""A crash of a save leaves the previous checkpoint in place; damage is found before anything is read."""

import errno
import functools
import gc
import json
import os
import resource
import time
import weakref
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from dynamic_cp.errors import CheckpointError, InvalidInputError
from megatron.trainer.checkpoints import checkpoint_files, manifest
from megatron.trainer.checkpoints import checkpoint_files as files
from megatron.trainer.checkpoints.manifest import HashedFile, Manifest, hash_file
from megatron.trainer.checkpoints.saving import WriteResults, WriterProcess
from megatron.trainer.checkpoints.state import ask_as_found, found_as
from tests import patience
from tests.distributed.harness import run_ranks
from tests.trainer.checkpoints import verified

BIG = b"x" * ((1 << 20) + 1)


def _write(save_dir, iteration: int, big: bytes = BIG) -> None:
    partial = files.begin(str(save_dir), iteration)
    (partial / "weights.distcp").write_bytes(big)
    (partial / "common.pt").write_bytes(b"common")
    files.commit(partial, iteration, {"iteration": iteration})


def test_round_trip(tmp_path):
    assert files.latest(str(tmp_path)) is None
    for iteration in (10, 20):
        _write(tmp_path, iteration)
        assert verified(files.latest(str(tmp_path))) == {"iteration": iteration}
    assert sorted(os.listdir(tmp_path)) == ["iter_0000010", "iter_0000020", files.TRACKER]


def test_ranks_divide_the_files_among_themselves(tmp_path):
    partial = files.begin(str(tmp_path), 10)
    for number in range(7):
        (partial / f"__{number}_0.distcp").write_bytes(bytes(100 + number))
    folder = files.commit(partial, 10, {})
    content = manifest.read_manifest(folder)
    shares = [manifest.verify_files(folder, content, share=share, num_shares=3) for share in range(3)]
    assert sum(shares) == sum(range(100, 107))
    assert max(shares) <= 3 * 106


class _CrashError(RuntimeError):
    pass


def _save_and_crash(save_dir, iteration: int, step: str, patched: pytest.MonkeyPatch) -> None:
    def crash(*_args, **_kwargs):
        raise _CrashError

    rename = type(save_dir).rename

    def crash_at_the_partial_folder(path, target):
        return crash() if path.suffix == ".partial" else rename(path, target)

    if step == "manifest":
        patched.setattr(files, "_write_synced", crash)
    if step == "rename":
        patched.setattr(type(save_dir), "rename", crash)
    if step == "second rename":
        patched.setattr(type(save_dir), "rename", crash_at_the_partial_folder)
    if step == "tracker":
        patched.setattr(type(save_dir), "replace", crash)
    partial = files.begin(str(save_dir), iteration)
    if step == "remove":
        patched.setattr(files.shutil, "rmtree", crash)
    if step == "begin":
        crash()
    (partial / "weights.distcp").write_bytes(BIG)
    if step == "files":
        crash()
    files.commit(partial, iteration, {"iteration": iteration})


@pytest.mark.parametrize("step", ["begin", "files", "manifest", "rename", "tracker"])
def test_a_crash_while_saving_leaves_the_previous_checkpoint(tmp_path, monkeypatch, step):
    _write(tmp_path, 10)
    with monkeypatch.context() as patched, pytest.raises(_CrashError):
        _save_and_crash(tmp_path, 20, step, patched)
    assert verified(files.latest(str(tmp_path))) == {"iteration": 10}
    # The next save cleans up and succeeds.
    _write(tmp_path, 20)
    assert verified(files.latest(str(tmp_path))) == {"iteration": 20}
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    "step",
    ["begin", "files", "manifest", "rename", "second rename", "tracker", "remove"],
    ids="saving 10 over 10, {}".format,
)
@pytest.mark.parametrize("next_iteration", [10, 20])
def test_a_crash_while_saving_an_iteration_again_leaves_it_whole(tmp_path, monkeypatch, step, next_iteration):
    _write(tmp_path, 10, big=b"first")
    with monkeypatch.context() as patched, pytest.raises(_CrashError):
        _save_and_crash(tmp_path, 10, step, patched)
    assert verified(files.latest(str(tmp_path))) == {"iteration": 10}
    # So it is while the next save is under way; at its end nothing is left over.
    partial = files.begin(str(tmp_path), next_iteration)
    assert verified(files.latest(str(tmp_path))) == {"iteration": 10}
    files.commit(partial, next_iteration, {"iteration": next_iteration})
    assert verified(files.latest(str(tmp_path))) == {"iteration": next_iteration}
    assert {path.suffix for path in tmp_path.iterdir()} == {"", ".txt"}


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "truncated": (lambda folder: _truncate(folder / "weights.distcp"), str(len(BIG) - 1)),
    "empty": (lambda folder: (folder / "weights.distcp").write_bytes(b""), "0 bytes"),
    "missing": (lambda folder: (folder / "weights.distcp").unlink(), "missing"),
    "another small file": (lambda folder: (folder / "common.pt").write_bytes(b"cOmmon"), "another content"),
    "another large file": (lambda folder: (folder / "weights.distcp").write_bytes(BIG[1:] + b"y"), "another content"),
    "no manifest": (lambda folder: (folder / manifest.NAME).unlink(), "not a complete checkpoint"),
    "truncated manifest": (lambda folder: _truncate(folder / manifest.NAME), "not a complete checkpoint"),
    "other version": (
        lambda folder: (folder / manifest.NAME).write_bytes(
            manifest.encode(Manifest(iteration=10, run={}, files={}, schema_version=99))
        ),
        "99",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(tmp_path, kind):
    damage, part = DAMAGE[kind]
    _write(tmp_path, 10)
    folder = files.latest(str(tmp_path))
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        verified(folder)
    assert part in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(("text", "part"), [("", "''"), ("ten", "'ten'"), ("30", "iter_0000030"), ("\xff", "ÿ")])
def test_a_tracker_that_names_nothing_is_an_error(tmp_path, text, part):
    _write(tmp_path, 10)
    (tmp_path / files.TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match=files.TRACKER) as caught:
        files.latest(str(tmp_path))
    assert part in str(caught.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/run"):
        files.probe_writable(str(tmp_path / "file" / "run"))
    with pytest.raises(InvalidInputError, match=r"--tensorboard-dir .*file/run cannot be written .*choose another"):
        files.probe_writable(str(tmp_path / "file" / "run"), "--tensorboard-dir", InvalidInputError)
    files.probe_writable(str(tmp_path / "new" / "folder"))
    assert not os.listdir(tmp_path / "new" / "folder")


def test_any_flipped_bit_is_refused_by_the_name_of_its_file(tmp_path):
    """One bit of every byte of every file, the manifest among them."""
    _write(tmp_path, 10, big=bytes(range(256)))
    folder = files.latest(str(tmp_path))
    num_refused = 0
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for place in range(len(whole)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            with pytest.raises(CheckpointError, match=path.name):
                verified(folder)
            num_refused += 1
        path.write_bytes(whole)
    assert num_refused > 500
    assert verified(folder) == {"iteration": 10}


@pytest.mark.parametrize("sizes", [[], [0], [1, 5, 3], [1 << 20, 7, (9 << 20) + 1, 1]])
def test_what_is_hashed_while_it_is_written_is_what_lies_on_the_disk(tmp_path, sizes):
    path = tmp_path / "file"
    content = [os.urandom(size) for size in sizes]
    with HashedFile(path) as file:
        for part in content:
            assert file.write(memoryview(part)) == len(part)
        os.fsync(file.fileno())
        assert path.stat().st_size == sum(sizes), "everything is on its way to the disk before it is synced"
    assert path.read_bytes() == b"".join(content)
    assert file.record() == {"bytes": sum(sizes), "xxh3_64": hash_file(path)}


def test_a_file_that_is_not_on_the_disk_as_it_was_written_is_an_error_of_the_save(tmp_path):
    partial = files.begin(str(tmp_path), 10)
    with HashedFile(partial / "weights.distcp") as file:
        file.write(b"12345")
    _truncate(partial / "weights.distcp")
    with pytest.raises(CheckpointError, match="4 bytes right after 5 were written"):
        files.commit(partial, 10, {}, {"weights.distcp": file.record()})
    (partial / "weights.distcp").unlink()
    with pytest.raises(CheckpointError, match="is not there: do all ranks see the same folder"):
        files.commit(partial, 10, {}, {"weights.distcp": file.record()})
    assert files.latest(str(tmp_path)) is None


Usage = namedtuple("Usage", "total used free")
FULL, ROOMY = Usage(100_000_000_000, 99_999_000_000, 1_000_000), Usage(100_000_000_000, 0, 60_000_000_000)
SAID = {
    "Worker failure: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598": (
        "Worker failure: a file was cut short (unexpected pos 704 vs 598)"
    ),
    "rank 0: OSError: [Errno 28] No space left on device": "rank 0: OSError: [Errno 28] No space left on device",
    "[Errno 122] Disk quota exceeded: '/s/x'": "[Errno 122] Disk quota exceeded: '/s/x'",
    "PytorchStreamWriter failed writing file data/0: file write failed": "writing file data/0: file write failed",
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize(
    ("usage", "head"),
    [
        (FULL, "the disk of {} is full: 1.0 MB of 100.0 GB are free; "),
        (ROOMY, "on the disk of {} 60.0 GB of 100.0 GB are free: was it full for a moment, or"),
    ],
)
def test_a_full_disk_is_named_with_its_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, usage: Usage, head: str
) -> None:
    asked = []
    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", lambda path: asked.append(path) or usage)
    folder = tmp_path / "saved" / "iter_0000004.partial"
    explained = checkpoint_files.explain_refused_write(f"{said}\n", folder)
    assert asked == [tmp_path], "the folder itself may be gone"
    assert explained.startswith(head.format(folder))
    assert explained.endswith(SAID[said])
    assert "\n" not in explained
    assert "enforce fail" not in explained


@pytest.mark.parametrize("said", ["Permission denied: '/s/x'", "the process that wrote it ended before it was done"])
def test_other_refusals_stay_as_they_are(tmp_path: Path, said: str) -> None:
    assert not checkpoint_files.is_refused_write(RuntimeError(said))
    assert checkpoint_files.explain_refused_write(f"{said}\nand more\n", tmp_path) == f"{said} and more"


def test_what_torch_says_of_a_file_that_is_cut_short_is_recognised(tmp_path: Path) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    try:
        with pytest.raises((RuntimeError, OSError)) as raised:
            torch.save(torch.zeros(100_000), tmp_path / "weights.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert checkpoint_files.is_refused_write(raised.value)
    explained = checkpoint_files.explain_refused_write(str(raised.value), tmp_path)
    assert "\n" not in explained
    assert f"disk of {tmp_path}" in explained
    assert "cut short (unexpected pos " in explained or os.strerror(errno.EFBIG) in explained


NAMES = {
    "decoder.layers.1.pre_mlp_layernorm.weight": "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.input_layernorm.weight": "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.self_attention.q_layernorm.weight": (
        "decoder.layers.self_attention.linear_q_up_proj.layer_norm_weight"
    ),
    "mtp.layers.0.transformer_layer.self_attention.kv_layernorm.weight": (
        "mtp.layers.0.transformer_layer.self_attention.linear_kv_up_proj.layer_norm_weight"
    ),
}


@pytest.mark.parametrize("alone", NAMES)
def test_either_name_is_found(alone):
    fused = NAMES[alone]
    for there, asked in ((alone, fused), (fused, alone), (alone, alone), (fused, fused)):
        assert found_as(asked, {there, "decoder.final_layernorm.weight"}) == there
    assert found_as(alone, {}) == alone, "what is missing keeps its name for the message"


def test_weights_and_their_optimizer_are_asked_for_as_they_are_there():
    moment = "optimizer.state.exp_avg."
    there = set(NAMES.values()) | {moment + fused for fused in NAMES.values()} | {"output_layer.weight"}
    asked = [SimpleNamespace(key=name) for alone in NAMES for name in (alone, moment + alone)]
    head = SimpleNamespace(key="output_layer.weight")
    ask_as_found({"model": {"w": asked[0], "more": [asked[1:4], head]}, "rng": 3, "o": {0: tuple(asked[4:])}}, there)
    assert [one.key for one in asked] == [name for fused in NAMES.values() for name in (fused, moment + fused)]
    assert head.key == "output_layer.weight"


STAGED, REUSED = [1.0, 2.0, 3.0], [-1.0] * 3


def write_what_was_staged(folder: Path) -> tuple[list[float], bool, bool]:
    """Return what the writer read, and whether the memory was given back while it wrote, and afterwards."""
    page_locked = torch.tensor(STAGED).share_memory_()
    freed = []

    def stage() -> list[torch.Tensor]:
        tensor = page_locked.view(-1)

        def reuse() -> None:
            freed.append(True)
            page_locked.copy_(torch.tensor(REUSED))

        weakref.finalize(tensor, reuse)
        return [tensor]

    def write(_: Any, index: int, tensor: torch.Tensor, outcome: Any, *_args: Any, **_kwargs: Any) -> None:
        while not (folder / "go").exists():
            time.sleep(0.01)
        (folder / "read").write_text(json.dumps(tensor.tolist()))
        outcome.put((index, []))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write))
        writer = WriterProcess()
        writer.start(
            AsyncRequest(
                async_fn=functools.partial(print, []),  # its first argument is looked at, it is not called
                async_fn_args=(0, None, WriteResults()),
                finalize_fns=[],
                preload_fn=stage,
            )
        )
        gc.collect()
        while_writing = bool(freed)
        (folder / "go").touch()
        deadline_s = patience.now_s() + 30
        while not writer.finalized():
            assert patience.now_s() < deadline_s
            time.sleep(0.01)
    gc.collect()
    return json.loads((folder / "read").read_text()), while_writing, bool(freed)


def test_page_locked_memory_is_kept_until_it_is_written(tmp_path: Path) -> None:
    ((read, freed_while_writing, freed_afterwards),) = run_ranks(1, write_what_was_staged, tmp_path, timeout_s=60)
    assert read == STAGED
    assert not freed_while_writing
    assert freed_afterwards, "host memory of the size of a checkpoint is kept for ever"
