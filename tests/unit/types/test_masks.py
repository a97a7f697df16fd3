"""Masks: exact pairs, ranges of keys, text, what does not fit."""

import numpy as np
import pytest

from dynamic_cp.decide.mask_rules import masks_by_rule, parse_mask_rule
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import Sample
from dynamic_cp.types.branches import Branches, SharedQuestion, parse_mask
from dynamic_cp.types.masks import CAUSAL, FULL, CausalBlockwise, KeyRanges, Lambda, Mask, Windowed
from tests.placements import random_tree

LENGTHS = (1, 2, 3, 7, 8, 9, 31, 64, 100)


def dense(mask: Mask, seqlen: int) -> np.ndarray:
    """Return [token, key] -> whether it is seen; a pair that two ranges hold would be counted twice."""
    seen = np.zeros((seqlen, seqlen), np.int64)
    for token, ranges in enumerate(mask.key_ranges(seqlen).tolist()):
        for begin, end in zip(ranges[::2], ranges[1::2], strict=True):
            seen[token, begin:end] += 1
    return seen


def defined(mask: Mask, seqlen: int) -> np.ndarray:
    """Return the same from the definition of a mask, pair by pair."""
    seen = np.zeros((seqlen, seqlen), np.int64)
    for token in range(seqlen):
        for key in range(seqlen):
            seen[token, key] = _sees(mask, token, key, seqlen)
    return seen


def _sees(mask: Mask, token: int, key: int, seqlen: int) -> bool:
    if mask == FULL:
        return True
    if key > token:
        return False
    if isinstance(mask, Lambda):
        return key < mask.sink or key > token - mask.window
    if isinstance(mask, CausalBlockwise):
        is_last = token // mask.block_size == (seqlen - 1) // mask.block_size
        is_sink = key // mask.block_size < mask.num_sink_blocks
        return is_last or is_sink or key >= token - mask.num_local_blocks * mask.block_size
    if isinstance(mask, Branches):
        lengths, depths = mask.shape()
        of_token, of_key = (int(np.searchsorted(np.cumsum(lengths), at, "right")) for at in (token, key))
        # Behind the key's segment every one on the way to the token's is deeper.
        return all(depths[place] > depths[of_key] for place in range(of_key + 1, of_token + 1))
    assert mask == CAUSAL
    return True


@pytest.mark.parametrize(
    "mask", [CAUSAL, FULL, Lambda(0, 1), Lambda(3, 5), Lambda(64, 8), CausalBlockwise(8, 2), CausalBlockwise(4, 1, 3)]
)
@pytest.mark.parametrize("seqlen", LENGTHS)
def test_pairs_and_ranges_are_those_of_the_definition(mask: Mask, seqlen: int) -> None:
    expected = defined(mask, seqlen)
    assert (dense(mask, seqlen) == expected).all()
    assert mask.num_pairs(seqlen) == expected.sum()
    again = KeyRanges.of(mask.key_ranges(seqlen))
    assert again.num_pairs(seqlen) == expected.sum()
    assert (again.key_ranges(seqlen) == mask.key_ranges(seqlen)).all()


def test_branches_of_any_tree_see_their_way_and_themselves() -> None:
    """Two levels are a shared question; positions count along each branch, and the branches cover the tree."""
    rng, most_ranges = np.random.default_rng(1), set()
    for _ in range(60):
        tree = random_tree(rng, int(rng.integers(1, 40)))
        most_ranges.add(assert_branches_are_as_defined(tree))
        assert parse_mask(str(tree)) == tree
        if max(tree.depths) == 1:
            question, seqlen = SharedQuestion(tree.lengths[0], tree.lengths[1:]), sum(tree.lengths)
            assert (question.key_ranges(seqlen) == tree.key_ranges(seqlen)).all()
            assert question.rectangles(seqlen) == tree.rectangles(seqlen)
    assert most_ranges >= {1, 2, 3}


def assert_branches_are_as_defined(mask: Branches) -> int:
    """Return the most ranges of a token."""
    lengths, _ = mask.shape()
    seqlen = sum(lengths)
    expected = defined(mask, seqlen)
    assert (dense(mask, seqlen) == expected).all()
    assert mask.num_pairs(seqlen) == expected.sum()
    by_rectangles = np.zeros_like(expected)
    for row, num_rows, column, num_columns, causal in mask.rectangles(seqlen):
        whole = np.ones((num_rows, num_columns), np.int64)
        by_rectangles[row : row + num_rows, column : column + num_columns] += np.tril(whole) if causal else whole
    assert (by_rectangles == expected).all()
    starts, segments, positions = np.cumsum((0, *lengths)), mask.segments(), mask.positions(seqlen)
    times = np.zeros(len(lengths), np.int64)
    for path in mask.paths():
        tokens = np.concatenate([np.arange(starts[place], starts[place + 1]) for place in path])
        assert (positions[tokens] == np.arange(len(tokens))).all()
        assert (expected[tokens][:, tokens] == np.tril(np.ones((len(tokens), len(tokens))))).all()
        times[path] += 1
    assert times.tolist() == [segment.num_branches for segment in segments]
    return int((np.diff(expected, axis=1, prepend=0) == 1).sum(axis=1).max())


