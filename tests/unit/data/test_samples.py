"""Documents -> samples: nothing lost, nothing twice, under every --overlong."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamic_cp.errors import DataError
from megatron.trainer.data.samples import SampleIndex
from tests.unit.data.helpers import ArrayDocuments

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


def test_pieces_are_consecutive():
    index = build([0, 8], 3)
    assert [index.read(number)[0].tolist() for number in range(index.num_samples)] == [
        [1000, 1001, 1002, 1003],
        [1003, 1004, 1005, 1006],
        [1006, 1007],
    ]


def test_a_document_of_exactly_seq_length_predictions_is_not_overlong():
    assert build([11], 10, "error").num_samples == 1
    with pytest.raises(DataError):
        build([12], 10, "error")


def test_error_names_document_tokens_limit_and_remedy():
    with pytest.raises(DataError) as caught:
        build([5, 60, 70], 10, "error")
    message = str(caught.value)
    for part in ("array document 1", "59 tokens", "--seq-length is 10", "2 such documents", "--overlong split"):
        assert part in message


def test_a_million_documents_index_in_about_a_second():
    lengths = np.random.default_rng(0).integers(0, 100_000, 1_000_000)
    start = time.process_time()
    index = build(lengths, 8192)
    assert time.process_time() - start < 2
    assert index.num_samples > 5_000_000
    assert index.num_tokens == int(np.maximum(lengths - 1, 0).sum())
