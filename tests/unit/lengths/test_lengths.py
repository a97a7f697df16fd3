"""Lengths from every kind of file and pipe; no file, however damaged, gives anything but a DataError."""

import io
import json
import logging
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamic_cp.decide import cli, length_files
from dynamic_cp.decide.cli.parameters import KINDS
from dynamic_cp.decide.length_files import READERS, read_length_array, read_lengths
from dynamic_cp.decide.length_formats import COLUMNS, MAX_LENGTH
from dynamic_cp.errors import DataError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.lengths.megatron_index import read_megatron_index
from tests import patience

LENGTHS = [900, 12, 40, 7, 300, 64, 64, 1, 33, 250]
ARRAY = io.BytesIO()
np.save(ARRAY, np.array(LENGTHS))
CUT = ARRAY.getvalue()[:-1]
SUFFIXES = (".npy", ".txt", ".csv", ".jsonl", ".idx")


def index_bytes(documents, *, token_type=4, token_bytes=4, modes=False):
    """Return an .idx of documents that are lists of sequence lengths, written from the layout and not by our reader."""
    sizes = [size for document in documents for size in document]
    offsets = [token_bytes * sum(sizes[:number]) for number in range(len(sizes))]
    boundaries = [sum(map(len, documents[:number])) for number in range(len(documents) + 1)]
    return (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, token_type, len(sizes), len(boundaries))
        + np.array(sizes, dtype="<i4").tobytes()
        + np.array(offsets, dtype="<i8").tobytes()
        + np.array(boundaries, dtype="<i8").tobytes()
        + (b"\0" * len(sizes) if modes else b"")
    )


def test_lengths_of_every_kind_of_file(tmp_path):
    rows = "\n".join(map(str, LENGTHS))
    np.save(tmp_path / "a.npy", np.array(LENGTHS, dtype=np.uint32))
    np.save(tmp_path / "big_endian.NPY".lower(), np.array(LENGTHS, dtype=">i8"))
    (tmp_path / "a.txt").write_text(" ".join(map(str, LENGTHS)) + "\n")
    (tmp_path / "a.csv").write_text(rows)
    (tmp_path / "header.csv").write_text("tokens of a document\n" + rows)
    (tmp_path / "wide.csv").write_text("name,seqlen\n" + "\n".join(f"x,{length}" for length in LENGTHS) + "\n\n")
    (tmp_path / "mark.csv").write_bytes(b"\xef\xbb\xbfSeqLen\r\n" + rows.replace("\n", "\r\n").encode())
    (tmp_path / "a.jsonl").write_text(rows + "\n\n")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": "x", "num_tokens": n}) for n in LENGTHS))
    (tmp_path / "UPPER.TXT").write_text(rows)
    (tmp_path / "a.idx").write_bytes(index_bytes([[length] for length in LENGTHS]))
    files = sorted(tmp_path.iterdir())
    assert [list(read_lengths(path)) for path in files] == [LENGTHS] * 11
    assert {read_length_array(path).dtype for path in files} == {np.dtype(np.int64)}
    assert all(type(length) is int for length in read_lengths(files[0]))


@pytest.mark.parametrize("column", COLUMNS)
def test_known_columns(tmp_path, column):
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": 3, column: 7}))
    (tmp_path / "a.csv").write_text(f"id,{column}\n3,7\n")
    assert read_lengths(tmp_path / "a.jsonl") == read_lengths(tmp_path / "a.csv") == (7,)


