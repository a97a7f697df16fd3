"""Each kernel on the device against float64, and what a run asks of it: no waiting, memory linear in tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from dynamic_cp.types import CAUSAL, FULL, CausalBlockwise, Lambda, Mask, SharedQuestion
from megatron.dynamic_cp.attention.kernels import cudnn as kernels_cudnn
from megatron.dynamic_cp.attention.kernels import flash as kernels_flash
from megatron.dynamic_cp.attention.kernels import ranged as kernels_ranged
from megatron.dynamic_cp.attention.kernels.choice import (
    CUDNN,
    FLASH,
    KERNELS,
    PORTABLE,
    TOLERANCE,
    TRITON,
    Kernel,
    check_kernel,
    choose_kernel,
    kernel_of,
)
from megatron.dynamic_cp.attention.packs import Pack
from tests.distributed import emulated_lanes, naive_attention
from tests.distributed import ranged as judge_of_ranges
from tests.gpu.judge import DEVICE, LSE_TOLERANCE, assert_close, exact, random_inputs

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SEQLENS = {
    "one_of_one_token": (2,), "shortest": (2, 2, 4), "beside_a_block": (126, 128, 130, 256),
    "long_and_short": (4096, 2, 512), "many": tuple(2 * (1 + 37 * i % 150) for i in range(64)),
}  # fmt: skip
FEW_TOKENS = 4
HEADS = {"gqa_64": (4, 2, 64), "mha_128": (8, 8, 128), "one_kv_head_128": (4, 1, 128), "wide_256": (2, 2, 256)}


def skip_unless_usable(kernel: str, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Return the kernel, or skip with what it lacks here."""
    module = {"flash": kernels_flash, "cudnn": kernels_cudnn, "triton": kernels_ranged}.get(kernel)
    obstacle = None if module is None else module.why_not(DEVICE, dtype, head_dim)
    if obstacle is not None:
        pytest.skip(f"{kernel} {obstacle}")
    return KERNELS[kernel]


def check(
    used: Kernel, inputs: list[Tensor], pack: Pack, expected: list[Tensor], expected_lse: Tensor, at_least: float = 0.0
) -> None:
    """Assert what the kernel makes of a pack: output, log-sum-exp and gradients; `at_least`: of `assert_close`."""
    q, k, v, grad = inputs
    scale = q.shape[-1] ** -0.5
    out, lse = used.forward(q, k, v, pack, scale)
    assert (lse.dtype, lse.shape) == (torch.float32, expected_lse.shape)
    assert (lse.double() - expected_lse).abs().max() <= LSE_TOLERANCE
    assert_close([out, *used.backward(grad, q, k, v, out, lse, pack, scale)], expected, q.dtype, at_least=at_least)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("step", ["causal", "half_the_keys", "half_the_queries"])
