"""One rectangle of attention, by torch's CPU kernel and by the portable blocks, and the merge of rectangles."""

from __future__ import annotations

import pytest
import torch

from megatron.dynamic_cp.attention import merge
from megatron.dynamic_cp.attention.kernels import portable as kernels_portable
from megatron.dynamic_cp.attention.kernels.choice import CPU, PORTABLE, Kernel
from tests.distributed.naive_attention import (
    HEADS,
    KV_HEADS,
    SCALE,
    assert_all_close,
    assert_close,
    exact,
    naive,
    random_qkv,
)
from tests.distributed.tiles import tile_backward, tile_forward

BLOCK = 16
KERNELS = pytest.mark.parametrize("kernel", [CPU, PORTABLE], ids=lambda kernel: kernel.name)


@pytest.mark.parametrize("size", [1, 2, BLOCK, 3 * BLOCK])
def test_the_judge_lets_pass_what_processors_round_and_nothing_else(size: int) -> None:
    """With one key the gradients of queries and keys are 0, of which an AVX-512 processor leaves 7.6e-7."""
    for one in exact(random_qkv(size, size), torch.ones(size, size))[2:4]:
        largest = float(one.value.abs().max())
        assert (largest > 0) == (size > 1)
        assert_close(one.value + 1e-6, one)
        with pytest.raises(AssertionError, match="gradient of"):
            assert_close(one.value + 5e-6 * (largest or one.terms), one)


@KERNELS
@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "causal"),
    [(n, n, True) for n in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)]
    + [(1, 1, False), (BLOCK, BLOCK, False), (3, 2 * BLOCK + 1, False), (2 * BLOCK + 1, 3, False), (33, 16, False)],
)
def test_tile(
    num_rows: int, num_columns: int, causal: bool, kv_heads: int, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_portable, "BLOCK_TOKENS", BLOCK)
    inputs = random_qkv(num_rows, num_columns, kv_heads)
    q, k, v, grad = (x.float() for x in inputs)
    out, lse = tile_forward(q, k, v, causal=causal, scale=SCALE, kernel=kernel)
    assert lse.dtype == torch.float32
    grads = tile_backward(grad, q, k, v, out, lse, causal=causal, scale=SCALE, kernel=kernel)
    seen = torch.ones(num_rows, num_columns)
    assert_all_close((out, lse, *grads), exact(inputs, seen.tril() if causal else seen))


@KERNELS
def test_backward_of_a_part_uses_the_final_rows(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of two rectangles, given the output and log-sum-exp over both, add up to the gradients of the whole."""
    monkeypatch.setattr(kernels_portable, "BLOCK_TOKENS", BLOCK)
    inputs = random_qkv(20, 50)
    of_out, of_lse, *expected = exact(inputs, torch.ones(20, 50))
    q, k, v, grad, out, lse = (x.float() for x in (*inputs, of_out.value, of_lse.value))
    shares = [
        tile_backward(grad, q, k[part], v[part], out, lse, causal=False, scale=SCALE, kernel=kernel)
        for part in (slice(0, 18), slice(18, 50))
    ]
    assert_close(shares[0][0] + shares[1][0], expected[0])
    for index in (1, 2):
        assert_close(torch.cat([share[index] for share in shares]), expected[index])


def test_rows_merge_in_any_order() -> None:
    inputs = q, k, v, _ = random_qkv(8, 30)
    expected_out, expected_lse, *_ = exact(inputs, torch.ones(8, 30))
    parts = [slice(0, 3), slice(3, 17), slice(17, 30)]
    for order in ((0, 1, 2), (2, 0, 1)):
        sums = merge.RowSums(q.float(), CPU, SCALE)
        for index in order:
            out, lse = naive(q, k[parts[index]], v[parts[index]], causal=False)
            sums.add(None, out.float(), lse.float())
        assert_close(sums.out_THD, expected_out)
        assert_close(sums.lse_HT, expected_lse)