@pytest.mark.parametrize("modes", [False, True])
def test_a_sample_of_an_index_is_a_document(tmp_path, caplog, modes):
    path = tmp_path / "a.idx"
    path.write_bytes(index_bytes([[3], [1, 2, 0, 1], [], [0], [50, 50]], modes=modes))
    with caplog.at_level(logging.WARNING):
        assert read_lengths(path) == (3, 4, 100)
    assert "2 of 5 documents hold no tokens, left out" in caplog.text
    assert read_length_array(path, index_unit="sequence").tolist() == [3, 1, 2, 1, 50, 50]
    index = read_megatron_index(path)
    assert index.document_tokens.tolist() == [3, 4, 0, 0, 100]
    assert index.first_sequences.tolist() == [0, 1, 5, 5, 6]
    assert index.bin_bytes == 4 * 107
    with pytest.raises(InvalidInputError, match="use 'document' or 'sequence'"):
        read_length_array(path, index_unit="token")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "holds 0 lengths"),
        ("a.txt", b"3 2.5", "entry 2 is '2.5'"),
        ("a.txt", b"3 0", "entry 2 is 0, a length is at least 1"),
        ("a.txt", b"3 2147483648", "entry 2 is '2147483648', a length is at most 2147483647"),
        ("a.npy", b"\x93NUMPY\x01\x00\x04\x00{{{\n", "is not a .npy file"),
        ("a.csv", b"a,b\n1,2\n", "none of its 2 columns"),
        ("a.csv", b"length,num_tokens\n1,2\n", "has the columns length and num_tokens: keep the one in tokens"),
        ("a.csv", b"name,seqlen\nx\n", "line 2 has 1 cells, line 1 has 2: fill or drop the row"),
        ("a.csv", b"length\n1,000\n2,000\n", "line 2 has 2 cells, line 1 has 1: .* write numbers without separators"),
        ("a.csv", b'"1,000"\n500\n', "entry 1 is '1,000'"),  # no name of a column, which would leave it out
        ("a.csv", b"1k\n500\n", "entry 1 is '1k'"),
        ("a.csv", b"length;name\n1000;x\n", "entry 1 is '1000;x'"),
        ("a.txt", "3 \u0661\u0662".encode(), "entry 2 is"),
        ("a.jsonl", b'{"length": "1_000"}', "key 'length', is '1_000'"),
        ("a.csv", b"seqlen\n", "holds 0 lengths"),
        ("a.csv", b"name,seqlen\nx,3\ny,\n", "entry 2 is '', an integer is needed"),
        ("a.jsonl", b"", "holds 0 lengths"),
        ("a.jsonl", b"3\n{", "line 2 is not JSON"),
        ("a.jsonl", b"3\n2.5", "line 2 is 2.5"),
        ("a.jsonl", b"3\ntrue", "line 2 is True"),
        ("a.jsonl", b"3\n\n0", "line 3 is 0, a length is at least 1"),
        ("a.jsonl", b'{"seqlen": 5}\n{"seqlen": -5}', "line 2, key 'seqlen', is -5, a length is at least 1"),
        ("a.jsonl", b'{"length": null}', "line 1, key 'length', is None"),
        ("a.jsonl", b'3\n{"text": "words"}', r"line 2: none of its 1 keys \('text'\) is named seqlen.*tokenized first"),
        ("a.jsonl", b'{"length": 4, "num_tokens": 1}', "line 1 has the keys length and num_tokens: keep"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b"9" * 5000, "line 1 is not JSON"),
        ("a.idx", b"nonsense!", "a Megatron index with"),  # more of them: tests/unit/data/test_indexed.py
        ("a.idx", index_bytes([[3], [4]], token_type=7), "has token type 7"),
        ("a.idx", index_bytes([[3], [4]], token_bytes=2), "do not lie one after the other"),
        ("a.idx", index_bytes([]), "holds 0 lengths"),
        ("a.idx", index_bytes([[5], [2**31 - 1, 1]]), "document 1 is 2147483648, a length is at most"),
        ("a.json", b"[1]", "give a .npy, .txt, .csv, .jsonl, .parquet, .idx file"),
        ("a", b"1", "a has no ending that says what it is: give a .npy"),
        ("a.csv", b"name,seqlen\nh\xe9,3\n", r"byte 0xe9 in line 2 is not UTF-8: save it as UTF-8 \(icon"),
        ("a.txt", b"3\n4\n\xff", "byte 0xff in line 3 is not UTF-8"),
        ("a.jsonl", b'{"seqlen": 3}\n{"\xe9": 1}\n', "byte 0xe9 in line 2 is not UTF-8"),
        ("a.csv", "seqlen\n3\n".encode("utf-16"), "it is UTF-16: save it as UTF-8"),
        ("a.txt", b"\x7fELF\x02\x01\x00\x00", "it is binary, a text of lengths is needed"),
        ("a.npy", b"", "it is empty: save whole tokens with numpy.save"),
        ("a.npy", b"PK\x03\x04nonsense", r"it is an archive \(\.npz\): save one array with numpy.save"),
        ("a.npy", b"3 4 5\n", "it does not begin as an array of NumPy: save whole tokens with numpy.save"),
        ("a.npy", ARRAY.getvalue()[:9], "it is cut off after 9 bytes: copy or save it again"),
        ("a.npy", CUT, "it is cut off after 207 bytes, its header promises 208: copy or save it again"),
        ("a.npy", ARRAY.getvalue()[:10] + b"x" * 198, "its header is damaged .*: copy or save it again"),
        ("a.parquet", b"PAR1", "is not a .parquet file of lengths"),
        ("a.jsonl", b'{"input_ids": 5}', r"line 1, key 'input_ids', is 5, a list of token ids is needed"),
        ("a.jsonl", b'{"input_ids": []}', r"line 1, key 'input_ids', is 0, a length is at least 1"),
        ("a.jsonl", b'{"input_ids": [5], "attention_mask": [1, 1]}', "1 token ids and 2 numbers of attention_mask"),
        ("a.jsonl", b'{"messages": []}', "text must be tokenized first, as `dynamic-cp lengths --tokenizer DIR` does"),
    ],
)
def test_bad_length_files(tmp_path, name, content, says):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        read_lengths(tmp_path / name)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.array([1.5]), r"is not a \.npy file.*holds float64, integers are needed: save whole tokens with \.astype"),
        (np.array([1, np.nan, 3]), "drop entry 2, which is nan"),
        (np.array(["7"]), "holds text, integers are needed"),
        (np.array([3, None], dtype=object), r"Python objects, integers are needed: save whole tokens with \.astype"),
        (np.array([[1, 2]]), r"shape is \(1, 2\), one dimension"),
        (np.array(7), r"shape is \(\), one dimension"),
        (np.array([], dtype=np.int64), "holds 0 lengths"),
        (np.array([5, -1, 0]), "entry 2 is -1"),
        (np.array([5, 2**64 - 1], dtype=np.uint64), "entry 2 is 18446744073709551615, a length is at most"),
    ],
)
def test_arrays_that_are_no_lengths(tmp_path, array, says):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=says):
        read_lengths(tmp_path / "a.npy")


