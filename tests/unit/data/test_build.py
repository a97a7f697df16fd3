"""From flags to streams: what is chosen, how --split shares it out, what is refused; mock documents."""

import json
import re

import numpy as np
import pytest

from dynamic_cp.errors import DataError, DynamicCPError, InvalidInputError
from megatron.trainer.data import tokenizer
from megatron.trainer.data.build import build_splits
from megatron.trainer.data.config import document_ranges, parse_split
from megatron.trainer.data.files import parse_blend
from megatron.trainer.data.mock import MockDocuments
from megatron.trainer.data.tokenizer import ByteTokenizer, NullTokenizer
from tests.unit.data.helpers import EOD, config, epoch_tokens, refusal, write_files


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


@pytest.mark.parametrize(
    ("error", "changes", "says"),
    [
        (InvalidInputError, {"split": "0,1,0"}, "--split 0,1,0 gives the training data a share of 0: raise its first"),
        (DataError, {"seq_length": 2, "overlong": "drop"},
         "0 samples .--split 1,0,0, --seq-length 2, --overlong drop."),
        (InvalidInputError, {"tokenizer": "NullTokenizer", "vocab_size": 100}, "NullTokenizer cannot read text"),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit_the_data_are_explained(corpus, error, changes, says):
    with pytest.raises(error, match=says):
        build_splits(config(corpus, **changes))


def test_a_share_too_small_for_a_document_is_none_with_a_warning(corpus, caplog):
    assert build_splits(config(corpus, split="999,0,0.1")).test is None
    assert "the test split" in caplog.text
    assert "0 documents" in caplog.text


@pytest.mark.parametrize(
    ("contents", "parts"),
    [
        ({}, ["has no file that matches **/*: give another folder or --data-glob"]),
        ({"a.txt": b"", "b.txt": b""}, ["train split", "2 documents and 0 samples", "--overlong split"]),
        (
            {"a.bin": b"\0", "a.idx": b"\0"},
            ["no documents found", "2 binary files left out", "prefix of its .bin and .idx"],
        ),
    ],
)
def test_a_folder_without_samples_is_an_error(tmp_path, contents, parts):
    write_files(tmp_path, contents)
    said = refusal(config(tmp_path))
    assert [part for part in parts if part not in said] == []


def test_overlong_error_names_the_file(corpus):
    (corpus / "100.txt").write_bytes(b"x" * 65)
    said = refusal(config(corpus, overlong="error"))
    for part in ("100.txt predicts 65 tokens", "--seq-length is 64", "--overlong split, truncate or drop"):
        assert part in said


@pytest.mark.parametrize("path", ["{}/nowhere", "{}/no*.txt", "{}/nowhere.idx", "{}/nowhere.jsonl"])
def test_a_missing_path_is_an_error(tmp_path, path):
    path = path.format(tmp_path)
    with pytest.raises(DataError, match=rf"--data-path {re.escape(path)} does not exist.*check the path"):
        build_splits(config(path))


def test_no_data_path_is_an_error():
    with pytest.raises(DataError, match="--data-path is missing or empty; give files or folders, or use --mock-data"):
        config()


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
    with pytest.raises(InvalidInputError, match=part):
        config("here", **changes)


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
        (["nan", "a", "1", "b"], "weight nan for a"),
        (["0.3", "a", "b"], "the weight 0.3 among 3 words"),
        (["0.3", "a", "b", "c"], "no weight before c"),
        (["a", "0.3", "b", "0.7"], "the weight 0.3 among 4 words"),
    ],
)
def test_bad_blends_are_explained(words, part):
    with pytest.raises(InvalidInputError, match=part):
        parse_blend(words)


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
    with pytest.raises(InvalidInputError, match=part):
        tokenizer.build(config("x", **changes))


@pytest.mark.parametrize(
    ("split", "part"),
    [
        ("0,0,0", "sums to 0"), ("1,-1,3", "below 0"), ("nan,1,1", "below 0 or without bound"),
        ("inf,1,1", "without bound"), ("1e308,1e308,1", "sums to inf"), ("90,10", "has 2 weights, not 3"),
        ("90,ten,0", "not a number"), ("", "not a number"), ("1,2,3,4", "has 4 weights, not 3"),
    ],
)  # fmt: skip
def test_bad_splits_are_explained(split, part):
    with pytest.raises(InvalidInputError) as caught:
        parse_split(split)
    for said in (part, repr(split), "969,30,1"):
        assert said in str(caught.value)


def test_same_documents_as_megatron_core():
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    compared = 0
    for split in ("969,30,1", "1,1,1", "98,2,0", "0,1,1", "7,2,1"):
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
        for num_documents in (1, 2, 7, 1000, 12345, 999_999):
            theirs = [bounds and tuple(round(bound * num_documents) for bound in bounds) for bounds in matrix]
            ours = document_ranges(parse_split(split), num_documents)
            for their, our in zip(theirs, ours, strict=True):
                assert our == their if their else our[0] == our[1]
                compared += their is not None
    assert compared == 6 * 13


LOGNORMAL = {
    **{"mode": "distribution", "type": "lognormal", "mean_seq_len": 1024, "lognormal_sigma": 1.5},
    **{"min_seq_len": 128, "max_seq_len": 8192},
}


def mock(configuration=LOGNORMAL, seed=1, seq_length=8192, tokenizer=None):
    text = configuration if configuration is None or isinstance(configuration, str) else json.dumps(configuration)
    return MockDocuments(text, seq_length, seed, tokenizer or ByteTokenizer())


