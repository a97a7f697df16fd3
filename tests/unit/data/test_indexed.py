"""Megatron's .bin/.idx, written by megatron-core's own builder."""

import contextlib
import logging
import os
import pickle
import random
import re
import struct
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from dynamic_cp.errors import DataError
from dynamic_cp.lengths import megatron_index
from dynamic_cp.lengths.megatron_index import HEADER, MAGIC, read_megatron_index
from megatron.trainer.data import indexed
from megatron.trainer.data.build import build_splits
from megatron.trainer.data.indexed import IndexedDocuments
from megatron.trainer.data.tokenizer import ByteTokenizer, NullTokenizer
from tests.unit.data.helpers import EOD, config, epoch_tokens, refusal

DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6], [7]], [[]], [[8, 9]], [[10] * 50, [11] * 50]]


def write_indexed(folder, documents=DOCUMENTS, dtype=np.int32, multimodal=False):
    """Write documents (lists of sequences) and return the prefix."""
    prefix = folder / "corpus_text_document"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def flat(document):
    return [token for sequence in document for token in sequence]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("multimodal", [False, True])
def test_a_document_is_its_sequences_and_eod(tmp_path, dtype, multimodal):
    source = IndexedDocuments(str(write_indexed(tmp_path, dtype=dtype, multimodal=multimodal)), ByteTokenizer())
    assert source.lengths.tolist() == [4, 5, 1, 3, 101]
    for document, sequences in enumerate(DOCUMENTS):
        whole = [*flat(sequences), EOD]
        for start in range(0, len(whole), 1 + len(whole) // 20):
            for stop in range(start + 1, len(whole) + 1):
                tokens = source.read(document, start, stop)
                assert tokens.dtype == np.int64
                assert tokens.tolist() == whole[start:stop]


@pytest.mark.parametrize("suffix", ["", ".idx", ".bin"])
def test_prefix_and_both_files_name_the_data(tmp_path, suffix):
    prefix = write_indexed(tmp_path)
    stream = build_splits(config(f"{prefix}{suffix}")).train
    whole = [flat(document) for document in DOCUMENTS if flat(document)]
    inputs = sorted((tokens[:-1].tolist() for tokens in epoch_tokens(stream)), key=str)
    pieces = [w[i : i + 64] for w in whole for i in range(0, len(w), 64)]
    assert inputs == sorted(pieces, key=str)
    assert "5 .bin/.idx documents, EOD appended" in stream.describe()
    assert "1 empty" in stream.describe()


def test_eod_in_the_data_is_not_doubled(tmp_path, caplog):
    prefix = write_indexed(tmp_path, [[[1, 2, EOD]], [[3], [EOD]], [[]]])
    source = IndexedDocuments(str(prefix), ByteTokenizer())
    assert source.lengths.tolist() == [3, 2, 0]
    assert source.read(0, 0, 3).tolist() == [1, 2, EOD]
    assert "EOD in the data" in source.describe()
    assert not caplog.text
    assert build_splits(config(prefix)).train.num_samples == 2


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_eod_in_some_documents_warns_and_appends_to_the_others(tmp_path, caplog, dtype):
    documents = [[[1, 2, EOD]], [[3], [4]], [[]], [[5], [6, EOD]]]
    prefix = write_indexed(tmp_path, documents, dtype=dtype)
    with caplog.at_level(logging.WARNING):
        source = IndexedDocuments(str(prefix), ByteTokenizer())
    assert "2 of 3 probed documents end with the EOD id 256, so all were looked at: 2 of 4 do" in caplog.text
    assert source.lengths.tolist() == [3, 3, 1, 3]
    read = [source.read(document, 0, int(length)).tolist() for document, length in enumerate(source.lengths)]
    assert read == [[1, 2, EOD], [3, 4, EOD], [EOD], [5, 6, EOD]]
    assert "EOD appended to 2 of them (id 256)" in source.describe()


def test_probing_looks_at_first_and_last_of_many_documents(tmp_path, caplog):
    for odd in (0, 4999):
        documents = [[[1, 2, EOD]] for _ in range(5000)]
        documents[odd] = [[1, 2]]
        with caplog.at_level(logging.WARNING):
            IndexedDocuments(str(write_indexed(tmp_path, documents)), ByteTokenizer())
        assert "1023 of 1024 probed documents" in caplog.text
        assert "4999 of 5000 do" in caplog.text
        caplog.clear()


def test_megatron_vocabularies(tmp_path):
    prefix = write_indexed(tmp_path, [[[5, 50_000]]])
    appended = build_splits(config(prefix, tokenizer="NullTokenizer", vocab_size=50_001)).train.read(0)
    assert appended.labels.tolist() == [50_000, 50_001]
    present = build_splits(config(prefix, tokenizer="NullTokenizer", vocab_size=50_001, eod_id=50_000)).train.read(0)
    assert present.labels.tolist() == [50_000]


@pytest.mark.parametrize("wrong", [257, -1])
def test_an_id_outside_the_vocabulary_is_an_error_on_read(tmp_path, wrong):
    stream = build_splits(config(write_indexed(tmp_path, [[[1, 2, wrong, 3]]]))).train
    says = f"document 0.*token id {wrong}.*the vocabulary has 257.*--tokenizer-type NullTokenizer"
    with pytest.raises(DataError, match=says):
        stream.read(0)


def test_the_whole_vocabulary_is_legal(tmp_path):
    source = IndexedDocuments(str(write_indexed(tmp_path, [[[0, 9]]])), NullTokenizer(vocab_size=10, eod=9))
    assert source.read(0, 0, 2).tolist() == [0, 9]


@pytest.mark.parametrize("missing", [".bin", ".idx"])
@pytest.mark.parametrize("given", ["", ".bin", ".idx"])
def test_a_missing_file_is_named(tmp_path, missing, given):
    prefix = write_indexed(tmp_path)
    prefix.with_name(prefix.name + missing).unlink()
    assert f"{prefix}{missing} is missing" in refusal(config(f"{prefix}{given}"))


def rewrite(prefix, suffix, change):
    path = prefix.with_name(prefix.name + suffix)
    content = bytearray(path.read_bytes())
    path.write_bytes(bytes(change(content)))
    return len(content)


@pytest.mark.parametrize("kept_bytes", [0, 1, 8, 9, 17, 33, 34, 35, 60, -1, -8])
def test_a_truncated_idx_names_both_sizes(tmp_path, kept_bytes):
    prefix = write_indexed(tmp_path)
    full = rewrite(prefix, ".idx", lambda content: content[:kept_bytes])
    kept = kept_bytes % full
    message = refusal(config(prefix))
    assert f"{prefix}.idx is truncated: {kept} bytes" in message
    assert str(HEADER.size if kept < HEADER.size else full) in message
    assert "preprocess_data.py" in message


@pytest.mark.parametrize("kept_bytes", [0, 1, 4, 100, -1])
def test_a_truncated_bin_names_both_sizes(tmp_path, kept_bytes):
    prefix = write_indexed(tmp_path)
    full = rewrite(prefix, ".bin", lambda content: content[:kept_bytes])
    assert full == 4 * 109
    assert f"{prefix}.bin is truncated: {kept_bytes % full} bytes, its index says {full}" in refusal(config(prefix))


def put(fmt, offset, *values):
    def change(content):
        struct.pack_into(fmt, content, offset, *values)
        return content

    return change


NUM_SEQUENCES = 8
SIZES, OFFSETS, BOUNDARIES = 34, 34 + 4 * NUM_SEQUENCES, 34 + 12 * NUM_SEQUENCES


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (put("<9s", 0, b"NOTANIDX!"), "a Megatron index with"), (put("<Q", 9, 2), "has version 2, only 1 is known"),
        (put("<B", 17, 6), "has token type 6"), (put("<B", 17, 99), "has token type 99"),
        (put("<Q", 18, 1 << 60), "is truncated"), (put("<Q", 18, 7), "its header says"),
        (lambda content: content + b"x", "its header says"), (put("<i", SIZES, -3), "do not lie one after the other"),
        (put("<q", OFFSETS + 8, 5), "do not lie one after the other"),
        (put("<q", BOUNDARIES, 1), "do not rise from 0 to its 8 sequences"),
        (put("<q", BOUNDARIES + 8, 7), "do not rise"),
        (put("<q", BOUNDARIES + 40, 9), "do not rise"),
    ],
)  # fmt: skip
def test_a_damaged_idx_is_explained(tmp_path, change, part):
    prefix = write_indexed(tmp_path)
    rewrite(prefix, ".idx", change)
    said = refusal(config(prefix))
    assert part in said
    assert f"{prefix}.idx" in said