@pytest.mark.parametrize("kind", SUFFIXES)
def test_missing_files_and_folders(tmp_path, kind):
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        read_lengths(tmp_path / f"no{kind}")
    with pytest.raises(DataError, match="is a folder: give a file"):
        read_lengths(tmp_path)
    (tmp_path / f"folder{kind}").mkdir()
    with pytest.raises(DataError, match=r"cannot read .*folder"):
        read_lengths(tmp_path / f"folder{kind}")


def read_or_data_error(kind, content):
    """Return whether bytes of a kind of file are lengths; anything but lengths or a DataError fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{kind}"
        path.write_bytes(content)
        try:
            lengths = read_length_array(path)
        except DataError:
            return False
    assert lengths.dtype == np.int64
    assert lengths.size
    assert lengths.min() >= 1
    assert lengths.max() <= MAX_LENGTH
    return True


TEXT_ATOMS = st.sampled_from(
    [*"0123456789-.,\"'{}[]:\n\r\t \0eE_+", "seqlen", "length", "NaN", "null", "true", "1e400", "\ufeff", "\u0663", "é"]
)
TEXTS = st.lists(TEXT_ATOMS, max_size=40).map(lambda parts: "".join(parts).encode())
JSON_LINES = st.lists(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["seqlen", "x"]), inner),
        max_leaves=5,
    ).map(json.dumps),
    max_size=5,
).map(lambda lines: "\n".join(lines).encode())


@pytest.mark.by_day(".csv")
@pytest.mark.parametrize("kind", SUFFIXES)
@settings(max_examples=60)
@given(content=st.binary(max_size=200) | TEXTS | JSON_LINES)
def test_garbage_is_a_data_error(kind, content):
    read_or_data_error(kind, content)


VALID = {".npy": ARRAY.getvalue(), ".idx": index_bytes([[3], [1, 2], [], [7]])}


@pytest.mark.by_day(".npy")
@pytest.mark.parametrize("kind", VALID)
@settings(max_examples=150)
@given(data=st.data())
def test_damaged_files_are_a_data_error_or_lengths(kind, data):
    """More kinds of damage to an index: tests/unit/data/test_indexed.py."""
    content = bytearray(VALID[kind])
    assert read_or_data_error(kind, bytes(content))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    read_or_data_error(kind, bytes(content))


def test_boundaries_whose_differences_overflow_are_damaged(tmp_path):
    # 0, 2^63 - 1, -2, 1: in int64 each difference comes out positive, 2^63 - 1, 2^63 - 1 and 3.
    content = bytearray(index_bytes([[1], [], []]))
    content[-24:-8] = struct.pack("<qq", 2**63 - 1, -2)
    (tmp_path / "a.idx").write_bytes(bytes(content))
    with pytest.raises(DataError, match="do not rise"):
        read_lengths(tmp_path / "a.idx")


ROWS = "\n".join(map(str, LENGTHS))
CONTENTS = {
    "text": ROWS.encode(),
    "one line": " ".join(map(str, LENGTHS)).encode(),
    "csv": f"seqlen\n{ROWS}\n".encode(),
    "wide csv": ("name,seqlen\n" + "\n".join(f"a,{n}" for n in LENGTHS)).encode(),
    "jsonl": "\n".join(json.dumps({"num_tokens": n}) for n in LENGTHS).encode(),
    "ids": "\n".join(json.dumps({"input_ids": [0] * n}) for n in LENGTHS).encode(),
    "npy": ARRAY.getvalue(),
}
COMMAND = [sys.executable, "-m", "dynamic_cp.decide.cli", "lengths", "--json", "-"]


def test_the_help_names_the_kinds_that_are_read() -> None:
    assert tuple(KINDS.split(", ")) == tuple(READERS)


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_pipe_is_read_by_what_it_holds(content: bytes, tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(content,))
    writer.start()
    assert list(read_lengths(fifo)) == LENGTHS
    writer.join()
    read, write = os.pipe()
    os.write(write, content)
    os.close(write)
    assert list(read_lengths(f"/dev/fd/{read}")) == LENGTHS
    os.close(read)


def test_a_pipe_that_nobody_writes_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    started_s, began_s = time.monotonic(), patience.now_s()
    with pytest.raises(DataError, match=r"nobody writes to .*pipe\.txt"):
        read_lengths(tmp_path / "pipe.txt")
    assert time.monotonic() - started_s >= length_files.FIRST_BYTE_S
    assert patience.now_s() - began_s < length_files.FIRST_BYTE_S + 5


def test_a_slow_writer_is_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)

    def write() -> None:
        with fifo.open("wb", buffering=0) as file:
            for word in ("5 ", "6"):
                time.sleep(0.4)
                file.write(word.encode())

    writer = threading.Thread(target=write)
    writer.start()
    assert read_lengths(fifo) == (5, 6)
    writer.join()


@pytest.mark.nightly
def test_stdin() -> None:
    plan = [*COMMAND[:3], "plan", "--lanes", "4", "--hardware", "cpu", "--max-tokens-per-rank", "900", "--json", "-"]
    for name in ("-", "/dev/stdin"):
        for words in ([*COMMAND, name], [*plan, "--lengths", name, "--global-batch-size", "20"]):
            done = subprocess.run(words, input=ROWS.encode(), capture_output=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)
    done = subprocess.run([*COMMAND, "-"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert b"error: stdin holds 0 lengths, at least 1 is needed" in done.stderr
    closed = ["sh", "-c", 'exec "$@" 0<&-', "sh", *COMMAND, "-"]
    done = subprocess.run(closed, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
    assert b"error: cannot read stdin: it is closed" in done.stderr


def test_several_batches_come_out_of_one_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--lengths", "-", "--global-batch-size", "8", "--batches", "3", "--lanes", "4"]
    words += ["--hardware", "cpu", "--max-tokens-per-rank", "900", "--policy", "balanced", "--json", "-"]
    read, write = os.pipe()
    os.write(write, ROWS.encode())
    os.close(write)
    with open(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert cli.main(words) == 0
    assert len(json.loads(capsys.readouterr().out)["policies"]["balanced"]["batches"]) == 3


def test_an_index_needs_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(index_bytes([[3], [4]]),))
    writer.start()
    with pytest.raises(DataError, match=r"an index of a Megatron data set cannot be read from a pipe: give its path"):
        read_lengths(tmp_path / "pipe")
    writer.join()


def test_endless_devices_are_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_files, "_MAX_BYTES", 1 << 24)
    with pytest.raises(DataError, match=r"/dev/zero is a device, and no end of it is in sight: give a file"):
        read_lengths("/dev/zero")


def test_masked_token_ids_do_not_count(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "length": 5},
        {"input_ids": [5], "labels": [5]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_lengths(tmp_path / "a.jsonl") == (3, 1)


@pytest.fixture
def parquet(tmp_path: Path) -> Any:
    arrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
    import pyarrow.parquet

    def write(**columns: Any) -> Path:
        pyarrow.parquet.write_table(arrow.table(columns), tmp_path / "a.parquet", row_group_size=3)
        return tmp_path / "a.parquet"

    return write


def test_parquet(parquet: Any) -> None:
    ids = [[7] * length for length in LENGTHS]
    assert list(read_lengths(parquet(input_ids=ids, text=["x"] * 10))) == LENGTHS
    assert list(read_lengths(parquet(num_tokens=LENGTHS, name=["x"] * 10))) == LENGTHS
    masks = [[1] * (length - 1) + [0] for length in LENGTHS if length > 1]
    found = read_length_array(parquet(input_ids=[one for one in ids if len(one) > 1], attention_mask=masks))
    assert found.tolist() == [length - 1 for length in LENGTHS if length > 1]
    assert found.dtype == np.int64


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"text": ["a", "b"]}, r"none of its 1 columns \('text'\) is named .*lengths --tokenizer DIR"),
        ({"seqlen": [3, None]}, "entry 2 is None, an integer is needed"),
        ({"seqlen": [3, 0]}, "entry 2 is 0, a length is at least 1"),
        ({"seqlen": [3.0, 4.0]}, "column seqlen holds double, integers are needed"),
        ({"input_ids": [[1], None]}, "entry 2 is None, a list of token ids is needed"),
        ({"input_ids": [3, 4]}, "column input_ids holds int64, lists of token ids are needed"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "2 token ids and 1 numbers of attention_mask"),
        ({"seqlen": [3], "length": [3]}, "has the columns seqlen and length: keep the one in tokens"),
        ({"seqlen": []}, "holds 0 lengths"),
    ],
)
def test_parquet_without_lengths(parquet: Any, columns: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_lengths(parquet(**columns))


def test_parquet_names_the_package_that_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    says = r"needs pyarrow, which is not installed: pip install .*\[parquet\]"
    with pytest.raises(UnsupportedFeatureError, match=says):
        read_lengths(tmp_path / "a.parquet")
