"""Packs, whose rows see rectangles or ranges of keys: out, log-sum-exp and gradients by every CPU kernel."""

import numpy as np
import pytest
import torch

from dynamic_cp.types import CAUSAL, FULL, CausalBlockwise, Lambda, Mask, SharedQuestion
from megatron.dynamic_cp.attention.kernels import cpu as kernels_cpu
from megatron.dynamic_cp.attention.kernels import portable as kernels_portable
from megatron.dynamic_cp.attention.kernels.choice import CPU, PORTABLE, Kernel
from megatron.dynamic_cp.attention.kernels.ranged import tiles_of
from megatron.dynamic_cp.attention.packs import Pack
from tests.distributed.naive_attention import HEADS, KV_HEADS, SCALE, assert_all_close, assert_close, exact, random_qkv
from tests.distributed.ranged import attend, attend_in_pieces, random_pack, sees_of

BLOCK = 16
HOST = torch.device("cpu")
KERNELS = pytest.mark.parametrize("kernel", [CPU, PORTABLE], ids=lambda kernel: kernel.name)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows, and several portions of keys, in short sequences."""
    monkeypatch.setattr(kernels_cpu, "BLOCK_ROWS", BLOCK)
    monkeypatch.setattr(kernels_cpu, "MASKED_COLUMNS", 2 * BLOCK)
    monkeypatch.setattr(kernels_portable, "BLOCK_ROWS", BLOCK)
    monkeypatch.setattr(kernels_portable, "BLOCK_TOKENS", BLOCK)


@KERNELS
@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
@pytest.mark.parametrize(
    "mask",
    [Lambda(3, 5), Lambda(0, 2), Lambda(40, 30), CausalBlockwise(8, 2), SharedQuestion(20, (30, 17, 4)), CAUSAL, FULL],
    ids=str,
)
def test_masks(mask: Mask, kv_heads: int, kernel: Kernel) -> None:
    seqlens = (71,) if isinstance(mask, SharedQuestion) else (71, 1, 3 * BLOCK)
    ranges = np.concatenate([mask.key_ranges(seqlen) for seqlen in seqlens])
    pack = Pack.build(seqlens, device=HOST, key_ranges=ranges)
    inputs = random_qkv(sum(seqlens), sum(seqlens), kv_heads)
    seen = sees_of(pack, sum(seqlens), sum(seqlens))
    assert seen.sum() == sum(mask.num_pairs(seqlen) for seqlen in seqlens)
    assert_all_close(attend([x.float() for x in inputs], [pack], kernel), exact(inputs, seen))


@KERNELS
@pytest.mark.parametrize("seed", range(6))
def test_rectangles_of_any_ranges(seed: int, kernel: Kernel) -> None:
    pack, num_rows, num_columns = random_pack(seed, HOST)
    inputs = random_qkv(num_rows, num_columns)
    seen = sees_of(pack, num_rows, num_columns)
    assert (seen.sum(1) == 0).sum() >= 3, "some rows see nothing"
    assert seen.max() == 1
    assert_all_close(attend([x.float() for x in inputs], [pack], kernel), exact(inputs, seen))


@KERNELS
def test_heads_and_log_sum_exp_may_lie_in_pieces(kernel: Kernel) -> None:
    inputs = [x.float() for x in random_qkv(50, 50)]
    pack = Pack.build((20, 30), device=HOST, key_ranges=np.concatenate([Lambda(2, 9).key_ranges(n) for n in (20, 30)]))
    assert_all_close(attend_in_pieces(inputs, pack, kernel), exact(inputs, sees_of(pack, 50, 50)))


@KERNELS
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_packs_add_up_where_rows_see_nothing_of_some(order: tuple[int, ...], kernel: Kernel) -> None:
    """Three parts of the keys, one after the other; of a window most rows see one, the last rows none at all."""
    seqlen, parts = 70, (slice(0, 20), slice(20, 47), slice(47, 70))
    ranges = Lambda(0, 9).key_ranges(seqlen)
    ranges[-5:] = 0
    packs = []
    for index in order:
        part = parts[index]
        clipped = np.clip(ranges, part.start, part.stop) - part.start
        columns = np.arange(part.start, part.stop)
        packs.append(Pack.build((seqlen,), (len(columns),), device=HOST, columns=columns, key_ranges=clipped))
    inputs = random_qkv(seqlen, seqlen)
    seen = sum(sees_of(pack, seqlen, seqlen) for pack in packs)
    assert seen.max() == 1
    assert (seen.sum(1) == 0).sum() == 5
    assert all((sees_of(pack, seqlen, seqlen).sum(1) == 0).sum() > 9 for pack in packs)
    assert_all_close(attend([x.float() for x in inputs], packs, kernel), exact(inputs, seen))


@KERNELS
def test_a_key_that_one_row_meets_twice_counts_twice(kernel: Kernel) -> None:
    columns = np.array([3, 4, 5, 4, 5, 6])
    pack = Pack.build((8,), (6,), device=HOST, columns=columns, key_ranges=Lambda(2, 2).key_ranges(8).clip(max=6))
    inputs = random_qkv(8, 7)
    seen = sees_of(pack, 8, 7)
    assert seen.max() == 2
    assert_all_close(attend([x.float() for x in inputs], [pack], kernel), exact(inputs, seen))


@KERNELS
def test_bfloat16_is_as_close_as_that_of_causal_packs(kernel: Kernel) -> None:
    inputs = [x.bfloat16() for x in random_qkv(90, 90)]
    causal = Pack.build((90,), mask=CAUSAL, device=HOST)
    ranged = Pack.build((90,), device=HOST, key_ranges=CAUSAL.key_ranges(90))
    expected = exact(inputs, sees_of(ranged, 90, 90))
    for index, (_, wanted, _) in enumerate(expected):
        errors = [
            float((attend(inputs, [pack], kernel)[index].double() - wanted).norm() / wanted.norm())
            for pack in (causal, ranged)
        ]
        assert errors[0] < 0.01
        assert errors[1] <= max(1e-4, 1.5 * errors[0])


@KERNELS
def test_a_wrong_row_range_is_noticed(kernel: Kernel) -> None:
    seqlen = 60
    inputs = random_qkv(seqlen, seqlen)
    right = Lambda(2, 20).key_ranges(seqlen)
    expected = exact(inputs, sees_of(Pack.build((seqlen,), device=HOST, key_ranges=right), seqlen, seqlen))
    last = right.copy()
    last[-1, 2] += 1
    for wrong in (Lambda(2, 21).key_ranges(seqlen), Lambda(3, 20).key_ranges(seqlen), last):
        pack = Pack.build((seqlen,), device=HOST, key_ranges=wrong)
        found = attend([x.float() for x in inputs], [pack], kernel)
        for index in range(5):
            with pytest.raises(AssertionError, match="error"):
                assert_close(found[index], expected[index])


def every_residue(size: int) -> Pack:
    """Return a pack whose ranges begin, or end, at each place of a tile of `size` columns; rows of a sequence agree."""
    ranges = [row for place in range(size) for row in ((place, 3 * size, 0, 0), (0, 2 * size + place, 0, 0))]
    ranges += [row[2:] + row[:2] for row in ranges]
    return Pack.build(
        (8,) * len(ranges), (3 * size,) * len(ranges), device=HOST,
        key_ranges=np.repeat(np.array(ranges, np.int32), 8, axis=0),
    )  # fmt: skip


@pytest.mark.parametrize("num_columns", [4, 16])
@pytest.mark.parametrize("which", [*range(6), CAUSAL, FULL, "every residue"], ids=str)
def test_tiles_are_those_that_some_row_sees(which: int | Mask | str, num_columns: int) -> None:
    if isinstance(which, int):
        pack, *_ = random_pack(which, HOST)
    elif isinstance(which, str):
        pack = every_residue(num_columns)
    else:
        pack = Pack.build((5, 40, 9), (5, 40, 9) if which == CAUSAL else (1, 16, 33), mask=which, device=HOST)
    tiles = tiles_of(pack, 8, num_columns, HOST)
    assert tiles_of(pack, 8, num_columns, HOST) is tiles
    seen = np.zeros((sum(pack.row_seqlens), sum(pack.column_seqlens)), bool)
    for rows, columns in pack.slices():
        for row in range(rows.start, rows.stop):
            for begin, end in tiles.ranges[row].view(2, 2).tolist():
                seen[row, columns][begin:end] = True
    of_rows, of_columns = tiles.of_rows.tolist(), tiles.of_columns.tolist()
    for cut, seqlens, size in ((of_rows, pack.row_seqlens, 8), (of_columns, pack.column_seqlens, num_columns)):
        assert [token for first, last, _ in sorted(cut) for token in range(first, last)] == list(range(sum(seqlens)))
        assert max(last - first for first, last, _ in cut) <= size
    touched = {
        (row, column)
        for row, (first, last, of_rectangle) in enumerate(of_rows)
        for column, (begin, end, of_column) in enumerate(of_columns)
        if seen[first:last, begin:end].any() and of_rectangle == of_column
    }
    assert len(touched) > 3
    by_row, by_column = (
        [
            (tile, other, index < full_end)
            for tile, (start, full_end, end) in enumerate(zip(starts, full_ends, starts[1:], strict=False))
            for index, other in enumerate(others[start:end], start)
        ]
        for starts, full_ends, others in ([x.tolist() for x in part] for part in (tiles.columns_of, tiles.rows_of))
    )

    def full(row: int, column: int) -> bool:
        rows, columns = slice(*of_rows[row][:2]), slice(*of_columns[column][:2])
        return bool(seen[rows, columns].all()) and columns.stop - columns.start == num_columns

    assert sorted((row, column) for row, column, _ in by_row) == sorted(touched)
    assert sorted((column, row, is_full) for row, column, is_full in by_row) == sorted(by_column)
    found = {(row, column) for row, column, is_full in by_row if is_full}
    expected = {(row, column) for row, column in touched if full(row, column)}
    # A tile may be full by one range for some rows and by the other for others: then it is compared for nothing.
    assert found <= expected
    assert found == expected or isinstance(which, int)
    for starts, *_ in (tiles.columns_of, tiles.rows_of):
        assert (starts.diff().diff() <= 0).all(), "the tiles that touch the most come first"


def test_ranges_that_cross_or_leave_their_rectangle_are_a_bug() -> None:
    for row in ((0, 3, 2, 4), (0, 5, 0, 0), (-1, 3, 0, 0), (3, 1, 0, 0)):
        with pytest.raises(AssertionError, match="cross or leave"):
            Pack.build((1,), (4,), device=HOST, key_ranges=np.array([row], np.int32))


@KERNELS
@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "causal"),
    [(n, n, True) for n in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)]
    + [(1, 1, False), (BLOCK, BLOCK, False), (3, 2 * BLOCK + 1, False), (2 * BLOCK + 1, 3, False), (33, 16, False)],
)
def test_tile(num_rows: int, num_columns: int, causal: bool, kv_heads: int, kernel: Kernel) -> None:
    inputs = random_qkv(num_rows, num_columns, kv_heads)
    q, k, v, grad = (x.float() for x in inputs)
    pack = Pack.build((num_rows,), (num_columns,), mask=CAUSAL if causal else FULL, device=HOST)
    out, lse = kernel.forward(q, k, v, pack, SCALE)
    assert lse.dtype == torch.float32
    grads = kernel.backward(grad, q, k, v, out, lse, pack, SCALE)
    seen = torch.ones(num_rows, num_columns)
    assert_all_close((out, lse, *grads), exact(inputs, seen.tril() if causal else seen))


@KERNELS
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_rectangles_add_up_in_any_order(order: tuple[int, ...], kernel: Kernel) -> None:
    """Rows merge, and backward of each part of the keys uses the output and log-sum-exp over all."""
    inputs = random_qkv(20, 50)
    parts = [np.arange(*ends) for ends in ((0, 3), (3, 18), (18, 50))]
    packs = [Pack.build((20,), (len(parts[i]),), mask=FULL, columns=parts[i], device=HOST) for i in order]
    assert_all_close(attend([x.float() for x in inputs], packs, kernel), exact(inputs, torch.ones(20, 50)))