def damaged(content, draw):
    """Return `content` with one to three faults of a random kind: cut, grown, holes, other numbers anywhere."""
    content = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 3])):
        kind = draw.randrange(5)
        if kind == 0:
            del content[draw.randrange(len(content) + 1) :]
        elif kind == 1:
            content += draw.randbytes(draw.choice([1, 4, 8, 12, 20]))
        elif kind == 2 and len(content) > HEADER.size:
            first = draw.randrange(HEADER.size, len(content))
            del content[first : draw.randrange(first, len(content))]
        elif kind == 3 and len(content) >= HEADER.size:  # counts that fit the size, and anything behind them
            counts = draw.randrange(6), draw.randrange(6)
            struct.pack_into("<QQ", content, 18, *counts)
            content[HEADER.size :] = draw.randbytes(12 * counts[0] + 8 * counts[1])
        elif len(content) >= 8:
            fmt = draw.choice(["<B", "<I", "<Q"])
            size = struct.calcsize(fmt)
            place = draw.choice([9, 17, 18, 26, *range(len(content))]) % (len(content) - size + 1)
            struct.pack_into(fmt, content, place, draw.choice(NUMBERS) % (1 << 8 * size))
    return bytes(content)


NUMBERS = [
    *(0, 1, 2, 7, 8, 9),
    *(sign * 2**bits + more for bits in (31, 32, 40, 62, 63) for sign in (1, -1) for more in (0, -1)),
]


