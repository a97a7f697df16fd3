"""The choice of a kernel, and the calls that the CUDA kernels get, on stand-ins that check what the real ones need."""

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import CAUSAL
from megatron.dynamic_cp.attention.kernels import choice as kernels
from megatron.dynamic_cp.attention.kernels import cudnn as kernels_cudnn
from megatron.dynamic_cp.attention.kernels import flash as kernels_flash
from megatron.dynamic_cp.attention.kernels import merging
from megatron.dynamic_cp.attention.kernels import ranged as kernels_ranged
from megatron.dynamic_cp.attention.kernels.choice import (
    CPU,
    CUDNN,
    FLASH,
    KERNELS,
    PORTABLE,
    TRITON,
    check_kernel,
    choose_kernel,
    kernel_of,
    ranged_kernel,
)
from megatron.dynamic_cp.attention.packs import Pack
from tests.distributed import emulated_lanes, fake_kernels
from tests.distributed.harness import refuses
from tests.distributed.naive_attention import assert_all_close, exact_samples, random_qkv
from tests.distributed.parity import samples_of
from tests.distributed.test_attention import Case, whole_result

CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16


@pytest.fixture
def a100(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make torch say that it has a device of a capability; an A100 at first."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "test device")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)

    def capability(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))

    capability(8, 0)
    choose_kernel.cache_clear()
    yield capability
    choose_kernel.cache_clear()


