"""The stream: order from (seed, position) alone, blends in proportion; sizes of global batches on a ramp."""

import logging
import pickle
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron.core import num_microbatches_calculator

from dynamic_cp.errors import InvalidInputError
from megatron.trainer.data.build import build_splits
from megatron.trainer.data.stream import MAX_PERIOD, Blend, shuffled, whole_shares
from megatron.trainer.flags.settings import BatchSizes
from tests.unit.data.helpers import config, epoch_tokens, write_files


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(7)
    return write_files(
        tmp_path / "corpus",
        {f"{i:03}.txt": rng.integers(1, 256, n, dtype=np.uint8).tobytes() for i, n in enumerate([0, 1, 5, 200, 64, 65])}
        | {f"more/{i:03}.txt": bytes([65 + i % 26]) * (3 * i + 2) for i in range(40)},
    )


def order(stream, first, num_samples):
    """Return (length, bytes of the input) per position."""
    return [
        (sample.seqlen, stream.read(sample.sample_id).tokens.tobytes())
        for sample in stream.global_batch(first, num_samples)
    ]


def test_token_multiset_in_is_out_under_split(corpus):
    stream = build_splits(config(corpus)).train
    labels = Counter(token for tokens in epoch_tokens(stream) for token in tokens[1:].tolist())
    expected = Counter()
    files = [path for path in corpus.rglob("*.txt") if path.stat().st_size]
    for path in files:
        expected.update([*path.read_bytes()[1:], 256])
    assert len(files) == 45
    assert labels == expected
    assert stream.num_samples > len(files)


def test_every_epoch_holds_every_sample_once_in_another_order(corpus):
    stream = build_splits(config(corpus)).train
    size = stream.num_samples
    epochs = [order(stream, epoch * size, size) for epoch in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)


def test_order_does_not_depend_on_how_positions_are_batched(corpus):
    whole = order(build_splits(config(corpus)).train, 0, 300)
    stream = build_splits(config(corpus)).train
    assert whole == [entry for first in range(0, 300, 7) for entry in order(stream, first, 7)][:300]
    backwards = [order(stream, position, 1)[0] for position in reversed(range(300))]
    assert whole == backwards[::-1]
    assert len(set(whole)) > 40


def test_pickling_leaves_the_cached_order_behind(corpus):
    stream = build_splits(config(corpus)).train
    fresh = len(pickle.dumps(stream))
    stream.global_batch(0, 10)
    assert len(pickle.dumps(stream)) == fresh


def test_seed_decides_the_order(corpus):
    first, again, other = (order(build_splits(config(corpus, seed=seed)).train, 0, 60) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_blends_repeat_each_pool_in_its_own_epochs(tmp_path):
    for name, letters in (("a", b"abc"), ("b", b"vwxyz")):
        write_files(tmp_path / name, {f"{letter}.txt": bytes([letter]) * 9 for letter in letters})
    stream = build_splits(config("0.25", tmp_path / "a", "0.75", tmp_path / "b")).train
    letters = [chr(stream.read(sample.sample_id).tokens[0]) for sample in stream.global_batch(0, 400)]
    for dataset, share in (("abc", 0.25), ("vwxyz", 0.75)):
        mine = [letter for letter in letters if letter in dataset]
        assert len(mine) == 400 * share
        size = len(dataset)
        full = [mine[start : start + size] for start in range(0, len(mine) - size + 1, size)]
        assert len(full) >= 30
        assert all(sorted(epoch) == sorted(dataset) for epoch in full)
        assert len(set(map(tuple, full))) > 3


def test_paths_without_weights_are_one_shuffled_pool(tmp_path):
    write_files(tmp_path / "a", {f"{i}.txt": b"a" * 9 for i in range(10)})
    write_files(tmp_path / "b", {f"{i}.txt": b"b" * 9 for i in range(30)})
    stream = build_splits(config(tmp_path / "a", tmp_path / "b", tmp_path / "a" / "0.txt")).train
    letters = "".join(chr(stream.read(sample.sample_id).tokens[0]) for sample in stream.global_batch(0, 41))
    assert Counter(letters) == {"a": 11, "b": 30}
    assert letters != "a" * 10 + "b" * 30 + "a"


def test_splits_and_pools_of_equal_size_have_their_own_orders(tmp_path):
    for name in "ab":
        write_files(tmp_path / name, {f"{i:03}.txt": b"%03d" % (i % 50) for i in range(100)})
    splits = build_splits(config("1", tmp_path / "a", "1", tmp_path / "b", split="1,1,0"))
    orders = [order(stream, 0, 100)[dataset::2] for stream in (splits.train, splits.valid) for dataset in (0, 1)]
    assert all(sorted(numbers) == sorted(orders[0]) for numbers in orders)
    assert len(set(map(tuple, orders))) == 4


def test_far_positions_work_with_tiny_data(tmp_path):
    write_files(tmp_path, {"only.txt": b"hello"})
    stream = build_splits(config(tmp_path)).train
    assert stream.num_samples == 1
    batch = stream.global_batch(10**9, 50)
    assert [sample.seqlen for sample in batch] == [5] * 50
    values = stream.read(10**9 + 7)
    assert bytes(values.tokens.astype(np.uint8)) == b"hello"
    assert values.labels.tolist() == [*b"ello", 256]


def test_describe_is_one_line_with_the_counts(corpus):
    (corpus / "image.txt").write_bytes(b"\x89PNG\0")
    line = build_splits(config(corpus)).train.describe()
    assert "\n" not in line
    for part in ("train: 46 documents (1 empty, ", "overlong split", "46 text files", "1 binary file left out"):
        assert part in line


@given(st.integers(0, 200), st.integers(0, 2**40))
def test_shuffled_is_a_permutation(num_samples, seed):
    assert sorted(shuffled(num_samples, (seed,)).tolist()) == list(range(num_samples))


def test_shuffled_never_changes():
    """A checkpoint of today resumes with the order of today: these numbers must not change with numpy."""
    assert shuffled(10, (1234, 0, 0, 0)).tolist() == [8, 1, 6, 2, 0, 3, 5, 7, 4, 9]


def test_shuffled_is_uniform():
    """Each sample comes to each place about equally often."""
    orders = np.array([shuffled(6, (seed,)) for seed in range(3000)])
    for place in range(6):
        seen = np.bincount(orders[:, place], minlength=6)
        assert np.abs(seen - 500).max() < 5 * np.sqrt(500)


def counts_at_prefixes(weights, num_positions):
    """Return the uses of each dataset after 1 .. num_positions positions, [num_positions, datasets]."""
    datasets, _ = Blend(weights).locate(np.arange(num_positions))
    return np.cumsum(datasets[:, None] == np.arange(len(weights)), axis=0)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=12))
