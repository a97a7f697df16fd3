"""--split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamic_cp.errors import InvalidInputError
from megatron.trainer.data.split import document_ranges, parse_split


def test_weights_are_normalised():
    assert parse_split("969,30,1") == pytest.approx((0.969, 0.03, 0.001))
    assert parse_split(" 8, 1.5 ,0.5") == pytest.approx((0.8, 0.15, 0.05))


@pytest.mark.parametrize(
    ("split", "part"),
    [
        ("0,0,0", "sums to 0"),
        ("1,-1,3", "below 0"),
        ("nan,1,1", "below 0 or without bound"),
        ("inf,1,1", "without bound"),
        ("1e308,1e308,1", "sums to inf"),
        ("90,10", "has 2 weights, not 3"),
        ("1,2,3,4", "has 4 weights, not 3"),
        ("90,ten,0", "not a number"),
        ("", "not a number"),
    ],
)
def test_bad_splits_are_explained(split, part):
    with pytest.raises(InvalidInputError) as caught:
        parse_split(split)
    assert part in str(caught.value)
    assert repr(split) in str(caught.value)
    assert "969,30,1" in str(caught.value)


@given(st.tuples(*[st.floats(0, 1e6)] * 3).filter(lambda weights: sum(weights) > 1e-3), st.integers(0, 100_000))
def test_ranges_are_contiguous_and_near_their_share(weights, num_documents):
    shares = parse_split(",".join(map(repr, weights)))
    ranges = document_ranges(shares, num_documents)
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ranges[-1][1] == num_documents
    for share, (first, last) in zip(shares, ranges, strict=True):
        assert abs(last - first - share * num_documents) <= 1.001
        assert share > 0 or first == last


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
