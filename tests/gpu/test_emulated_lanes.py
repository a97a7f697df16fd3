"""Every exchange with all lanes of a group on one device: zigzag, masks, merge and gradients with the real kernels."""

import pytest
import torch

from megatron.dynamic_cp.attention.kernels.choice import FLASH, PORTABLE
from tests.distributed import emulated_lanes
from tests.distributed.naive_attention import DIM, exact_samples
from tests.distributed.test_placed_attention import BF16_CASE, Case, attend, attended, lanes_of, values, whole_of
from tests.gpu.judge import assert_close, exact, random_inputs
from tests.gpu.test_attention_kernels import skip_unless_usable

pytestmark = pytest.mark.gpu

SEQLENS = (16, 1024, 16 * 33, 4096)


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_lanes_equal_the_whole_sequence(cp_size: int, exchange: str) -> None:
    """bfloat16, grouped heads; KV heads fewer than the lanes of an exchange of heads."""
    skip_unless_usable("flash", torch.bfloat16, 64)
    inputs = random_inputs(sum(SEQLENS), sum(SEQLENS), 8, 2, 64)
    expected, _ = exact(inputs, SEQLENS, SEQLENS, causal=True)
    actual = emulated_lanes.attend(inputs, SEQLENS, cp_size, FLASH, exchange)
    assert_close(actual, expected, torch.bfloat16)


@pytest.mark.parametrize("exchange", ["p2p", "a2a+p2p"])
def test_lanes_equal_the_whole_sequence_in_float32(exchange: str) -> None:
    seqlens = (16, 1040)
    inputs = random_inputs(sum(seqlens), sum(seqlens), 4, 2, 32, torch.float32)
    expected, _ = exact(inputs, seqlens, seqlens, causal=True)
    assert_close(emulated_lanes.attend(inputs, seqlens, 4, PORTABLE, exchange), expected, torch.float32)


@pytest.mark.parametrize(("num_lanes", "inner"), [(2, 1), (4, 1), (8, 1), (4, 2)])
def test_placed_lanes_equal_a_dense_softmax(num_lanes: int, inner: int) -> None:
    """float32, every mask, on nodes of two lanes, with buffers that are used again; or lanes that exchange heads."""
    case, lanes = Case(num_lanes, 2, 8, inner=inner), lanes_of(Case(num_lanes, 2, 8, inner=inner))
    found = attend(case, lanes, PORTABLE.name, device="cuda")
    parts = [[x.cpu() for x in (one.tensors[0], *one.tensors[2:])] for one in found]
    out, *grads = whole_of(lanes, case.samples, parts)
    expected_out, _, *expected = values(case.expected)
    assert_close([out, *grads], [expected_out, *expected], torch.float32)


def test_placed_lanes_equal_a_dense_softmax_in_bfloat16() -> None:
    skip_unless_usable("flash", torch.bfloat16, DIM)
    inputs = [x.to(torch.bfloat16).double() for x in BF16_CASE.inputs]
    expected_out, _, *expected = values(exact_samples(inputs, BF16_CASE.samples))
    out, _, *grads = attended(BF16_CASE, lanes_of(BF16_CASE), kernel=FLASH.name, dtype=torch.bfloat16, device="cuda")
    assert_close([out, *grads], [expected_out, *expected], torch.bfloat16)


def test_a_lane_left_out_is_noticed() -> None:
    """The bounds are not too wide: they see half of the smallest sequence without its past, a fifth of the norm."""
    skip_unless_usable("flash", torch.bfloat16, 64)
    inputs = random_inputs(sum(SEQLENS), sum(SEQLENS), 8, 2, 64)
    expected, _ = exact(inputs, SEQLENS, SEQLENS, causal=True)
    cut = (SEQLENS[0] // 2, SEQLENS[0] // 2, *SEQLENS[1:])
    wrong, _ = exact(inputs, cut, cut, causal=True)
    with pytest.raises(AssertionError):
        assert_close([x.to(torch.bfloat16) for x in wrong], expected, torch.bfloat16)
