"""Folders, globs and files of text and JSON lines; documents -> samples under every --overlong."""

import builtins
import json
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamic_cp.errors import DataError
from megatron.trainer.data.build import build_splits
from megatron.trainer.data.files import list_files
from megatron.trainer.data.stream import SampleIndex
from tests.unit.data.helpers import EOD, ArrayDocuments, config, epoch_tokens, open_documents, refusal, write_files


def names(folder, pattern="**/*"):
    return [os.path.relpath(path, folder) for path in list_files(str(folder), pattern)]


@pytest.fixture
def tree(tmp_path):
    left_out = (".hidden.txt", ".git/config.txt", *(f"{name}/e.py" for name in ("sub/__pycache__", "site-packages")))
    files = ("b.txt", "a.py", "sub/deep/c.py", "sub/d.txt", *left_out, "sub/dist-packages/g.py")
    return write_files(tmp_path / "tree", dict.fromkeys(files, b"text"))


def test_folders_are_recursive_sorted_and_skip_what_is_not_text(tree):
    assert names(tree) == ["a.py", "b.txt", "sub/d.txt", "sub/deep/c.py"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.py", ["a.py"]), ("**/*.py", ["a.py", "sub/deep/c.py"]), ("sub/*", ["sub/d.txt"]),
        ("sub/**", ["sub/d.txt", "sub/deep/c.py"]), ("**/deep/?.p[xy]", ["sub/deep/c.py"]),
        (".hidden*", [".hidden.txt"]), ("*.md", []),
    ],
)  # fmt: skip
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


def test_no_permission_is_an_error(tmp_path, monkeypatch):
    write_files(tmp_path, {"sub/a.txt": b"text"})
    for module, function, place in ((builtins, "open", "a.txt"), (os, "scandir", "sub")):
        real = getattr(module, function)

        def refuse(name, *args, real=real, place=place, **kwargs):
            if str(name).endswith(place):
                raise PermissionError(13, "Permission denied", str(name))
            return real(name, *args, **kwargs)

        with monkeypatch.context() as patch:  # root may read everything, so ask for the refusal
            patch.setattr(module, function, refuse)
            with pytest.raises(DataError, match=rf"cannot read .*{place}: Permission denied; check"):
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


def write_lines(path, lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_a_byte_order_mark_and_another_key(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"content": "first"}\n{"content": "second"}')
    tokens = epoch_tokens(build_splits(config(path, json_key="content")).train)
    assert sorted(bytes(t[:-1].astype(np.uint8)) for t in tokens) == [b"first", b"second"]


def test_a_folder_or_glob_of_jsonl_files_is_one_source(tmp_path):
    write_files(tmp_path, {"a.jsonl": b'{"text": "a"}\n{"text": "b"}\n', "sub/b.jsonl": b'{"text": "c"}\n'})
    for entry, letters in ((tmp_path, "abc"), (tmp_path / "*.jsonl", "ab")):
        tokens = epoch_tokens(build_splits(config(entry)).train)
        assert sorted(chr(t[0]) for t in tokens) == list(letters)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b'{"text": "cut', ["is not JSON", "repair or remove the line"]),
        (b'{"text": "\xff"}', ["is not JSON"]),
        (b'["text"]', ["holds a JSON list, not an object"]),
        (b'{"body": "x", "id": 3}', ["no field 'text'", "it has 'body', 'id'", "--json-key"]),
        (b"{}", ["no field 'text'", "it has none"]),
        (b'{"text": 5}', ["field 'text' is a int, not a string", "--json-key"]),
    ],
)
def test_bad_lines_name_file_and_line_number(tmp_path, line, parts):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "fine"}, b"", line, {"text": "fine"}])
    said = refusal(config(path))
    for part in (f"{path} line 3", *parts):
        assert part in said


SOME = settings(max_examples=50)
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def build(lengths, seq_length, overlong="split", first=0, last=None):
    return SampleIndex.build(
        ArrayDocuments(lengths), first, len(lengths) if last is None else last, seq_length=seq_length, overlong=overlong
    )


def predicted(index):
    """Return label -> how often, checking each sample's length on the way."""
    labels = Counter()
    seqlens = index.seqlens(np.arange(index.num_samples))
    for number in range(index.num_samples):
        tokens, _ = index.read(number)
        assert len(tokens) == seqlens[number] + 1
        assert 1 <= seqlens[number] <= index.seq_length
        labels.update(tokens[1:].tolist())
    return labels


def all_but_first(lengths, kept=lambda num_predicted: num_predicted):
    return Counter(1000 * d + i for d, n in enumerate(lengths) for i in range(1, 1 + kept(max(0, n - 1))))


KEPT = {"split": lambda n, limit: n, "truncate": min, "drop": lambda n, limit: n if n <= limit else 0}
"""How many tokens are predicted of a document that has so many."""


@pytest.mark.parametrize("overlong", KEPT)
@SOME
@given(lengths=LENGTHS, seq_length=st.integers(1, 20))
def test_every_token_that_is_kept_but_the_first_of_a_document_is_predicted_once(overlong, lengths, seq_length):
    index = build(lengths, seq_length, overlong)
    labels = predicted(index)
    assert labels == all_but_first(lengths, lambda n: KEPT[overlong](n, seq_length))
    assert overlong != "truncate" or index.num_samples == sum(n >= 2 for n in lengths)
    if overlong == "split":
        assert index.num_tokens == labels.total()
        assert index.num_empty == sum(n < 2 for n in lengths)
        assert index.num_overlong == sum(n - 1 > seq_length for n in lengths)


@SOME
@given(LENGTHS, st.integers(1, 20), st.data())
def test_ranges_of_documents_share_the_samples_out(lengths, seq_length, data):
    cut = data.draw(st.integers(0, len(lengths)))
    parts = build(lengths, seq_length, last=cut), build(lengths, seq_length, first=cut)
    assert predicted(parts[0]) + predicted(parts[1]) == all_but_first(lengths)
    assert sum(part.num_documents for part in parts) == len(lengths)
