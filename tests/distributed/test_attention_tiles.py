"""Packs of one rectangle, by torch's CPU kernel and by the portable blocks, and the merge of rectangles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynamic_cp.types import CAUSAL, FULL
from megatron.dynamic_cp.attention.kernels import portable as kernels_portable
from megatron.dynamic_cp.attention.kernels.choice import CPU, PORTABLE, Kernel
from megatron.dynamic_cp.attention.packs import Pack
from tests.distributed.naive_attention import HEADS, KV_HEADS, SCALE, assert_all_close, assert_close, exact, random_qkv
from tests.distributed.ranged import attend

BLOCK = 16
HOST = torch.device("cpu")
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
    pack = Pack.build((num_rows,), (num_columns,), mask=CAUSAL if causal else FULL, device=HOST)
    out, lse = kernel.forward(q, k, v, pack, SCALE)
    assert lse.dtype == torch.float32
    grads = kernel.backward(grad, q, k, v, out, lse, pack, SCALE)
    seen = torch.ones(num_rows, num_columns)
    assert_all_close((out, lse, *grads), exact(inputs, seen.tril() if causal else seen))


@KERNELS
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_rectangles_add_up_in_any_order(
    order: tuple[int, ...], kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows merge, and backward of each part of the keys uses the output and log-sum-exp over all."""
    monkeypatch.setattr(kernels_portable, "BLOCK_TOKENS", BLOCK)
    inputs = random_qkv(20, 50)
    parts = [np.arange(*ends) for ends in ((0, 3), (3, 18), (18, 50))]
    packs = [Pack.build((20,), (len(parts[i]),), mask=FULL, columns=parts[i], device=HOST) for i in order]
    assert_all_close(attend([x.float() for x in inputs], packs, kernel), exact(inputs, torch.ones(20, 50)))