@example([900, *[11] * 9])  # strides in proportion to the weights are 4 samples off here
@example([1, 1000])
def test_every_prefix_is_within_one_sample_of_its_target(weights):
    num_positions = 2 * sum(weights)
    targets = np.arange(1, num_positions + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts_at_prefixes([Fraction(w) for w in weights], num_positions) - targets).max() < 1


def test_weights_that_need_a_longer_period_are_rounded_and_logged(caplog):
    weights = [Fraction(w) for w in (1442858730, 4697570389, 8670888578)]
    with caplog.at_level(logging.INFO):
        counts = counts_at_prefixes(weights, 100_000)
    assert "rounded to 1/65536" in caplog.text
    targets = np.arange(1, 100_001)[:, None] * np.array([float(w / sum(weights)) for w in weights])
    assert np.abs(counts - targets).max() < 1 + 100_000 / MAX_PERIOD


def test_decimal_weights_are_exact(caplog):
    with caplog.at_level(logging.INFO):
        assert whole_shares([Fraction("0.3"), Fraction("0.7")]) == (3, 7)
        assert whole_shares([Fraction("30"), Fraction("70.5")]) == (20, 47)
    assert not caplog.text


def test_a_tiny_weight_is_not_lost():
    shares = whole_shares([Fraction("1e-12"), Fraction(1)])
    assert shares == (1, MAX_PERIOD - 1)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 10**9), st.integers(1, 500))
def test_draws_of_a_pool_count_up_and_positions_stand_alone(weights, first, num_positions):
    blend = Blend([Fraction(w) for w in weights])
    datasets, draws = blend.locate(np.arange(first, first + num_positions))
    for dataset in range(len(weights)):
        mine = draws[datasets == dataset]
        np.testing.assert_array_equal(mine, np.arange(len(mine)) + (mine[0] if len(mine) else 0))
        # Draws before `first` are as many as its share of that prefix, within one.
        if len(mine):
            assert abs(mine[0] - first * weights[dataset] / sum(weights)) < 1 + 1e-6
    alone = [blend.locate(np.array([position])) for position in range(first, first + min(num_positions, 20))]
    assert [(int(dataset[0]), int(draw[0])) for dataset, draw in alone] == list(
        zip(datasets[:20].tolist(), draws[:20].tolist(), strict=True)
    )


# 0.19.2 has schedules of steps in its place.
CALCULATOR = getattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator", None)
RAMPS = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.integers(1, 400))


@pytest.mark.skipif(CALCULATOR is None, reason="this release of megatron-core has no ramp to compare with")
@settings(max_examples=50)
@given(RAMPS)
def test_sizes_are_those_of_megatron_core(ramp: tuple[int, int, int, int]) -> None:
    start, increment, num_increments, ramp_samples = ramp
    full = start + num_increments * increment
    sizes = BatchSizes.of(full, [start, increment, ramp_samples])
    theirs = CALCULATOR(full, 1, 1, False, 1, start, increment, ramp_samples)
    consumed, seen = 0, []
    while consumed <= ramp_samples + 2 * full:
        theirs.update(consumed, consistency_check=True)
        seen.append(sizes.at(consumed))
        assert seen[-1] == theirs.get_current_global_batch_size()
        consumed += seen[-1]
    assert seen[0] == start
    assert seen[-1] == full
    for iterations in range(len(seen) + 1):
        assert sizes.samples_of(iterations) == sum(seen[:iterations])
        assert sizes.iterations_in(sum(seen[:iterations])) == (iterations, sum(seen[:iterations]))
        if iterations:
            one_less = sum(seen[:iterations]) - 1
            assert sizes.iterations_in(one_less) == (iterations - 1, sum(seen[: iterations - 1]))


def test_without_a_ramp_all_are_alike() -> None:
    sizes = BatchSizes.of(12, None)
    assert [sizes.at(consumed) for consumed in (0, 1, 10**12)] == [12] * 3
    assert sizes.samples_of(10**9) == 12 * 10**9
    assert sizes.iterations_in(100) == (8, 96)


@pytest.mark.parametrize(
    ("ramp", "says"),
    [
        ([4, 4], "--rampup-batch-size 4 4 has 2 numbers, 3 of at least 1 are needed"),
        ([4, 0, 10], "has 3 numbers, 3 of at least 1 are needed"),
        ([12, 4, 10], "grows from 12 by 4, which never gives --global-batch-size 12"),
        ([4, 3, 10], "grows from 4 by 3, which never gives --global-batch-size 12: change one of them"),
    ],
)
def test_ramps_that_cannot_be(ramp: list[int], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        BatchSizes.of(12, ramp)
