"""From flags to streams: what is chosen, and what is refused."""

from __future__ import annotations

import pytest

from dynamic_cp.errors import DataError, InvalidInputError
from megatron.trainer.data import tokenizer
from megatron.trainer.data.build import build_splits
from megatron.trainer.data.data_path import parse_blend
from tests.unit.data.helpers import config, epoch_tokens, write_files


@pytest.fixture
def corpus(tmp_path):
    return write_files(tmp_path / "corpus", {f"{i:03}.txt": b"%03d" % i for i in range(200)})


def documents(stream):
    return {bytes(tokens[:-1].tolist()) for tokens in epoch_tokens(stream)}


def test_splits_share_the_documents_in_order(corpus):
    splits = build_splits(config(corpus, split="8,1,1"))
    expected = [b"%03d" % i for i in range(200)]
    assert documents(splits.train) == set(expected[:160])
    assert documents(splits.valid) == set(expected[160:180])
    assert documents(splits.test) == set(expected[180:])


def test_a_share_of_zero_is_none(corpus):
    splits = build_splits(config(corpus, split="1,0,0"))
    assert splits.train.num_samples == 200
    assert splits.valid is None
    assert splits.test is None


def test_a_training_share_of_zero_is_an_error(corpus):
    with pytest.raises(InvalidInputError, match="--split 0,1,0 gives the training data a share of 0: raise its first"):
        build_splits(config(corpus, split="0,1,0"))


def test_a_share_too_small_for_a_document_is_none_with_a_warning(corpus, caplog):
    assert build_splits(config(corpus, split="999,0,0.1")).test is None
    assert "the test split" in caplog.text
    assert "0 documents" in caplog.text


def test_a_training_split_without_samples_is_an_error(tmp_path):
    write_files(tmp_path, {"a.txt": b"", "b.txt": b""})
    with pytest.raises(DataError) as caught:
        build_splits(config(tmp_path))
    for part in ("train split", "2 documents and 0 samples", "--overlong split"):
        assert part in str(caught.value)


def test_drop_that_leaves_nothing_is_an_error(corpus):
    with pytest.raises(DataError, match=r"0 samples \(--split 1,0,0, --seq-length 2, --overlong drop\)"):
        build_splits(config(corpus, seq_length=2, overlong="drop"))


def test_overlong_error_names_the_file(corpus):
    (corpus / "100.txt").write_bytes(b"x" * 65)
    with pytest.raises(DataError) as caught:
        build_splits(config(corpus, overlong="error"))
    for part in ("100.txt predicts 65 tokens", "--seq-length is 64", "--overlong split, truncate or drop"):
        assert part in str(caught.value)


@pytest.mark.parametrize("path", ["{}/nowhere", "{}/no*.txt", "{}/nowhere.idx", "{}/nowhere.jsonl"])
def test_a_missing_path_is_an_error(tmp_path, path):
    path = path.format(tmp_path)
    with pytest.raises(DataError) as caught:
        build_splits(config(path))
    assert f"--data-path {path} does not exist" in str(caught.value)
    assert "check the path" in str(caught.value)


def test_no_data_path_is_an_error():
    with pytest.raises(DataError, match="--data-path is missing or empty; give files or folders, or use --mock-data"):
        config()


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"has no file that matches \*\*/\*: give another folder or --data-glob"):
        build_splits(config(tmp_path))


def test_only_binary_files_are_an_error_that_counts_them(tmp_path):
    write_files(tmp_path, {"a.bin": b"\0", "a.idx": b"\0"})
    with pytest.raises(DataError) as caught:
        build_splits(config(tmp_path))
    for part in ("no documents found", "2 binary files left out", "prefix of its .bin and .idx"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"seq_length": 0}, "--seq-length is 0, at least 1"),
        ({"overlong": "wrap"}, "--overlong wrap is unknown: use one of error, truncate, drop, split"),
        ({"seed": -1}, "--seed is -1"),
        ({"mock": True}, "--mock-data and --data-path here exclude each other"),
    ],
)
def test_bad_values_are_explained(changes, part):
    with pytest.raises(InvalidInputError) as caught:
        config("here", **changes)
    assert part in str(caught.value)


def test_blend_weights_and_paths():
    assert parse_blend(["a", "b"]) == (["a", "b"], None)
    assert parse_blend(["a"]) == (["a"], None)
    assert parse_blend(["0.3", "a", "0.7", "b"]) == (["a", "b"], [pytest.approx(0.3), pytest.approx(0.7)])
    assert sum(parse_blend(["0.3", "a", "0.7", "b"])[1]) == 1  # exact, not 0.9999999999999999
    assert parse_blend(["1", "a"]) == (["a"], [1])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["0", "a", "1", "b"], "weight 0.0 for a"),
        (["-1", "a", "1", "b"], "weight -1.0 for a"),
        (["nan", "a", "1", "b"], "weight nan for a"),
        (["1", "a", "inf", "b"], "weight inf for b"),
        (["0.3", "a", "b"], "the weight 0.3 among 3 words"),
        (["0.3", "a", "b", "c"], "no weight before c"),
        (["a", "0.3", "b", "0.7"], "the weight 0.3 among 4 words"),
    ],
)
def test_bad_blends_are_explained(words, part):
    with pytest.raises(InvalidInputError) as caught:
        parse_blend(words)
    assert part in str(caught.value)


def test_a_blended_pool_without_training_samples_is_an_error(corpus, tmp_path):
    write_files(tmp_path / "empty", {"a.txt": b""})
    with pytest.raises(DataError, match=r"train split of .*empty.* has 1 documents and 0 samples"):
        build_splits(config("1", corpus, "1", tmp_path / "empty"))


def test_a_blended_pool_without_validation_samples_is_left_out(corpus, tmp_path, caplog):
    write_files(tmp_path / "few", {"a.txt": b"few", "b.txt": b"few"})
    splits = build_splits(config("1", corpus, "1", tmp_path / "few", split="9,1,0"))
    assert "the valid split" in caplog.text
    assert documents(splits.valid) == {b"%03d" % i for i in range(180, 200)}
    assert [splits.train.read(position).tokens.tobytes().count(b"f") for position in range(10)].count(1) == 5


def test_text_needs_a_tokenizer_that_reads_text(corpus):
    with pytest.raises(InvalidInputError, match="NullTokenizer cannot read text"):
        build_splits(config(corpus, tokenizer="NullTokenizer", vocab_size=100))


def test_tokenizers():
    byte = tokenizer.build(config("x"))
    assert (byte.vocab_size, byte.eod) == (257, 256)
    assert byte.encode(bytes(range(256))).tolist() == list(range(256))
    null = tokenizer.build(config("x", tokenizer="NullTokenizer", vocab_size=100))
    assert (null.vocab_size, null.eod) == (101, 100)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"tokenizer": "GPT5"}, "GPT5 is unknown: use one of ByteTokenizer, NullTokenizer"),
        ({"vocab_size": 50_000}, "ByteTokenizer has vocab size 257"),
        ({"tokenizer": "NullTokenizer"}, "--vocab-size is None"),
        ({"tokenizer": "NullTokenizer", "vocab_size": 9, "eod_id": 9}, "EOD id 9 is not below --vocab-size 9"),
    ],
)
def test_bad_tokenizers_are_explained(changes, part):
    with pytest.raises(InvalidInputError) as caught:
        tokenizer.build(config("x", **changes))
    assert part in str(caught.value)
