"""Folders, globs and single text files."""

from __future__ import annotations

import builtins
import os

import numpy as np
import pytest

from dynamic_cp.errors import DataError
from megatron.trainer.data.build import build_splits
from megatron.trainer.data.data_path import list_files
from megatron.trainer.data.index_cache import HIDDEN_FOLDER
from tests.unit.data.helpers import EOD, config, epoch_tokens, open_documents, write_files


def names(folder, pattern="**/*"):
    return [os.path.relpath(path, folder) for path in list_files(str(folder), pattern)]


@pytest.fixture
def tree(tmp_path):
    return write_files(
        tmp_path / "tree",
        dict.fromkeys(
            (
                "b.txt",
                "a.py",
                "sub/deep/c.py",
                "sub/d.txt",
                ".hidden.txt",
                ".git/config.txt",
                "sub/__pycache__/e.py",
                "site-packages/f.py",
                "sub/dist-packages/g.py",
            ),
            b"text",
        ),
    )


def test_folders_are_recursive_sorted_and_skip_what_is_not_text(tree):
    assert names(tree) == ["a.py", "b.txt", "sub/d.txt", "sub/deep/c.py"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.py", ["a.py"]),
        ("**/*.py", ["a.py", "sub/deep/c.py"]),
        ("sub/*", ["sub/d.txt"]),
        ("sub/**", ["sub/d.txt", "sub/deep/c.py"]),
        ("**/deep/?.p[xy]", ["sub/deep/c.py"]),
        (".hidden*", [".hidden.txt"]),
        ("*.md", []),
    ],
)
def test_patterns(tree, pattern, expected):
    assert names(tree, pattern) == expected


def test_documents_are_the_bytes_and_eod(tmp_path):
    write_files(tmp_path, {"a.txt": "naïve".encode(), "b.txt": b""})
    source = open_documents(tmp_path)
    assert source.lengths.tolist() == [7, 1]
    assert source.read(0, 0, 7).tolist() == [*"naïve".encode(), EOD]
    assert source.read(1, 0, 1).tolist() == [EOD]
    for start in range(7):
        for stop in range(start + 1, 8):
            np.testing.assert_array_equal(source.read(0, start, stop), source.read(0, 0, 7)[start:stop])


def test_lengths_come_from_the_file_system(tmp_path):
    path = tmp_path / "huge.txt"
    path.write_bytes(b"x" * 10_000)
    os.truncate(path, 1 << 40)  # a terabyte of nothing: reading it would never end
    source = open_documents(path)
    assert source.lengths.tolist() == [(1 << 40) + 1]


def test_indexing_reads_8_kib_of_a_file_and_planning_a_batch_none(tmp_path, monkeypatch):
    write_files(tmp_path, {f"{i}.txt": b"x" * 50_000 for i in range(5)})
    opened = []
    real_open = builtins.open

    def counting_open(path, *args, **kwargs):
        file = real_open(path, *args, **kwargs)
        if str(path).startswith(str(tmp_path)) and HIDDEN_FOLDER not in str(path):
            opened.append(file)
            real_read = file.read
            sizes = []
            file_type = type("Counting", (), {})
            wrapper = file_type()
            wrapper.read = lambda size=-1: sizes.append(size) or real_read(size)
            wrapper.sizes = sizes
            opened[-1] = wrapper
            wrapper_type = type(wrapper)
            wrapper_type.__enter__ = lambda self: self
            wrapper_type.__exit__ = lambda self, *_: file.close()
            return wrapper
        return file

    monkeypatch.setattr(builtins, "open", counting_open)
    stream = build_splits(config(tmp_path, seq_length=1000)).train
    assert [wrapper.sizes for wrapper in opened] == [[8192]] * 5

    def no_open(path, *args, **kwargs):
        raise AssertionError(f"{path} was opened")

    monkeypatch.setattr(builtins, "open", no_open)
    batch = stream.global_batch(0, stream.num_samples)
    assert sum(sample.seqlen for sample in batch) == 250_000
    with pytest.raises(AssertionError, match="was opened"):
        stream.read(0)


def test_binary_files_are_left_out_and_counted(tmp_path):
    write_files(
        tmp_path,
        {"a.txt": b"text", "b.png": b"\x89PNG\0", "c.bin8": b"x" * 8191 + b"\0", "late.txt": b"x" * 8192 + b"\0"},
    )
    stream = build_splits(config(tmp_path, seq_length=9000)).train
    assert sorted(len(tokens) for tokens in epoch_tokens(stream)) == [5, 8194]
    assert "2 text files, 2 binary files left out" in stream.describe()


def test_special_files_are_left_out_and_counted(tmp_path):
    write_files(tmp_path, {"a.txt": b"text"})
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    assert "1 text file, 1 special file left out" in build_splits(config(tmp_path)).train.describe()


@pytest.mark.parametrize("change", [b"shorter", b"longer" * 100])
def test_a_file_that_changed_is_an_error_with_both_sizes(tmp_path, change):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 100)
    stream = build_splits(config(path)).train
    path.write_bytes(change)
    for sample_id in (0, 1):
        with pytest.raises(DataError) as caught:
            stream.read(sample_id)
        message = str(caught.value)
        assert f"{len(change)} bytes" in message
        assert "had 100" in message
        assert str(path) in message


def test_a_file_that_vanished_is_an_error(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"text")
    stream = build_splits(config(path)).train
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: No such file"):
        stream.read(0)


def test_no_permission_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "sub" / "a.txt"
    write_files(tmp_path, {"sub/a.txt": b"text"})
    real_open = builtins.open

    def refusing_open(name, *args, **kwargs):
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied", str(name))
        return real_open(name, *args, **kwargs)

    with monkeypatch.context() as patch:  # root may read everything, so ask for the refusal
        patch.setattr(builtins, "open", refusing_open)
        with pytest.raises(DataError, match=r"cannot read .*a\.txt: Permission denied; check"):
            build_splits(config(tmp_path))

    real_scandir = os.scandir

    def refusing_scandir(name):
        if str(name).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(name))
        return real_scandir(name)

    monkeypatch.setattr(os, "scandir", refusing_scandir)
    with pytest.raises(DataError, match=r"cannot read .*sub: Permission denied"):
        build_splits(config(tmp_path))


def test_globs_single_files_and_unknown_suffixes_are_text(tmp_path):
    write_files(tmp_path, {"a.xyz": b"aaaa", "b.xyz": b"bbb", "c.txt": b"c", "deep/d.xyz": b"dddd"})
    assert len(epoch_tokens(build_splits(config(tmp_path / "*.xyz")).train)) == 2
    assert len(epoch_tokens(build_splits(config(tmp_path / "**" / "*.xyz")).train)) == 3
    (only,) = epoch_tokens(build_splits(config(tmp_path / "a.xyz")).train)
    assert only.tolist() == [*b"aaaa", EOD]


def test_json_among_other_files_is_text_with_a_warning(tmp_path, caplog):
    write_files(tmp_path, {"a.txt": b"aaaa", "b.jsonl": b'{"text": "b"}'})
    assert len(epoch_tokens(build_splits(config(tmp_path)).train)) == 2
    assert "1 of 2 files are JSON and are read as plain text" in caplog.text
