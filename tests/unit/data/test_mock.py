"""Mock documents."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dynamic_cp.errors import DataError, DynamicCPError
from megatron.trainer.data.build import build_splits
from megatron.trainer.data.mock import MockDocuments
from megatron.trainer.data.tokenizer import ByteTokenizer, NullTokenizer
from tests.unit.data.helpers import EOD, config, refusal

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


def test_default_has_a_heavy_tail_that_fits():
    lengths = mock(None, seq_length=4096).lengths
    assert 500 < lengths.mean() < 1500
    assert lengths.max() == 4096
    assert np.median(lengths) < lengths.mean()
    assert build_splits(config(mock=True, seq_length=1)).train.global_batch(0, 3)[0].seqlen == 1


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


def test_the_stream_of_a_mock():
    stream = build_splits(
        config(
            mock=True, seq_length=1024, split="969,30,1", overlong="truncate", varlen_mock_config=json.dumps(LOGNORMAL)
        )
    ).train
    values = stream.read(0)
    assert len(values.tokens) == stream.global_batch(0, 1)[0].seqlen <= 1024
    assert "969000 documents" in stream.describe()


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
        (LOGNORMAL | {"lognormal_sigma": -1}, "lognormal_sigma -1"),
        (LOGNORMAL | {"mean_seq_len": 0}, "mean_seq_len 0"),
        (LOGNORMAL | {"min_seq_len": 9000}, "min_seq_len 9000 and max_seq_len 8192"),
        (LOGNORMAL | {"min_seq_len": 0}, "1 <= min_seq_len"),
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
