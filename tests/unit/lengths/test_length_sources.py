"""Lengths out of pipes, token ids, parquet files; and what a damaged file is told about itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamic_cp.decide import cli
from dynamic_cp.decide.cli.parameters import KINDS
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.errors import DataError, UnsupportedFeatureError
from dynamic_cp.lengths import read
from dynamic_cp.lengths.read import READERS, read_length_array, read_lengths
from tests import patience
from tests.unit.lengths.test_lengths import ARRAY, LENGTHS, index_bytes

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
    assert time.monotonic() - started_s >= read.FIRST_BYTE_S
    assert patience.now_s() - began_s < read.FIRST_BYTE_S + 5


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


def test_lengths_are_drawn_from_an_array_as_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(ROWS)
    arguments: dict[str, Any] = {"num_samples": 30, "seed": 3, "max_seqlen": 200, "min_seqlen": 1, "overlong": "drop"}
    drawn = draw_lengths(np.array(LENGTHS), **arguments)
    assert drawn.tolist() == draw_lengths(tmp_path / "a.txt", **arguments).tolist()


def test_an_index_needs_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(index_bytes([[3], [4]]),))
    writer.start()
    with pytest.raises(DataError, match=r"an index of a Megatron data set cannot be read from a pipe: give its path"):
        read_lengths(tmp_path / "pipe")
    writer.join()


def test_endless_devices_are_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_MAX_BYTES", 1 << 24)
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