def test_a_damaged_idx_is_refused_or_says_what_can_be_read(tmp_path):
    draw = random.Random(0)
    prefix = write_indexed(tmp_path)
    idx, full_bytes = prefix.with_name(prefix.name + ".idx"), 4 * 109
    whole = idx.read_bytes()
    refusals, accepted = [], 0
    for _ in range(1000):
        content = damaged(whole, draw)
        idx.write_bytes(content)
        try:
            index = read_megatron_index(idx)
        except DataError as error:
            refusals.append(str(error))
            continue
        accepted += content != whole
        assert index.document_tokens.sum() == index.sequence_tokens.sum() >= 0
        assert len(index.document_tokens) == len(index.first_sequences)
        with contextlib.suppress(DataError):  # a token type of another width
            source = IndexedDocuments(str(prefix), NullTokenizer(vocab_size=1 << 62, eod=0))
            assert index.bin_bytes <= full_bytes
            for document in np.flatnonzero(index.document_tokens):
                assert len(source.read(document, 0, int(index.document_tokens[document]))) > 0
    assert len(refusals) > 800
    assert accepted > 6
    for said in refusals:
        assert said.startswith(str(idx))
        assert re.search("copy both files again or make them again|give another path", said)
        assert re.search(r"\d", said.removeprefix(str(idx)))
        assert "\n" not in said


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)])
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_what_is_no_file_is_refused(tmp_path, suffix, make):
    prefix = write_indexed(tmp_path)
    path = prefix.with_name(prefix.name + suffix)
    path.unlink()
    make(path)
    assert str(path) in refusal(config(prefix))


@pytest.mark.by_day("from the middle of the lengths on")
@pytest.mark.parametrize("zeros", ["all but the header", "from the middle of the lengths on"])
def test_a_copy_that_was_cut_short_and_filled_with_zeros_costs_no_memory(tmp_path, zeros):
    path, num_sequences = tmp_path / "sparse.idx", 20_000_000
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 4, num_sequences, num_sequences + 1))
        file.truncate(HEADER.size + 20 * num_sequences + 8)
        if zeros != "all but the header":
            file.write(np.ones(1000, dtype="<i4").tobytes())
            file.seek(HEADER.size + 20 * num_sequences)
            file.write(struct.pack("<q", num_sequences))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=f"{num_sequences} sequences"):
            read_megatron_index(path)
        assert tracemalloc.get_traced_memory()[1] < 60e6, "160 MB for either kind of number"
    finally:
        tracemalloc.stop()


def test_an_index_for_which_memory_is_too_small_says_how_much(tmp_path, monkeypatch):
    path = write_indexed(tmp_path).with_name("corpus_text_document.idx")

    def full(*_args, **_options):
        raise MemoryError

    monkeypatch.setattr(megatron_index.np, "diff", full)
    with pytest.raises(DataError, match=r"8 sequences and 6 document boundaries: reading them needs 0\.0 GB of memory"):
        read_megatron_index(path)


@pytest.mark.parametrize(
    ("documents", "says"), [([], "no documents found"), ([[[]], [[]]], "has 2 documents and 0 samples")]
)
def test_an_index_without_tokens_is_an_error(tmp_path, documents, says):
    assert says in refusal(config(write_indexed(tmp_path, documents)))


def test_a_bin_that_changed_before_it_is_opened_is_an_error(tmp_path):
    prefix = write_indexed(tmp_path)
    source = pickle.loads(pickle.dumps(IndexedDocuments(str(prefix), ByteTokenizer())))
    full = rewrite(prefix, ".bin", lambda content: content[:-4])
    with pytest.raises(DataError, match=rf"has {full - 4} bytes but had {full} when it was indexed"):
        source.read(0, 0, 2)


def set_age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_mapped_files_are_looked_at_once_a_second(tmp_path, monkeypatch):
    source, real = IndexedDocuments(str(write_indexed(tmp_path)), ByteTokenizer()), indexed._signs
    looks, now_s = [], time.monotonic() + 10
    monkeypatch.setattr(indexed, "_signs", lambda prefix, suffix: looks.append(suffix) or real(prefix, suffix))
    monkeypatch.setattr(indexed, "time", SimpleNamespace(monotonic=lambda: now_s))
    for _ in range(5):
        source.read(0, 0, 2)
        now_s += 0.4
    assert looks == [".bin", ".idx"] * 2


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("age_s", [0, 1800, 7200], ids=["now", "brought from later", "brought from before"])
def test_a_bin_or_idx_that_is_written_again_is_noticed(tmp_path, monkeypatch, suffix, age_s):
    monkeypatch.setattr(indexed, "LOOKED_AT_EVERY_S", 0.0)
    prefix = write_indexed(tmp_path)
    path = Path(f"{prefix}{suffix}")
    set_age(path, 3600)
    stream = build_splits(config(prefix)).train
    assert epoch_tokens(stream)
    path.write_bytes(path.read_bytes())
    set_age(path, age_s)
    with pytest.raises(DataError) as raised:
        epoch_tokens(stream)
    size_bytes = path.stat().st_size
    said = f"{path} was written again after it was indexed (it has {size_bytes} bytes as before, and another time): "
    assert str(raised.value) == f"{said}the data must not change during a run; restart to index it again"