def test_choice_by_device_and_dtype(a100: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for capability in ((8, 0), (9, 0)):
        a100(*capability)
        choose_kernel.cache_clear()
        for head_dim in (64, 128, 256):
            assert choose_kernel("auto", CUDA, BF16, head_dim) is FLASH
    assert choose_kernel("auto", CUDA, torch.float32, 64) is PORTABLE
    assert choose_kernel("unfused", CUDA, BF16, 100) is PORTABLE
    assert choose_kernel("auto", torch.device("cpu"), BF16, 100) is CPU
    said = [record.getMessage() for record in caplog.records]
    assert sum("attention kernel flash: torch.bfloat16 on test device" in line for line in said) == 6
    assert sum("attention kernel portable: torch has no kernel for float32" in line for line in said) == 1
    choose_kernel("auto", CUDA, BF16, 64)
    assert len(caplog.records) == len(said), "said once"


def test_no_kernel_is_an_error_with_a_remedy(a100: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def says(part: str, *choice: Any) -> None:
        refuses(UnsupportedFeatureError, lambda: choose_kernel(*choice), part, "--attention-backend", "unfused")

    says("head width of at most 256 that is a multiple of 8, it is 320", "auto", CUDA, BF16, 320)
    says("head width of at most 256 that is a multiple of 8, it is 100", "auto", CUDA, BF16, 100)
    says("needs a CUDA device, the tensors are on cpu", "flash", torch.device("cpu"), BF16, 64)
    says("bfloat16 or float16, the tensors are torch.float32", "flash", CUDA, torch.float32, 64)
    says("is not one of", "local", CUDA, BF16, 64)
    a100(7, 5)
    says("compute capability (8, 0), the device has (7, 5)", "auto", CUDA, BF16, 64)
    a100(9, 0)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    says("was built without it", "auto", CUDA, BF16, 64)
    monkeypatch.setattr(kernels_cudnn, "torch_version", lambda: (2, 13))
    says("its gradients of packs are wrong", "fused", CUDA, BF16, 64)
    monkeypatch.setattr(kernels_cudnn, "torch_version", lambda: (2, 14))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert choose_kernel("fused", CUDA, BF16, 64) is CUDNN


def test_ranges_of_keys_go_to_triton_or_say_why_not(
    a100: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    queries = torch.empty(4, 2, 64, dtype=BF16)
    ranged = Pack.build((4,), device=torch.device("cpu"), key_ranges=CAUSAL.key_ranges(4))
    plain = Pack.build((4,), mask=CAUSAL, device=torch.device("cpu"))
    assert kernel_of(ranged, PORTABLE, queries) is PORTABLE
    assert kernel_of(plain, FLASH, queries) is FLASH
    assert kernel_of(ranged, FLASH, queries) is PORTABLE
    assert "several times slower, where tokens see ranges of keys: triton needs a CUDA device" in caplog.text
    ranged_kernel.cache_clear()
    monkeypatch.setattr(kernels_ranged, "has_triton", lambda: False)
    assert ranged_kernel(CUDA, BF16, 64) is PORTABLE
    assert "ranges of keys: triton is not installed" in caplog.text
    ranged_kernel.cache_clear()
    monkeypatch.setattr(kernels_ranged, "has_triton", lambda: True)
    assert ranged_kernel(CUDA, BF16, 64) is TRITON
    assert ranged_kernel(CUDA, BF16, 512) is PORTABLE
    a100(7, 5)
    assert "compute capability (8, 0), the device has (7, 5)" in str(kernels_ranged.why_not(CUDA, BF16, 64))
    ranged_kernel.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "flash", "unfused"])
def test_an_interpreted_triton_is_refused_at_the_start(
    a100: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels_ranged.why_not(CUDA, BF16, 64) is not None
    with pytest.raises(UnsupportedFeatureError, match=r"TRITON_INTERPRET is set: .* unset it to train"):
        choose_kernel(backend, CUDA, BF16, 64)
    assert choose_kernel("auto", torch.device("cpu"), BF16, 64) is CPU, "which needs no Triton"


def test_versions_that_pad_the_log_sum_exp_are_refused(a100: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 calls the third output philox_seed; 2.7 renamed it with the update that ended the padding."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    assert schema.returns[2].name == "rng_state"
    old = torch._C.parse_schema(str(schema).replace("rng_state", "philox_seed"))
    operator = type("Operator", (), {"default": type("Default", (), {"_schema": old})})
    monkeypatch.setattr(kernels_flash.torch.ops.aten, "_flash_attention_forward", operator)
    assert "needs torch 2.7" in str(kernels_flash.why_not(CUDA, BF16, 64))


EXCHANGE_CASES = {
    "alone": (Case(1, (1, 7, 40)), 1), "ring2": (Case(2, (4, 60, 8)), 2),
    "ring2_shards_of_two_tokens": (Case(2, (4, 4, 4)), 2), "ring4": (Case(4, (8, 128, 16)), 4),
    "ring4_one_kv_head": (Case(4, (32, 8), kv_heads=1), 4), "all_gather4": (Case(4, (8, 128, 16), "all_gather"), 3),
    "a2a4": (Case(4, (8, 128, 16), "a2a"), 1), "two_levels4": (Case(4, (8, 128, 16), "a2a+p2p"), 2),
}  # fmt: skip


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize("name", EXCHANGE_CASES)
def test_calls_of_cuda_kernels_keep_their_contract(name: str, kernel: str) -> None:
    """Bit for bit what the CPU path gives, with one call per step for all sequences."""
    fake_kernels.install()
    case, num_packs = EXCHANGE_CASES[name]
    inputs = [x.to(BF16) for x in random_qkv(case.num_tokens, case.num_tokens, case.kv_heads, case.heads)]
    how = (inputs, case.padded_seqlens, case.cp_size)
    expected = emulated_lanes.attend(*how, CPU, case.exchange, case.inner)
    assert not fake_kernels.calls
    actual = emulated_lanes.attend(*how, KERNELS[kernel], case.exchange, case.inner)
    for tensor, wanted in zip(actual, expected, strict=True):
        assert torch.equal(tensor, wanted)
    # The first lane of an all-gather has no past before its first chunk.
    num_calls = case.cp_size * num_packs - (name == "all_gather4")
    assert fake_kernels.calls[f"{kernel} forward"] == fake_kernels.calls[f"{kernel} backward"] == num_calls


def test_ranks_compute_what_emulated_lanes_do() -> None:
    case = Case(4, (8, 128, 16), dtype=BF16)
    inputs = [x.to(BF16) for x in random_qkv(case.num_tokens, case.num_tokens, case.kv_heads, case.heads)]
    emulated = emulated_lanes.attend(inputs, case.padded_seqlens, 4, CPU)
    of_ranks = whole_result(replace(case, kernel="flash"), fake_kernels.install)
    for tensor, wanted in zip(of_ranks, emulated, strict=True):
        assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_emulated_lanes_equal_the_whole_sequence(exchange: str) -> None:
    seqlens = (8, 48)
    inputs = random_qkv(56, 56)
    out, _, *grads = exact_samples(inputs, samples_of(*seqlens))
    found = emulated_lanes.attend([x.float() for x in inputs], seqlens, 4, CPU, exchange)
    assert_all_close(found, [out, *grads])


def test_cudnn_needs_few_plans() -> None:
    """Lengths are rounded up: packs of any lengths up to 1024 have 4 longest lengths."""
    fake_kernels.install()
    for longest in (5, 127, 128, 129, 300, 500, 700, 1000):
        pack = Pack.build((longest, 3), mask=CAUSAL, device=torch.device("cpu"))
        q, k, v, _ = (x.to(BF16) for x in random_qkv(longest + 3, longest + 3))
        CUDNN.forward(q, k, v, pack, 1.0)
    plans: Counter[str] = Counter()
    for name, number in fake_kernels.calls.items():
        if name.startswith("cudnn plan"):
            plans[name.split()[2]] += number
    assert plans == {"128": 3, "256": 1, "512": 2, "1024": 2}


def break_log_sum_exp(forward: Any) -> Any:
    """The layout [heads, T] read as [T, heads]."""

    def broken(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = forward(*args)
        return out, lse.t().reshape(lse.shape)

    return broken


def test_start_up_check_finds_a_wrong_kernel() -> None:
    fake_kernels.install()
    how: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    cpu = torch.device("cpu")
    assert check_kernel(CPU, cpu, BF16, **how) == 0
    for kernel in (FLASH, CUDNN):
        assert 1e-4 < check_kernel(kernel, cpu, BF16, **how) < 0.01
    wrong = replace(FLASH, forward=break_log_sum_exp(FLASH.forward))
    with pytest.raises(UnsupportedFeatureError, match="is wrong on cpu: log-sum-exp of a pack causal"):
        check_kernel(wrong, cpu, BF16, **how)
    padded = replace(FLASH, forward=lambda *args: (FLASH.forward(*args)[0], torch.zeros(3, 4, 522)))
    with pytest.raises(UnsupportedFeatureError, match="log-sum-exp"):
        check_kernel(padded, cpu, BF16, **how)

    def unwritten(*args: Any) -> tuple[Tensor, ...]:
        dq, dk, dv = FLASH.backward(*args)
        return dq, dk.index_fill(0, torch.tensor([3]), torch.nan), dv

    with pytest.raises(UnsupportedFeatureError, match="gradient of the keys of a pack causal is off by nan"):
        check_kernel(replace(FLASH, backward=unwritten), cpu, BF16, **how)


def test_tables_agree() -> None:
    from megatron.core.transformer.enums import AttnBackend

    assert set(kernels.BACKENDS) == {backend.name for backend in AttnBackend} - {"local"}


@pytest.mark.usefixtures("a100")
def test_several_passes_without_triton_are_said(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(merging, "has_triton", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert not merging._has_program(torch.device("cuda", 5))  # answers are kept for each device
    assert "pip install triton" in caplog.text
