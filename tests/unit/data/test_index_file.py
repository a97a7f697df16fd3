"""The file of an index: what is not as it was written is noticed, and writing it leaves a whole one or none."""

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dynamic_cp.errors import DataError
from megatron.trainer.data import index_file
from megatron.trainer.data.files import list_files
from megatron.trainer.data.index_file import DataIndex, IndexFileError, IndexWriter, load_index, written_whole


def made(seed: int = 0, num_documents: int = 1000) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "lengths": rng.integers(1, 1 << 40, num_documents),
        "names": rng.integers(0, 256, 77, dtype=np.uint8),
        "none": np.empty(0, dtype=np.int64),
    }


def save(path: str, columns: dict[str, np.ndarray]) -> DataIndex:
    """Write an index whose tokens, from 0 on, come in two parts."""
    with written_whole(path) as file:
        writer = IndexWriter(file)
        for tokens in np.split(np.arange(101, dtype=np.uint16), [60]):
            writer.append(tokens)
        writer.finish({"kind": "test"}, {"blank lines": 3}, columns)
    return load_index(path)


@pytest.fixture
def saved(tmp_path):
    return save(str(tmp_path / "folder" / "a.tokens"), made())


def is_mapped(array: np.ndarray) -> bool:
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array is not None


def test_what_is_saved_is_read_back_mapped(saved):
    assert os.listdir(os.path.dirname(saved.path)) == ["a.tokens"]
    assert (saved.request, saved.counts) == ({"kind": "test"}, {"blank lines": 3})
    assert saved.size_bytes == os.path.getsize(saved.path)
    columns = {"tokens": np.arange(101, dtype=np.uint16)} | made()
    assert list(saved.columns) == list(columns)
    for name, column in columns.items():
        assert saved.columns[name].dtype == column.dtype
        np.testing.assert_array_equal(saved.columns[name], column)
        assert not saved.columns[name].flags.writeable
        assert is_mapped(saved.columns[name])


def test_an_index_travels_as_its_file(saved):
    pickled = pickle.dumps(saved)
    assert len(pickled) < 500, "tokens may be more than memory holds"
    np.testing.assert_array_equal(pickle.loads(pickled).columns["lengths"], saved.columns["lengths"])
    save(saved.path, made(seed=1))
    with pytest.raises(DataError, match="is another one than when this run began: restart"):
        pickle.loads(pickled)


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
    first = index_file.PRELUDE.size
    behind_tokens = first + 4 * index_file.ALIGNMENT_BYTES  # 202 bytes; those are not read at a start
    for place in [*range(first), *range(behind_tokens, len(whole), 37), -1]:
        changed = bytearray(whole)
        changed[place] ^= 0x10
        with open(saved.path, "wb") as file:
            file.write(changed)
        with pytest.raises(IndexFileError):
            load_index(saved.path)


def test_other_versions_and_other_files_are_refused(saved, monkeypatch):
    whole = Path(saved.path).read_bytes()
    with open(saved.path, "wb") as file:
        file.write(whole[:7] + bytes([index_file.VERSION + 1]) + whole[8:])
    with pytest.raises(IndexFileError, match="has version 3, this program reads 2"):
        load_index(saved.path)
    with open(saved.path, "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + whole[9:])
    with pytest.raises(IndexFileError, match="is no index"):
        load_index(saved.path)


def test_saving_replaces_another_index_and_keeps_an_equal_one(saved):
    inode = os.stat(saved.path).st_ino
    assert save(saved.path, made()).digest == saved.digest
    assert os.stat(saved.path).st_ino == inode, "others may have mapped it"
    before = saved.columns["lengths"].copy()
    assert save(saved.path, made(seed=1)).digest != saved.digest
    np.testing.assert_array_equal(saved.columns["lengths"], before, "who has mapped the old one keeps it")


def test_a_full_disk_leaves_the_old_index_and_nothing_else(saved):
    """RLIMIT_FSIZE makes the system refuse to write on, in the middle of the columns."""
    before = Path(saved.path).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(saved.path, made(seed=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(os.path.dirname(saved.path)) == ["a.tokens"]
    assert Path(saved.path).read_bytes() == before


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_last_step_leaves_nothing(tmp_path, monkeypatch, step):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        save(str(tmp_path / "a.tokens"), made())
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
sys.path[:0] = [sys.argv[2]]
from tests.unit.data.test_index_file import made, save
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
save(sys.argv[1], made(num_documents=100_000))
"""


def test_a_writer_that_is_killed_does_no_harm_and_is_cleaned_up_after(tmp_path):
    path = str(tmp_path / "a.tokens")
    ended = subprocess.run([sys.executable, "-c", KILLED, path, os.getcwd()], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.endswith(".tmp")
    with pytest.raises(FileNotFoundError):
        load_index(path)
    save(path, made())
    assert sorted(os.listdir(tmp_path)) == sorted(["a.tokens", left]), "its writer may still be at work"
    an_hour_ago = time.time() - index_file.FORGOTTEN_AFTER_S - 1
    os.utime(tmp_path / left, (an_hour_ago, an_hour_ago))
    save(path, made())
    assert os.listdir(tmp_path) == ["a.tokens"]


def test_an_index_that_another_takes_the_place_of_is_put_aside_for_a_month(tmp_path):
    """A file that is removed on NFS takes its pages with it: whoever has mapped them dies."""
    path = str(tmp_path / "a.tokens")
    save(path, made())
    mapped = load_index(path)
    save(path, made(seed=1))
    assert load_index(path).digest != mapped.digest
    (aside,) = tmp_path.glob("a.tokens.*.old")
    assert os.stat(aside).st_ino == mapped.signs[0], "the very file"
    assert list_files(str(tmp_path), "**") == []
    a_month_ago = time.time() - 31 * 24 * 3600
    os.utime(aside, (a_month_ago, a_month_ago))
    save(path, made(seed=1))
    assert os.listdir(tmp_path) == ["a.tokens"]
