"""tools/preprocess_data.py: the same files for any number of processes, whole or not at all; training reads them."""

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.trainer.data import tokenizer
from megatron.trainer.data.build import build_splits
from megatron.trainer.data.indexed import IndexedDocuments
from tests import patience
from tests.unit.data.helpers import config, epoch_tokens, write_files
from tests.unit.data.made_tokenizers import TEXTS, write_tokenizer
from tools import preprocess_data

DOCUMENTS = [*TEXTS[:4], "", "naïve ☃", "x" * 200] * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("made"))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text, "title": f"t{text[:9]}"}) + "\n\n" for text in DOCUMENTS))
    return path


def run(corpus, prefix, folder, *more):
    words = ["--input", *([corpus] if isinstance(corpus, Path) else corpus), "--output-prefix", prefix, *more]
    if folder is not None:
        words += ["--tokenizer-model", folder]
    return preprocess_data.main([*map(str, words)])


def flags(folder, prefix, **changes):
    return config(prefix, tokenizer="HuggingFaceTokenizer", tokenizer_model=str(folder), seq_length=512, **changes)


@pytest.mark.parametrize("eod", [True, False])
def test_documents_are_the_tokens_of_the_texts(folder, corpus, tmp_path, eod, capsys):
    assert run(corpus, tmp_path / "out" / "a", folder, "--workers", "1", *(["--append-eod"] if eod else [])) == 0
    prefix = tmp_path / "out" / "a_text_document"
    built = tokenizer.build(flags(folder, prefix))
    expected = [built.encode(text.encode()).tolist() for text in DOCUMENTS if text]
    stored = np.fromfile(f"{prefix}.bin", dtype=np.uint16).tolist()
    assert stored == [token for tokens in expected for token in (*tokens, *([0] if eod else []))]
    assert f"{prefix}: {len(expected)} documents, {len(stored)} tokens" in capsys.readouterr().out
    source = IndexedDocuments(str(prefix), built)
    assert ("EOD in the data" if eod else "EOD appended") in source.describe()
    samples = epoch_tokens(build_splits(flags(folder, prefix)).train)
    assert sorted(map(list, samples)) == sorted([*tokens, 0] for tokens in expected)
    assert sorted(os.listdir(tmp_path / "out")) == ["a_text_document.bin", "a_text_document.idx"]


def test_any_number_of_processes_writes_the_same_bytes(folder, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(preprocess_data, "TOKENIZED_PIECE_BYTES", 300)
    write_files(tmp_path / "more", {"b.jsonl": corpus.read_bytes(), "a.jsonl": corpus.read_bytes()})
    contents = []
    for workers in (1, 2):
        prefix = tmp_path / str(workers) / "a"
        keys = ["--json-keys", "text", "title"]
        assert run([corpus, tmp_path / "more"], prefix, folder, "--workers", str(workers), *keys) == 0
        contents.append({path.name: path.read_bytes() for path in sorted(prefix.parent.iterdir())})
    assert contents[0] == contents[1]
    assert sorted(contents[0]) == [f"a_{key}_document{end}" for key in ("text", "title") for end in (".bin", ".idx")]
    assert contents[0]["a_text_document.bin"] != contents[0]["a_title_document.bin"]


def test_text_files_and_the_byte_tokenizer(tmp_path):
    data = write_files(tmp_path / "data", {"a.txt": b"one", "b.txt": b"", "c.bin": b"\0", "d.txt": b"two"})
    words = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "1"]
    assert run(data, tmp_path / "a", None, *words) == 0
    stored = np.fromfile(tmp_path / "a_text_document.bin", dtype=np.uint16).tolist()
    assert stored == [*b"one", 256, *b"two", 256]


def test_files_that_are_there_stay_without_force(folder, corpus, tmp_path, capsys):
    assert run(corpus, tmp_path / "a", folder, "--workers", "1") == 0
    before = (tmp_path / "a_text_document.bin").read_bytes()
    assert run(corpus, tmp_path / "a", folder, "--workers", "1", "--append-eod") == 2
    assert (
        "a_text_document.bin is there already: name another --output-prefix or add --force" in capsys.readouterr().err
    )
    assert (tmp_path / "a_text_document.bin").read_bytes() == before
    assert run(corpus, tmp_path / "a", folder, "--workers", "1", "--append-eod", "--force") == 0
    assert (tmp_path / "a_text_document.bin").read_bytes() != before


def test_bad_input_leaves_no_file_and_the_old_ones(folder, corpus, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(corpus, out / "a", folder, "--workers", "1") == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(corpus.read_bytes() + b'{"text": 5}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "p.idx").write_text("")
    cases = [
        ([bad], ["--force"], f"{bad} line {2 * len(DOCUMENTS) + 1}: field 'text' is a int, not a string"),
        ([corpus], ["--json-keys", "body", "--force"], "line 1: field 'body' is missing (it has 'text', 'title')"),
        ([corpus], ["--json-keys", "text", "text"], "--json-keys names a field twice"),
        ([tmp_path / "empty.jsonl"], ["--force"], "would have no documents"),
        ([tmp_path / "missing.jsonl"], [], "does not exist"),
        ([tmp_path / "p"], [], "is .bin/.idx data already"),
        ([corpus], ["--workers", "0"], "--workers is 0"),
    ]
    for inputs, more, said in cases:
        assert run(inputs, out / "a", folder, *(more if "--workers" in more else ["--workers", "1", *more])) == 2
        assert said in capsys.readouterr().err
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_disk_that_forgets_is_noticed(folder, corpus, tmp_path, capsys, monkeypatch):
    real = preprocess_data.Output.finish

    def damage(self):
        self._crc32 ^= 1
        return real(self)

    monkeypatch.setattr(preprocess_data.Output, "finish", damage)
    assert run(corpus, tmp_path / "out" / "a", folder, "--workers", "1") == 2
    assert "reads back with checksum" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == []


def leave_with(*words):
    sys.exit(run(*words, "--workers", "1"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_tool_that_is_ended_leaves_no_index_and_no_old_one_broken(folder, corpus, tmp_path, number):
    corpus.write_bytes(corpus.read_bytes() * 3000)  # more than it can do before it is ended
    out = tmp_path / "out"
    process = multiprocessing.get_context("fork").Process(target=leave_with, args=(corpus, out / "a", folder))
    process.start()
    deadline = patience.now_s() + 120
    while not out.exists() or not any(path.stat().st_size for path in out.iterdir()):
        assert process.is_alive()
        assert patience.now_s() < deadline
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join()
    code = process.exitcode
    left = [path.name for path in out.iterdir()]
    if number == signal.SIGTERM:
        assert (code, left) == (128 + number, [])
    else:
        assert left
        assert all(".tmp." in name for name in left), "nothing has the name of a data set"


def leave_when_full(*words):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    leave_with(*words)


def test_a_full_disk_is_an_error_that_leaves_nothing(folder, corpus, tmp_path, capfd):
    corpus.write_bytes(corpus.read_bytes() * 50)
    out = tmp_path / "out"
    process = multiprocessing.get_context("fork").Process(target=leave_when_full, args=(corpus, out / "a", folder))
    process.start()
    process.join()
    said = capfd.readouterr().err
    assert process.exitcode == 2, said
    assert "error: cannot write" in said
    assert str(out / "a_text_document") in said
    assert "File too large; check room and permissions" in said
    assert os.listdir(out) == []
