"""Data that change while they are trained on: noticed by size and time of the files, whatever kind they are."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynamic_cp.errors import DataError
from megatron.trainer.data import indexed
from megatron.trainer.data.build import build_splits, index_entries
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.index_cache import HIDDEN_FOLDER
from megatron.trainer.data.indexed import IndexedDocuments
from megatron.trainer.data.stream import SampleStream
from megatron.trainer.data.tokenizer import ByteTokenizer
from tests.unit.data.helpers import config, write_files
from tests.unit.data.test_indexed import write_indexed

CHAT = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good answer"}]}\n'
CONTENTS = {
    "text": {f"{name}.txt": b"some text" for name in "abcdefghijkl"},
    "jsonl": {"a.jsonl": b'{"text": "one"}\n{"text": "three"}\n', "b.jsonl": b'{"text": "seven"}\n'},
    "chat": {"a.jsonl": CHAT, "b.jsonl": CHAT * 3},
    "prompts": {"a.jsonl": b'{"prompt": "why?", "responses": ["so", "or so"]}\n' * 3},
}
AGAIN = "the data must not change during a run; restart to index it again"


def write(folder: Path, kind: str) -> tuple[DataConfig, list[Path]]:
    """Write data an hour old; return how to train on them, and their files."""
    if kind in CONTENTS:
        options = {"sft": True, "overlong": "drop", "seq_length": 512} if kind == "chat" else {}
        data = config(write_files(folder, CONTENTS[kind]), **options)
        files = [folder / name for name in CONTENTS[kind]]
    else:
        prefix = write_indexed(folder)
        data, files = config(prefix), [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
    for path in files:
        set_age(path, 3600)
    return data, files


def set_age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def read_all(stream: SampleStream) -> list[tuple[list[int], list[float]]]:
    """Return tokens and loss masks of an epoch."""
    samples = [stream.read(sample.sample_id) for sample in stream.global_batch(0, stream.num_samples)]
    return [(one.tokens.tolist(), one.loss_mask.tolist()) for one in samples]


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("age_s", [0, 1800, 7200], ids=["now", "brought from later", "brought from before"])
def test_a_bin_or_idx_that_is_written_again_is_noticed(tmp_path, monkeypatch, number, age_s):
    monkeypatch.setattr(indexed, "LOOKED_AT_EVERY_S", 0.0)
    data, files = write(tmp_path, "bin/idx")
    stream = build_splits(data).train
    read_all(stream)
    path = files[number]
    path.write_bytes(path.read_bytes())
    set_age(path, age_s)
    with pytest.raises(DataError) as raised:
        read_all(stream)
    size_bytes = path.stat().st_size
    said = f"{path} was written again after it was indexed (it has {size_bytes} bytes as before, and another time): "
    assert str(raised.value) == said + AGAIN


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(path.read_bytes()[::-1]), Path.unlink])
@pytest.mark.parametrize("kind", CONTENTS)
def test_what_was_tokenized_does_not_change_with_its_files(tmp_path, kind, change):
    """Neither for a run under way nor for another host, which need not have them."""
    data, files = write(tmp_path, kind)
    entries = index_entries(data)
    stream = build_splits(data, entries).train
    before = read_all(stream)
    assert len(before) >= 3
    for path in files:
        change(path)
    assert read_all(stream) == read_all(build_splits(data, entries).train) == before


@pytest.mark.parametrize("kept_bytes", [64, None], ids=["cut", "zeros"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_an_index_that_is_written_under_way_is_named(tmp_path, kind, kept_bytes):
    """It is mapped: zeros would be read as lengths and places, and reading behind a new end kills the process."""
    data, _ = write(tmp_path, kind)
    stream = build_splits(data).train
    read_all(stream)
    (path,) = (tmp_path / HIDDEN_FOLDER).iterdir()
    size_bytes = path.stat().st_size
    if kept_bytes is None:
        path.write_bytes(bytes(size_bytes))
        how = f"was written again (it has {size_bytes} bytes as before, and another time)"
    else:
        os.truncate(path, kept_bytes)
        how = f"has {kept_bytes} bytes and had {size_bytes}"
    with pytest.raises(DataError) as raised:
        read_all(stream)
    said = f"{path}, the index of the data, {how} when this run began: nothing may write it during a run; "
    assert str(raised.value) == said + "restart, and the data are indexed again"
    read_all(build_splits(data).train)


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.with_suffix(".new").replace(path)])
def test_an_index_that_is_replaced_or_removed_stays_for_those_who_have_it(tmp_path, change):
    data, _ = write(tmp_path, "jsonl")
    stream = build_splits(data).train
    (path,) = (tmp_path / HIDDEN_FOLDER).iterdir()
    path.with_suffix(".new").write_bytes(b"of another job")
    change(path)
    read_all(stream)


def test_mapped_files_are_looked_at_when_opened_and_once_a_second(tmp_path, monkeypatch):
    _, (path, _) = write(tmp_path, "bin/idx")
    source = IndexedDocuments(str(path), ByteTokenizer())
    looks, now_s = [], time.monotonic() + 10
    real = indexed._signs
    monkeypatch.setattr(indexed, "_signs", lambda prefix, suffix: looks.append(suffix) or real(prefix, suffix))
    monkeypatch.setattr(indexed, "time", SimpleNamespace(monotonic=lambda: now_s))
    for _ in range(5):
        for document in (0, 1):
            source.read(document, 0, 2)
        now_s += 0.4
    assert looks == [".bin", ".idx"] * 2
    set_age(path, 0)
    source.read(0, 0, 2)
    with pytest.raises(DataError, match="was written again"):
        pickle.loads(pickle.dumps(source)).read(0, 0, 2)
    now_s += 1
    with pytest.raises(DataError, match="was written again"):
        source.read(0, 0, 2)