@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_pack_equals_float64(kernel: str, step: str, seqlens: str, heads: str) -> None:
    num_heads, kv_heads, head_dim = HEADS[heads]
    used = skip_unless_usable(kernel, BF16, head_dim)
    whole = SEQLENS[seqlens]
    half = tuple(seqlen // 2 for seqlen in whole)
    rows, columns = {"causal": (whole, whole), "half_the_keys": (whole, half), "half_the_queries": (half, whole)}[step]
    pack = Pack.build(rows, columns, mask=CAUSAL if step == "causal" else FULL, device=DEVICE)
    inputs = random_inputs(sum(rows), sum(columns), num_heads, kv_heads, head_dim)
    expected = exact(inputs, rows, columns, causal=pack.causal)
    check(used, inputs, pack, *expected, at_least=0.3 if max(whole) <= FEW_TOKENS else 0.0)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    "mask", [Lambda(3, 100), Lambda(0, 1), CausalBlockwise(64, 2), SharedQuestion(200, (150, 1, 300)), CAUSAL], ids=str
)
@pytest.mark.parametrize("kernel", ["triton", "portable"])
def test_ranges_of_keys_equal_float64(kernel: str, mask: Mask, heads: str) -> None:
    num_heads, kv_heads, head_dim = HEADS[heads]
    used = skip_unless_usable(kernel, BF16, head_dim)
    seqlens = (651,) if isinstance(mask, SharedQuestion) else (651, 1, 129, 256)
    ranges = np.concatenate([mask.key_ranges(seqlen) for seqlen in seqlens])
    pack = Pack.build(seqlens, device=DEVICE, key_ranges=ranges)
    inputs = random_inputs(sum(seqlens), sum(seqlens), num_heads, kv_heads, head_dim)
    seen = judge_of_ranges.sees_of(pack, sum(seqlens), sum(seqlens))
    out, lse, *grads = (one.value for one in naive_attention.exact(inputs, seen))
    check(used, inputs, pack, [out, *grads], lse, at_least=0.3 if mask == Lambda(0, 1) else 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_rectangles_of_any_ranges_equal_float64(seed: int) -> None:
    """Rows that see nothing, keys in several rectangles; float32, so that nothing hides in rounding."""
    used = skip_unless_usable("triton", torch.float32, 64)
    pack, num_rows, num_columns = judge_of_ranges.random_pack(seed, DEVICE)
    inputs = random_inputs(num_rows, num_columns, 4, 2, 64, torch.float32)
    seen = judge_of_ranges.sees_of(pack, num_rows, num_columns)
    expected = naive_attention.exact(inputs, seen)
    naive_attention.assert_all_close(judge_of_ranges.attend(inputs, [pack], used), expected, 1e-5)


def test_heads_and_log_sum_exp_in_pieces_equal_float64() -> None:
    used = skip_unless_usable("triton", torch.float32, 64)
    pack = Pack.build((300,), device=DEVICE, key_ranges=Lambda(2, 90).key_ranges(300))
    inputs = random_inputs(300, 300, 4, 2, 64, torch.float32)
    expected = naive_attention.exact(inputs, judge_of_ranges.sees_of(pack, 300, 300))
    naive_attention.assert_all_close(judge_of_ranges.attend_in_pieces(inputs, pack, used), expected, 1e-5)


def test_ranges_are_served_beside_flash_without_waiting() -> None:
    flash = skip_unless_usable("flash", BF16, 64)
    skip_unless_usable("triton", BF16, 64)
    inputs = random_inputs(1000, 1000, 8, 4, 64)

    def attend() -> list[torch.Tensor]:
        pack = Pack.build((1000,), device=DEVICE, key_ranges=Lambda(4, 90).key_ranges(1000))
        assert kernel_of(pack, flash, inputs[0]) is TRITON
        return judge_of_ranges.attend(inputs, [pack], flash)

    attend()  # compiles
    with no_waiting():
        attend()


def test_sequences_of_one_token() -> None:
    """With a longest query of 1 and grouped heads the flash kernel would take another path."""
    used = skip_unless_usable("flash", BF16, 64)
    ones = (1,) * 5
    pack = Pack.build(ones, mask=CAUSAL, device=DEVICE)
    inputs = random_inputs(5, 5, 8, 2, 64)
    # One key: the weight is 1 whatever the scores, so queries and keys have no gradient.
    check(used, inputs, pack, *exact(inputs, ones, ones, causal=True), at_least=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_portable_equals_float64(dtype: torch.dtype) -> None:
    seqlens = (2, 130, 1100)
    inputs = random_inputs(sum(seqlens), sum(seqlens), 4, 2, 48, dtype)
    pack = Pack.build(seqlens, mask=CAUSAL, device=DEVICE)
    check(PORTABLE, inputs, pack, *exact(inputs, seqlens, seqlens, causal=True))


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "triton"])
def test_start_up_check_passes(kernel: str) -> None:
    used = skip_unless_usable(kernel, BF16, 128)
    error = check_kernel(used, DEVICE, BF16, heads=8, kv_heads=2, head_dim=128)
    assert 0 < error < TOLERANCE / 2, "the check would soon refuse a good kernel, or compares it with itself"


def test_choice_on_this_device() -> None:
    expected = FLASH if kernels_flash.why_not(DEVICE, BF16, 128) is None else None
    assert expected is not None, kernels_flash.why_not(DEVICE, BF16, 128)
    assert choose_kernel("auto", DEVICE, BF16, 128) is expected
    assert choose_kernel("auto", DEVICE, torch.float32, 128) is PORTABLE
    if kernels_cudnn.why_not(DEVICE, BF16, 128) is None:
        assert choose_kernel("fused", DEVICE, BF16, 128) is CUDNN


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make torch raise an error where the host would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("cp_size", [1, 4])
def test_host_does_not_wait_for_the_device(cp_size: int, exchange: str) -> None:
    used = skip_unless_usable("flash", BF16, 64)
    inputs = random_inputs(1336, 1336, 8, 4, 64)
    how = (inputs, (8, 304, 1024), cp_size, used, exchange)
    emulated_lanes.attend(*how)  # loads kernels
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        inputs[0].sum().item()
    emulated_lanes.attend(*how, around=no_waiting)


def test_memory_is_linear_in_tokens() -> None:
    used = skip_unless_usable("flash", BF16, 128)

    def peak_bytes(num_tokens: int) -> int:
        inputs = random_inputs(num_tokens, num_tokens, 8, 2, 128)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        emulated_lanes.attend(inputs, (num_tokens,), 1, used)
        return torch.cuda.max_memory_allocated() - before

    peak_bytes(1024)
    small, large = peak_bytes(16384), peak_bytes(65536)
    assert 3 < large / small < 4.5
    assert large < 65536**2 / 2, "something as large as the square of the sequence was made"