def any_two_ranges(seqlen: int) -> KeyRanges:
    """Tokens see their own fifths, ahead and behind, and some keys before."""
    ranges = np.zeros((seqlen, 4), np.int32)
    own = np.arange(seqlen) // 5 * 5
    ranges[:, 1], ranges[:, 2], ranges[:, 3] = own // 3, own, np.minimum(own + 5, seqlen)
    return KeyRanges.of(ranges)


@pytest.mark.parametrize("window", [Lambda(0, 1), Lambda(0, 4), Lambda(0, 17), Lambda(2, 3), Lambda(0, 500)])
def test_a_window_shows_of_a_mask_what_is_near_by_positions(window: Lambda) -> None:
    """Pair by pair: both the mask and the window of the layer allow it, also from an answer back into its prompt."""
    looked_at = cut_in_prompt = 0
    most_ranges = set()
    for seqlen in (1, 9, 31, 64):
        for mask in (
            *(Lambda(0, 6), Lambda(3, 5), CausalBlockwise(8, 1), any_two_ranges(seqlen)),
            *(SharedQuestion(seqlen // 4, (1, seqlen // 4, seqlen - 2 * (seqlen // 4) - 1)) for _ in range(seqlen > 8)),
            *(parse_mask(f"tree:2(1(2,{seqlen - 8}(1,1)),1)") for _ in range(seqlen > 8)),
        ):
            positions = mask.positions(seqlen)
            at = np.arange(seqlen) if positions is None else positions
            near = (at[:, None] - at < window.window) | (at < window.sink)
            expected = dense(mask, seqlen) * near
            seen = Windowed(mask, window)
            most_ranges.add(int((np.diff(expected, axis=1, prepend=0) == 1).sum(axis=1).max()))
            assert seen.why_unfit(seqlen) is None
            assert (dense(seen, seqlen) == expected).all(), (mask, seqlen)
            assert seen.num_pairs(seqlen) == expected.sum()
            assert (dense(seen.within(seqlen), seqlen) == expected).all()
            assert (seen.within(seqlen) == mask.within(seqlen)) == (at.max() < window.window)
            sample = Sample(sample_id=0, seqlen=seqlen, mask=mask)
            assert (dense(sample.mask_in(window), seqlen) == expected).all()
            assert sample.mask_in(CAUSAL) == mask
            looked_at += 1
            cut_in_prompt += isinstance(mask, Branches) and (expected < dense(mask, seqlen)).any()
    assert looked_at >= 20
    assert max(most_ranges) > 2 or not window.sink
    assert cut_in_prompt or window.window == 500 or window.sink


def test_causal_samples_see_in_a_layer_what_the_layer_does() -> None:
    for mask in (None, CAUSAL):
        sample = Sample(sample_id=0, seqlen=20, mask=mask)
        assert sample.mask_in(Lambda(1, 8)) == Lambda(1, 8)
        assert sample.mask_in(Lambda(1, 19)) == CAUSAL
    assert "its tokens see later ones" in str(Windowed(FULL, Lambda(0, 4)).why_unfit(20))
    assert Windowed(SharedQuestion(3, (4,)), Lambda(0, 4)).why_unfit(20) == SharedQuestion(3, (4,)).why_unfit(20)


@pytest.mark.parametrize(
    "text",
    [
        *("causal", "full", "lambda:64,4096", "lambda:0,1", "causal_blockwise:256,2,1", "shared_question:100,30,50"),
        *("tree:5", "tree:100(30(20,40),50)", "tree:1(2(3(4,5)),6(7))"),
    ],
)
def test_text_and_back(text: str) -> None:
    assert str(parse_mask(text)) == text
    assert parse_mask(text) == parse_mask(str(parse_mask(text)))
    assert len({parse_mask(text), parse_mask(text)}) == 1


def test_ranges_as_text() -> None:
    mask = KeyRanges.of(Lambda(2, 3).key_ranges(20))
    assert parse_mask(str(mask)) == mask
    assert len(str(KeyRanges.of(CAUSAL.key_ranges(4096)))) < 20000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("window:4", "mask 'window:4' is unknown: use causal, full, lambda:64,4096"),
        ("lambda:64", "mask 'lambda:64' is unknown"), ("lambda:4,0", "window is 0"), ("lambda:4,-1", "is unknown"),
        ("full:1", "mask 'full:1' is unknown"), ("shared_question:5", "is unknown"),
        ("shared_question:0,5", "prompt is 0"),
        ("shared_question:5,0", "has 1 answers, the shortest of 0 tokens"),
        ("causal_blockwise:0,2", "mask 'causal_blockwise:0,2': block_size is 0"),
        ("ranges:none", "holds no key ranges"),
        *((f"tree:{text}", f"mask 'tree:{text}' is unknown") for text in ("", "5(", "5(3,4", "5()", "05(3)", "5((3))")),
        ("tree:5,3", "segment 1 of a tree has the depth 0 behind one of 0: the first has 0, others from 1 to one more"),
        ("tree:5(0,3)", "segment 1 is 0"),
        ("tree:" + "1(" * 128 + "1" + ")" * 128, "a tree has 129 levels, at most 128 are supported: join segments"),
    ],
)  # fmt: skip
def test_unknown_masks_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        parse_mask(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "row",
    [(0, 2, 1, 3), (0, 5, 0, 0), (0, 1, 2, 9), (-1, 3, 0, 0), (0, 1, 0, 0), (2, 1, 2, 3)],
    ids=["crossing", "outside", "second outside", "before", "not itself", "backwards"],
)
def test_ranges_that_cross_or_lie_outside_are_named(row: tuple[int, int, int, int]) -> None:
    ranges = CAUSAL.key_ranges(4)
    ranges[2] = row
    with pytest.raises(InvalidInputError, match=r"token 2 of 4 has the key ranges"):
        KeyRanges.of(ranges)
    with pytest.raises(InvalidInputError, match=r"have the shape \(4,\)"):
        KeyRanges.of(ranges[2])


