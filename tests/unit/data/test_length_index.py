"""The file of an index: what is not as it was written is noticed, and writing it leaves a whole one or none."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.trainer.data import length_index
from megatron.trainer.data.length_index import IndexFileError, LengthIndex, load_index


def make(seed: int = 0, num_documents: int = 1000) -> LengthIndex:
    rng = np.random.default_rng(seed)
    columns = {
        "lengths": rng.integers(1, 1 << 40, num_documents),
        "names": rng.integers(0, 256, 77, dtype=np.uint8),
        "none": np.empty(0, dtype=np.int64),
    }
    return LengthIndex.build({"kind": "test"}, {"blank lines": 3}, columns)


@pytest.fixture
def saved(tmp_path):
    index = make().save(str(tmp_path / "folder" / "a.lengths"))
    assert index.path is not None
    return index


def is_mapped(array: np.ndarray) -> bool:
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array is not None


def test_what_is_saved_is_read_back_mapped(saved):
    assert os.listdir(os.path.dirname(saved.path)) == ["a.lengths"]
    loaded, made = load_index(saved.path), make()
    assert (loaded.request, loaded.counts, loaded.digest) == (made.request, made.counts, made.digest)
    assert list(loaded.columns) == list(made.columns)
    for name, column in made.columns.items():
        assert loaded.columns[name].dtype == column.dtype
        np.testing.assert_array_equal(loaded.columns[name], column)
        assert not loaded.columns[name].flags.writeable
    assert is_mapped(loaded.columns["lengths"])
    assert loaded.digest != make(seed=1).digest


def test_any_truncation_is_noticed(saved):
    whole = Path(saved.path).read_bytes()
    sizes = [*range(0, len(whole), 211), 7, 8, 63, 64, len(whole) - 1]
    for size in sizes:
        with open(saved.path, "wb") as file:
            file.write(whole[:size])
        with pytest.raises(IndexFileError):
            load_index(saved.path)
    with open(saved.path, "wb") as file:
        file.write(whole + b"\0")
    with pytest.raises(IndexFileError, match=rf"has {len(whole) + 1} bytes and should have {len(whole)}"):
        load_index(saved.path)


def test_any_changed_byte_is_noticed(saved):
    whole = bytearray(Path(saved.path).read_bytes())
    assert len(whole) > 8000
    for place in [*range(length_index.PRELUDE.size), *range(length_index.PRELUDE.size, len(whole), 37), -1]:
        changed = bytearray(whole)
        changed[place] ^= 0x10
        with open(saved.path, "wb") as file:
            file.write(changed)
        with pytest.raises(IndexFileError):
            load_index(saved.path)


def test_other_versions_and_other_files_are_refused(saved, monkeypatch):
    whole = Path(saved.path).read_bytes()
    with open(saved.path, "wb") as file:
        file.write(whole[:7] + bytes([length_index.VERSION + 1]) + whole[8:])
    with pytest.raises(IndexFileError, match="has version 2, this program reads 1"):
        load_index(saved.path)
    with open(saved.path, "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + whole[9:])
    with pytest.raises(IndexFileError, match="is not a length index"):
        load_index(saved.path)


def test_saving_replaces_another_index_and_keeps_an_equal_one(saved):
    inode = os.stat(saved.path).st_ino
    make().save(saved.path)
    assert os.stat(saved.path).st_ino == inode, "others may have mapped it"
    before = saved.columns["lengths"].copy()
    make(seed=1).save(saved.path)
    assert load_index(saved.path).digest == make(seed=1).digest
    np.testing.assert_array_equal(saved.columns["lengths"], before, "who has mapped the old one keeps it")


def test_a_full_disk_leaves_the_old_index_and_nothing_else(saved):
    """RLIMIT_FSIZE makes the system refuse to write on, in the middle of the columns."""
    before = Path(saved.path).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            make(seed=1).save(saved.path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(os.path.dirname(saved.path)) == ["a.lengths"]
    assert Path(saved.path).read_bytes() == before


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_last_step_leaves_nothing(tmp_path, monkeypatch, step):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        make().save(str(tmp_path / "a.lengths"))
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
sys.path[:0] = [sys.argv[2]]
from tests.unit.data.test_length_index import make
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
make(num_documents=100_000).save(sys.argv[1])
"""


def test_a_writer_that_is_killed_does_no_harm_and_is_cleaned_up_after(tmp_path):
    path = str(tmp_path / "a.lengths")
    ended = subprocess.run([sys.executable, "-c", KILLED, path, os.getcwd()], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.endswith(".tmp")
    with pytest.raises(FileNotFoundError):
        load_index(path)
    make().save(path)
    assert sorted(os.listdir(tmp_path)) == sorted(["a.lengths", left]), "its writer may still be at work"
    an_hour_ago = time.time() - length_index.FORGOTTEN_AFTER_S - 1
    os.utime(tmp_path / left, (an_hour_ago, an_hour_ago))
    make(seed=1).save(path)
    assert os.listdir(tmp_path) == ["a.lengths"]