def lengths_in(tmp_path, content):
    (tmp_path / "lengths.csv").write_text(content, encoding="utf-8")
    return {"mode": "file", "path": str(tmp_path / "lengths.csv")}


def test_lognormal_has_the_mean_sigma_and_bounds_asked_for():
    lengths = mock().lengths
    assert lengths.min() == 128
    assert lengths.max() == 8192
    wide = mock(LOGNORMAL | {"min_seq_len": 1, "max_seq_len": 10**9}).lengths
    assert wide.mean() == pytest.approx(1024, rel=0.05)
    assert np.log(wide[wide > 20]).std() == pytest.approx(1.5, rel=0.1)


def test_file_mode_reads_the_first_column(tmp_path):
    for content in ("5\n7\n1\n", "length\n5\n7\n1", "\ufefflength,other\n5,9\n7,9\n\n1,x\n", "5.0,a\n7,b\n1,c"):
        assert mock(lengths_in(tmp_path, content)).lengths.tolist() == [5, 7, 1]


def test_json_may_be_in_a_file(tmp_path):
    (tmp_path / "mock.json").write_text(json.dumps(LOGNORMAL))
    np.testing.assert_array_equal(mock(str(tmp_path / "mock.json")).lengths, mock().lengths)


def test_tokens_are_a_function_of_seed_and_document():
    source, same, other = mock(), mock(), mock(seed=2)
    np.testing.assert_array_equal(source.lengths, same.lengths)
    assert (source.lengths != other.lengths).any()
    length = int(min(source.lengths[3], other.lengths[3]))
    whole = source.read(3, 0, int(source.lengths[3]))
    assert len(whole) == source.lengths[3]
    np.testing.assert_array_equal(whole, same.read(3, 0, len(whole)))
    assert (whole[:100] != other.read(3, 0, length)[:100]).any()
    assert (whole[:100] != source.read(4, 0, 100)).any()
    for start, stop in ((0, 1), (5, 90), (100, len(whole)), (len(whole) - 1, len(whole))):
        np.testing.assert_array_equal(source.read(3, start, stop), whole[start:stop])


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), NullTokenizer(vocab_size=1000, eod=2)])
def test_tokens_use_the_vocabulary_and_end_with_eod(tokenizer):
    source = mock(tokenizer=tokenizer)
    whole = np.concatenate([source.read(document, 0, int(source.lengths[document])) for document in range(30)])
    assert (whole == tokenizer.eod).sum() == 30
    assert set(np.unique(whole)) <= set(range(tokenizer.vocab_size))
    assert len(np.unique(whole)) > 0.9 * tokenizer.vocab_size


def without(key):
    return {name: value for name, value in LOGNORMAL.items() if name != key}


@pytest.mark.parametrize(
    ("configuration", "part"),
    [
        ("{not json", "is not JSON"),
        ("/nowhere/mock.json", "cannot read /nowhere/mock.json"),
        ({"mode": "verification", "data_path": "x"}, "mode 'verification'"),
        (without("mode"), "mode None"),
        (LOGNORMAL | {"type": "uniform"}, "type 'uniform' is unknown"),
        (without("mean_seq_len"), "mean_seq_len is None: a number is needed"),
        (LOGNORMAL | {"lognormal_sigma": "big"}, "lognormal_sigma is 'big'"),
        (LOGNORMAL | {"mean_seq_len": 0}, "mean_seq_len 0"),
        (LOGNORMAL | {"lognormal_sigma": -1}, "lognormal_sigma -1"),
        (LOGNORMAL | {"min_seq_len": 9000}, "min_seq_len 9000 and max_seq_len 8192"),
        ({"mode": "file"}, 'needs a "path"'),
        ({"mode": "file", "path": "/nowhere.csv"}, "cannot read /nowhere.csv"),
    ],
)
def test_bad_configurations_are_explained(configuration, part):
    with pytest.raises(DynamicCPError) as caught:
        mock(configuration)
    assert part in str(caught.value)


def test_a_json_file_with_a_list_is_explained(tmp_path):
    (tmp_path / "mock.json").write_text("[1]")
    with pytest.raises(DataError, match="holds a JSON list"):
        mock(str(tmp_path / "mock.json"))


@pytest.mark.parametrize("cell", ["-3", "1.5", "nan", "inf", "five", "1_000", "\u0663"])
def test_bad_lengths_name_the_line(tmp_path, cell):
    with pytest.raises(DataError, match=f"lengths.csv line 3: '{cell}'"):
        mock(lengths_in(tmp_path, f"length\n12\n{cell}\n"))


@pytest.mark.parametrize(
    ("content", "says"),
    [("length\n1,000\n", "line 2 has 2 cells"), ('"1,000"\n5\n', "line 1: '1,000'"), (",length\n0,5\n", "line 1: ''")],
)
def test_cells_that_are_no_lengths_are_not_left_out(tmp_path, content, says):
    with pytest.raises(DataError, match=says):
        mock(lengths_in(tmp_path, content))


def test_an_empty_csv_is_no_data(tmp_path):
    flags = config(mock=True, varlen_mock_config=json.dumps(lengths_in(tmp_path, "length\n")))
    assert "no documents found" in refusal(flags)


def test_eod_closes_documents_of_one_token(tmp_path):
    flags = config(mock=True, varlen_mock_config=json.dumps(lengths_in(tmp_path, "0\n1\n2\n")))
    stream = build_splits(flags).train
    assert "3 documents (2 empty" in stream.describe()
    assert stream.read(0).labels.tolist() == [EOD]
