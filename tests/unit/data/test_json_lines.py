"""JSONL files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dynamic_cp.errors import DataError
from megatron.trainer.data.build import build_splits
from tests.unit.data.helpers import EOD, config, epoch_tokens, open_documents, write_files, write_unseen

AGAIN = "the data must not change during a run; restart to index it again"
TEXTS = ["plain", "naïve ☃ 𝄞", "", "two\nlines", "x" * 500]


def write_lines(path, lines, newline=b"\n"):
    path.write_bytes(newline.join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def utf8(text):
    return text.encode()


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_documents_are_the_text_fields(tmp_path, newline):
    path = write_lines(tmp_path / "a.jsonl", [{"id": 1, "text": text} for text in TEXTS], newline)
    source = open_documents(path)
    assert source.lengths.tolist() == [len(utf8(text)) + 1 for text in TEXTS]
    for document, text in enumerate(TEXTS):
        whole = [*utf8(text), EOD]
        assert source.read(document, 0, len(whole)).tolist() == whole
        for start in range(0, len(whole), 3):
            for stop in (start + 1, len(whole)):
                assert source.read(document, start, stop).tolist() == whole[start:stop]


def test_blank_lines_are_counted_and_line_numbers_right(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [b"", {"text": "one"}, b"   ", b"\t", {"text": "two"}, b""])
    stream = build_splits(config(path)).train
    assert "2 JSON lines, 3 blank lines skipped" in stream.describe()
    source = open_documents(path)
    assert [source.document_name(document) for document in (0, 1)] == [f"{path} line 2", f"{path} line 5"]
    assert source.read(1, 0, 4).tolist() == [*b"two", EOD]


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
        (b"plain words", ["is not JSON"]),
        (b'{"text": "\xff"}', ["is not JSON"]),
        (b'["text"]', ["holds a JSON list, not an object"]),
        (b'{"body": "x", "id": 3}', ["no field 'text'", "it has 'body', 'id'", "--json-key"]),
        (b"{}", ["no field 'text'", "it has none"]),
        (b'{"text": 5}', ["field 'text' is a int, not a string", "--json-key"]),
        (b'{"text": null}', ["field 'text' is a NoneType, not a string"]),
    ],
)
def test_bad_lines_name_file_and_line_number(tmp_path, line, parts):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "fine"}, b"", line, {"text": "fine"}])
    with pytest.raises(DataError) as caught:
        build_splits(config(path))
    for part in (f"{path} line 3", *parts):
        assert part in str(caught.value)


def test_a_line_that_changed_is_an_error_with_both_lengths(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "hello"}])
    stream = build_splits(config(path)).train
    write_unseen(path, b'{"text": "hi"}')
    with pytest.raises(DataError) as caught:
        stream.read(0)
    for part in ("2 bytes of text", "had 5", "line 1", AGAIN):
        assert part in str(caught.value)


@pytest.mark.parametrize("cut", [slice(None, -3), slice(3, None)])
def test_lines_that_moved_are_no_bad_lines(tmp_path, cut):
    """Neither in a file of another size, nor where only the line itself tells."""
    path = write_lines(tmp_path / "a.jsonl", [{"text": "hello"}])
    stream, content = build_splits(config(path)).train, path.read_bytes()
    write_unseen(path, content[cut])
    with pytest.raises(DataError) as caught:
        stream.read(0)
    assert f"{path} line 1 is no longer the line that was indexed: {AGAIN}" in str(caught.value)
    path.write_bytes(content[cut])
    with pytest.raises(DataError) as caught:
        stream.read(0)
    assert f"{path} has {len(content) - 3} bytes but had {len(content)} when it was indexed: {AGAIN}" in str(
        caught.value
    )
