"""The Triton programs, by Triton's interpreter on the CPU: equal to a dense softmax.

`TRITON_INTERPRET=1 python -m pytest tests/distributed/triton_cases.py`; `test_triton` runs this in a process of its
own, because Triton asks for the interpreter when it is imported.
"""

import numpy as np
import pytest
import torch

from dynamic_cp.types import CAUSAL, FULL, CausalBlockwise, Lambda, Mask
from megatron.dynamic_cp.attention.kernels import choice, ranged
from megatron.dynamic_cp.attention.kernels.choice import TRITON
from megatron.dynamic_cp.attention.kernels.merging import merge_into, merged
from megatron.dynamic_cp.attention.packs import Pack
from tests.distributed.naive_attention import HEADS, KV_HEADS, assert_all_close, exact, random_qkv
from tests.distributed.ranged import attend, attend_in_pieces, random_pack, sees_of

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in short sequences."""
    assert ranged.is_interpreted()
    monkeypatch.setattr(ranged, "cut_of", lambda program, q_THD: ranged.Cut(32, 16, 4, 1))


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
@pytest.mark.parametrize("mask", [Lambda(3, 20), CausalBlockwise(8, 2)], ids=str)
def test_masks(mask: Mask, kv_heads: int) -> None:
    seqlens = (45, 1, 16)
    pack = Pack.build(seqlens, device=HOST, key_ranges=np.concatenate([mask.key_ranges(n) for n in seqlens]))
    inputs = random_qkv(62, 62, kv_heads)
    assert_all_close(attend([x.float() for x in inputs], [pack], TRITON), exact(inputs, sees_of(pack, 62, 62)))


@pytest.mark.parametrize("seed", range(3))
def test_rectangles_of_any_ranges(seed: int) -> None:
    pack, num_rows, num_columns = random_pack(seed, HOST)
    inputs = random_qkv(num_rows, num_columns)
    seen = sees_of(pack, num_rows, num_columns)
    assert (seen.sum(1) == 0).sum() >= 3
    assert_all_close(attend([x.float() for x in inputs], [pack], TRITON), exact(inputs, seen))


def test_packs_without_ranges() -> None:
    """Two steps of a ring: a causal square, then queries and keys of other numbers."""
    packs = [Pack.build((33, 7), mask=CAUSAL, device=HOST, columns=np.arange(40))]
    packs.append(Pack.build((33, 7), (1, 30), mask=FULL, device=HOST, columns=np.arange(40, 71)))
    inputs = random_qkv(40, 71)
    seen = torch.zeros(40, 71, dtype=torch.int64)
    seen[:33, :33], seen[33:, 33:40] = torch.ones(33, 33).tril(), torch.ones(7, 7).tril()
    seen[:33, 40], seen[33:, 41:] = 1, 1
    assert_all_close(attend([x.float() for x in inputs], packs, TRITON), exact(inputs, seen))


def test_half_precision_odd_heads_and_strides() -> None:
    """Heads of a width that is no power of two, as views of one tensor. Triton interprets no bfloat16."""
    seqlen, heads, kv_heads, dim = 50, 4, 2, 24
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(seqlen, heads + 2 * kv_heads, dim, generator=generator).half()
    grad = torch.randn(seqlen, heads, dim, generator=generator).half()
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    assert not k.is_contiguous()
    pack = Pack.build((seqlen,), device=HOST, key_ranges=Lambda(2, 9).key_ranges(seqlen))
    out, lse = TRITON.forward(q, k, v, pack, dim**-0.5)
    found = [out, lse, *TRITON.backward(grad, q, k, v, out, lse, pack, dim**-0.5)]
    for actual, expected in zip(found, exact([q, k, v, grad], sees_of(pack, seqlen, seqlen)), strict=True):
        assert float((actual.double() - expected.value).norm() / expected.value.norm()) < 0.002


def test_heads_and_log_sum_exp_may_lie_in_pieces() -> None:
    inputs = [x.float() for x in random_qkv(40, 40)]
    pack = Pack.build((40,), device=HOST, key_ranges=Lambda(2, 9).key_ranges(40))
    assert_all_close(attend_in_pieces(inputs, pack, TRITON), exact(inputs, sees_of(pack, 40, 40)))


@pytest.mark.parametrize("some_rows", [False, True])
def test_parts_are_merged_in_one_pass(some_rows: bool) -> None:
    """As `merged` does, also where one part or both saw no key; other rows stay."""
    random = torch.Generator().manual_seed(3)
    rows = torch.randperm(300, generator=random)[:170] if some_rows else None
    num_others, dim = 170 if some_rows else 300, 24
    out, lse = torch.randn(300, 3, dim, generator=random), torch.randn(3, 300, generator=random)
    other, other_lse = torch.randn(num_others, 3, dim, generator=random).half(), torch.randn(3, num_others)
    lse[:, ::7], other_lse[:, ::5] = -torch.inf, -torch.inf
    out[lse.t() == -torch.inf], other[other_lse.t() == -torch.inf] = 0, 0
    at = torch.arange(300) if rows is None else rows
    expected_out, expected_lse = out.clone(), lse.clone()
    expected_out[at], expected_lse[:, at] = merged(out[at], lse[:, at], other.clone(), other_lse)
    assert (expected_lse == -torch.inf).any()
    merge_into(out, lse, rows, other, other_lse)
    torch.testing.assert_close(out, expected_out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-6)


def test_the_check_at_the_start_compares_with_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_SEQLENS", (2, 34))
    monkeypatch.setattr(choice, "_WINDOW", Lambda(3, 10))
    error = choice.check_kernel(TRITON, HOST, torch.float32, heads=2, kv_heads=1, head_dim=16)
    assert 0 < error < 1e-5
