"""One rectangle of attention, by torch's CPU kernel and by the portable blocks, and the merge of rectangles."""

from __future__ import annotations

import pytest
import torch

from megatron.dynamic_cp.attention import merge
from megatron.dynamic_cp.attention.kernels import portable as kernels_portable
from megatron.dynamic_cp.attention.kernels.choice import CPU, PORTABLE, Kernel
from tests.distributed.naive_attention import HEADS, KV_HEADS, SCALE, assert_close, naive, random_qkv
from tests.distributed.tiles import tile_backward, tile_forward

BLOCK = 16
KERNELS = pytest.mark.parametrize("kernel", [CPU, PORTABLE], ids=lambda kernel: kernel.name)


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
    *inputs, grad = random_qkv(num_rows, num_columns, kv_heads)
    inputs = [x.requires_grad_() for x in inputs]
    expected_out, expected_lse = naive(*inputs, causal)
    expected_grads = torch.autograd.grad(expected_out, inputs, grad)

    q, k, v, grad = (x.detach().float() for x in (*inputs, grad))
    out, lse = tile_forward(q, k, v, causal=causal, scale=SCALE, kernel=kernel)
    assert lse.dtype == torch.float32
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)
    grads = tile_backward(grad, q, k, v, out, lse, causal=causal, scale=SCALE, kernel=kernel)
    for actual, expected in zip(grads, expected_grads, strict=True):
        assert_close(actual, expected, 5e-6)


@KERNELS
def test_backward_of_a_part_uses_the_final_rows(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of two rectangles, given the output and log-sum-exp over both, add up to the gradients of the whole."""
    monkeypatch.setattr(kernels_portable, "BLOCK_TOKENS", BLOCK)
    *inputs, grad = random_qkv(20, 50)
    inputs = [x.requires_grad_() for x in inputs]
    out, lse = naive(*inputs, causal=False)
    expected = torch.autograd.grad(out, inputs, grad)
    q, k, v, grad, out, lse = (x.detach().float() for x in (*inputs, grad, out, lse))
    shares = [
        tile_backward(grad, q, k[part], v[part], out, lse, causal=False, scale=SCALE, kernel=kernel)
        for part in (slice(0, 18), slice(18, 50))
    ]
    assert_close(shares[0][0] + shares[1][0], expected[0], 5e-6)
    for index in (1, 2):
        assert_close(torch.cat([share[index] for share in shares]), expected[index], 5e-6)


def test_rows_merge_in_any_order() -> None:
    q, k, v, _ = random_qkv(8, 30)
    expected_out, expected_lse = naive(q, k, v, causal=False)
    parts = [slice(0, 3), slice(3, 17), slice(17, 30)]
    for order in ((0, 1, 2), (2, 0, 1)):
        sums = merge.RowSums(q.float(), CPU, SCALE)
        for index in order:
            out, lse = naive(q, k[parts[index]], v[parts[index]], causal=False)
            sums.add(None, out.float(), lse.float())
        assert_close(sums.out_THD, expected_out)
        assert_close(sums.lse_HT, expected_lse)