def test_rules_give_each_length_its_mask() -> None:
    assert parse_mask_rule("causal")(9) is None
    assert parse_mask_rule("lambda:2,3")(9) == Lambda(2, 3)
    shares = parse_mask_rule("shared_question:3x0.25")
    assert shares(41) == SharedQuestion(10, (10, 10, 11))
    assert shares(3) is None
    assert parse_mask_rule("tree:3x0.25")(41) == parse_mask("tree:10(10,10,11)")
    assert parse_mask_rule("tree:2x3x0.25")(100) == parse_mask("tree:25(9(9,9,10),9(9,9,11))")
    assert parse_mask_rule("tree:2x3x0.25")(9) is None
    for text, message in (
        ("shared_question:0x0.2", "mask 'shared_question:0x0.2': num_answers is 0"),
        ("shared_question:3x1.5", "share of 1.5"),
        ("shared_question:ax0.2", "no answers x share"),
        ("shared_question:2x3x0.2", "no answers x share"),
        ("tree:2xbx0.2", "no branches x share: use tree:2x4x0.2"),
        ("tree:2x0x0.2", "mask 'tree:2x0x0.2': num_answers is 0"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            parse_mask_rule(text)


def test_samples_that_are_too_short_for_a_rule_are_counted_and_a_rule_that_fits_none_is_refused(caplog) -> None:
    seqlens = [41, 3, 100, 2]
    masks = masks_by_rule("shared_question:3x0.25", seqlens)
    assert [mask is None for mask in masks] == [False, True, False, True]
    assert "2 of 4 samples have no mask of their own, they are too short for it (3 tokens at most)" in caplog.text
    caplog.clear()
    for text in ("causal", "full", "lambda:2,3", "causal_blockwise:4,1", "shared_question:1x0.5"):
        assert len(masks_by_rule(text, seqlens)) == 4
    assert masks_by_rule("shared_question:3x0.25", []) == []
    assert not caplog.text
    for text, message in (
        ("shared_question:1000000x0.2", "the longest has 100 tokens, 80 of them for 1000000 answers: ask for 80 answ"),
        ("shared_question:2x0.001", "a prompt of 0.001 of the 100 tokens of the longest is empty: raise the share"),
        ("tree:9x9x0.2", "the longest has 100 tokens, 80 of them for 9 x 9 branches: ask for fewer"),
    ):
        with pytest.raises(InvalidInputError, match=f"mask {text} fits no sample: {message}"):
            masks_by_rule(text, seqlens)
    assert masks_by_rule("shared_question:80x0.2", seqlens)[2] == SharedQuestion(20, (1,) * 80)
