"""Stands in for `transformer_engine_torch`, the compiled part: what attention over packed sequences calls, in torch.

Every check of the C++ side is an assertion here, and so is what it does not check and needs: the longest sequence that
cuDNN is told of, multiples of 2 * cp. Memory that it leaves as it was is not a number, so that reading it is noticed.
Everything else that TransformerEngine imports is a name, which may be compared, and raises when it is called.

Source: `common/fused_attn/context_parallel.cu` and `pytorch/csrc/extensions/attention.cpp` of TransformerEngine 2.11
and 2.20. The order of arguments is read from TransformerEngine's own calls, so that one file serves all versions.
"""

from __future__ import annotations

import ast
import enum
import functools
import itertools
import sys
import types
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.distributed.real_transformer_engine import adam, products

CUDNN_VERSION, CUBLAS_VERSION = 91900, 130100
NAN, MINUS_INFINITY = float("nan"), float("-inf")
_numbers = itertools.count(1)


class Name:
    """Something of the extension that nobody here has written; members of its enumerations are such, too."""

    def __init__(self, name: str) -> None:
        self._path, self.name, self._number = name, name.rpartition(".")[2], next(_numbers)

    def __getattr__(self, member: str) -> Name:
        if member.startswith("__"):
            raise AttributeError(member)
        return named(f"{self._path}.{member}")

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"the stand-in for transformer_engine_torch has no {self._path}")

    def __int__(self) -> int:
        return self._number

    def __or__(self, other: Any) -> type:
        return object  # in annotations

    __index__, __ror__ = __int__, __or__


@functools.cache
def named(path: str) -> Name:
    """Return the one name of a path."""
    return Name(path)


DTYPES = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
BACKENDS = "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8"
OLD_BACKEND = "NVTE_F16_max512_seqlen"  # until 2.15


class Extension(types.ModuleType):
    """The module; what it lacks is a name."""

    def __getattr__(self, name: str) -> Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return named(name)


# Attention as cuDNN computes it. Dimensions: T rows of queries, S of keys, H heads.

ORDER: dict[str, list[str]] = {}
"""Function -> names of its arguments, one after the other."""
CALLS: list[str] = []
"""Kernels that were called, by name."""


def read_order(sources: Path) -> None:
    """Learn the order of arguments from TransformerEngine's calls."""
    tree = ast.parse((sources / "transformer_engine/pytorch/cpp_extensions/fused_attn.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("tex.fused_attn_"):
            # AttnMaskType[attn_mask_type] is the argument attn_mask_type.
            words = [ast.unparse(arg.slice if isinstance(arg, ast.Subscript) else arg) for arg in node.args]
            ORDER[ast.unparse(node.func).removeprefix("tex.")] = words
    assert {"fused_attn_fwd", "fused_attn_bwd"} <= set(ORDER)


class Attention:
    """What a kernel is given: queries, keys and values, where sequences lie in them, and what a query may see."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: str, max_q: int, max_kv: int) -> None:
        self.q, self.k, self.v, self.scale, self.mask = q, k, v, scale, mask
        self.max_q, self.max_kv = max_q, max_kv
        for x in (q, k, v):
            assert x.dim() == 3
            assert x.shape[-1] % 8 == 0, "cuDNN: head width in steps of 8"
        assert q.shape[1] % k.shape[1] == 0
        assert k.shape[:2] == v.shape[:2]
        self.copies = q.shape[1] // k.shape[1]
        self.wide = torch.float32 if q.element_size() == 2 else torch.float64

    def between(self, cu_q: Tensor, cu_kv: Tensor, starts_q: Tensor, starts_kv: Tensor) -> Attention:
        """Say where sequences lie: as many rows as boundaries have between them, from where `starts` say."""
        lists = []
        for boundaries in (cu_q, cu_kv, starts_q, starts_kv):
            assert (boundaries.dtype, boundaries.dim()) == (torch.int32, 1), "TE: boundaries are int32 [b + 1]"
            lists.append(raw(boundaries))
        seqlens_q, seqlens_kv = ([stop - start for start, stop in pairwise(one)] for one in lists[:2])
        assert min(seqlens_q + seqlens_kv) >= 0, "boundaries decrease"
        for name, longest, told in (("q", max(seqlens_q), self.max_q), ("kv", max(seqlens_kv), self.max_kv)):
            assert longest <= told, f"cuDNN is told max_seqlen_{name} {told}, a sequence has {longest}"
        self.sequences = [
            (slice(start, start + length), slice(start_kv, start_kv + length_kv))
            for start, length, start_kv, length_kv in zip(lists[2], seqlens_q, lists[3], seqlens_kv, strict=False)
            if length
        ]
        for rows, columns in self.sequences:
            assert rows.stop <= len(self.q), "the kernel reads behind the queries"
            assert columns.stop <= max(len(self.k), columns.start), "the kernel reads behind the keys"
        return self

    def products(self) -> Iterator[tuple[slice, slice, tuple[Tensor, ...], Tensor]]:
        """Yield rows, columns, (q, k, v) [H, T or S, D] and scores [H, T, S] of each sequence, in a wide type."""
        for rows, columns in self.sequences:
            q = self.q[rows].to(self.wide).transpose(0, 1)
            k, v = (
                x[columns].to(self.wide).transpose(0, 1).repeat_interleave(self.copies, 0) for x in (self.k, self.v)
            )
            scores = q @ k.transpose(1, 2) * self.scale
            if "CAUSAL" in self.mask:
                shift = k.shape[1] - q.shape[1] if "BOTTOM_RIGHT" in self.mask else 0
                later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + shift)
                scores = scores.masked_fill(later, MINUS_INFINITY)
            yield rows, columns, (q, k, v), scores

    def forward(self, out: Tensor) -> Tensor:
        """Write the output and return its log-sum-exp [H, T], not a number where no sequence lies."""
        lse_HT = torch.full((self.q.shape[1], len(self.q)), NAN)
        for rows, _, (_, _, v), scores in self.products():
            lse = scores.logsumexp(-1)
            out[rows] = ((scores - lse[..., None]).exp().nan_to_num() @ v).transpose(0, 1).to(out.dtype)
            lse_HT[:, rows] = lse.float()
        return lse_HT

    def backward(self, out: Tensor, grad: Tensor, lse_HT: Tensor, grads: list[Tensor]) -> None:
        """Write the gradients of queries, keys and values; `lse_HT` may be of more keys than are here."""
        for x in (out, grad):
            assert (x.shape[:2], x.dtype) == (self.q.shape[:2], self.q.dtype)
        assert (lse_HT.dtype, tuple(lse_HT.shape)) == (torch.float32, (self.q.shape[1], len(self.q)))
        for rows, columns, (q, k, v), scores in self.products():
            do, o = (x[rows].to(self.wide).transpose(0, 1) for x in (grad, out))
            p = (scores - lse_HT[:, rows].to(self.wide)[..., None]).exp()
            p = p.where(scores != MINUS_INFINITY, 0)
            ds = p * (do @ v.transpose(1, 2) - (do * o).sum(-1, keepdim=True)) * self.scale
            grads[0][rows] = (ds @ k).transpose(0, 1).to(grads[0].dtype)
            for place, product in ((grads[1], ds.transpose(1, 2) @ q), (grads[2], p.transpose(1, 2) @ do)):
                of_kv_heads = product.unflatten(0, (-1, self.copies)).sum(1)
                place[columns] = of_kv_heads.transpose(0, 1).to(place.dtype)


def raw(x: Tensor) -> list[int]:
    """Return numbers of a tensor as a kernel reads them: no host waits."""
    return [int(number) for number in x.numpy()]


def _cudnn(name: str, args: tuple[Any, ...]) -> tuple[Attention, types.SimpleNamespace]:
    assert len(args) == len(ORDER[name]), f"{name}: {len(args)} arguments"
    CALLS.append(name)
    a = types.SimpleNamespace(**dict(zip(ORDER[name], args, strict=True)))
    # Where queries, keys and values are parts of one tensor, heads of each lie beside those of the others.
    assert a.qkv_layout.name in ("NVTE_THD_THD_THD", "NVTE_TH3D"), a.qkv_layout.name
    are_apart = [x.is_contiguous() for x in (a.q, a.k, a.v)]
    assert all(are_apart) if a.qkv_layout.name == "NVTE_THD_THD_THD" else not any(are_apart), a.qkv_layout.name
    assert (a.softmax_type.name, a.attn_bias_type.name, a.dropout) == ("NVTE_VANILLA_SOFTMAX", "NVTE_NO_BIAS", 0)
    assert a.window_size in ((-1, -1), (-1, 0)), a.window_size
    mask = a.attn_mask_type.name
    assert "PADDING" in mask, "packed sequences have a padding mask"
    if getattr(a, "bottom_right_diagonal", False):
        mask += "_BOTTOM_RIGHT"
    scale = {"scale": a.attn_scale, "mask": mask, "max_q": a.max_seqlen_q, "max_kv": a.max_seqlen_kv}
    attention = Attention(a.q, a.k, a.v, **scale)
    return attention.between(a.cu_seqlens_q, a.cu_seqlens_kv, a.cu_seqlens_q_padded, a.cu_seqlens_kv_padded), a


def fused_attn_fwd(*args: Any) -> list[Tensor]:
    """Output, its log-sum-exp [T, H, 1] and random states; rows that no sequence has are zeros."""
    attention, a = _cudnn("fused_attn_fwd", args)
    out = torch.zeros(*a.q.shape[:-1], a.v.shape[-1], dtype=a.q.dtype)
    lse_HT = attention.forward(out)
    return [out, lse_HT.t()[..., None].contiguous(), torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(*args: Any) -> list[Tensor | None]:
    """Gradients of q, k and v, zeros where no sequence is; no gradient of a bias or of sinks."""
    attention, a = _cudnn("fused_attn_bwd", args)
    lse_TH1 = a.aux_ctx_tensors[0]
    assert tuple(lse_TH1.shape) == (*a.q.shape[:2], 1)
    grads = [torch.zeros(x.shape, dtype=x.dtype) for x in (a.q, a.k, a.v)]
    attention.backward(a.o, a.d_o, lse_TH1[..., 0].t(), grads)
    return [*grads, None, None]


# Helpers of packed sequences. Of each sequence that a lane holds the first half is one chunk, the second another.


def _second_halves(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows of second halves in the whole, the same rows where only halves are there)."""
    rows = [row for a, b in pairwise(_boundaries(cu_seqlens)) for row in range(a + (b - a) // 2, b)]
    return torch.tensor(rows, dtype=torch.int64), torch.arange(len(rows))


def _boundaries(cu_seqlens: Tensor) -> list[int]:
    assert (cu_seqlens.dtype, cu_seqlens.dim()) == (torch.int32, 1)
    return raw(cu_seqlens)


def thd_read_half_tensor(x: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    dim = x.dim() - 3
    assert dim in (0, 1)
    assert x.is_contiguous()
    assert x.shape[-1] * x.shape[-2] * x.element_size() % 16 == 0, "TE reads 128 bits at once"
    rows = []
    for a, b in pairwise(_boundaries(cu_seqlens)):
        assert (b - a) % 2 == 0, "halves of an odd length"
        middle = (a + b) // 2
        rows += range(middle, b) if half else range(a, middle)
    shape = list(x.shape)
    shape[dim] //= 2
    out = torch.full(shape, NAN, dtype=x.dtype)
    out.narrow(dim, 0, len(rows)).copy_(x.index_select(dim, torch.tensor(rows, dtype=torch.int64)))
    return out


def thd_second_half_lse_correction(lse_HT: Tensor, step_HT: Tensor, cu_seqlens: Tensor, packed: bool) -> None:
    assert packed
    assert lse_HT.dtype == step_HT.dtype == torch.float32
    assert step_HT.shape[1] >= lse_HT.shape[1] // 2
    rows, halves = _second_halves(cu_seqlens)
    lse_HT[:, rows] = torch.logaddexp(lse_HT[:, rows], step_HT[:, halves])


def thd_read_second_half_lse(lse_HT: Tensor, cu_seqlens: Tensor, packed: bool, length: int) -> Tensor:
    assert packed
    assert (lse_HT.dtype, lse_HT.dim()) == (torch.float32, 2)
    assert length >= lse_HT.shape[1] // 2
    rows, halves = _second_halves(cu_seqlens)
    out = torch.zeros(len(lse_HT), length)
    out[:, halves] = lse_HT[:, rows]
    return out


def thd_out_correction(out: Tensor, step: Tensor, *rest: Any) -> None:
    """Add a step of a ring to the output: until 2.19 it is scaled alone, then the output so far is, too."""
    *before, lse_HT, step_HT, cu_seqlens, only_second_half, packed = rest
    assert packed
    assert out.dtype == step.dtype
    assert step.shape == (len(out) // (only_second_half + 1), *out.shape[1:])
    assert lse_HT.dtype == step_HT.dtype == torch.float32
    assert lse_HT.shape[1] >= len(out)
    rows, halves = _second_halves(cu_seqlens)
    if not only_second_half:
        rows = halves = torch.arange(_boundaries(cu_seqlens)[-1])
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32

    def share(part_HT: Tensor, places: Tensor) -> Tensor:
        return (part_HT[:, places] - lse_HT[:, rows]).exp().t()[..., None].to(wide)

    added = step[halves].to(wide) * share(step_HT, halves)
    if before:
        (before_HT,) = before
        assert before_HT.shape == lse_HT.shape
        out[rows] = (out[rows].to(wide) * share(before_HT, rows) + added).to(out.dtype)
    else:
        out[rows] += added.to(out.dtype)


def thd_grad_correction(grad: Tensor, step: Tensor, cu_seqlens: Tensor, first: str, second: str) -> None:
    """Bring a step's gradient into first and second halves: each "add", "copy", "zero" or "none"."""
    assert grad.is_contiguous()
    assert step.is_contiguous()
    assert grad.dtype == step.dtype
    assert len(step) == len(grad) // (2 if "none" in (first, second) else 1), (first, second, grad.shape, step.shape)
    taken = 0
    for a, b in pairwise(_boundaries(cu_seqlens)):
        middle = (a + b) // 2
        for what, rows in ((first, slice(a, middle)), (second, slice(middle, b))):
            number = 0 if what == "none" else rows.stop - rows.start
            brought, taken = step[taken : taken + number], taken + number
            if what == "add":
                grad[rows] += brought
            elif what == "copy":
                grad[rows] = brought
            elif what == "zero":
                grad[rows] = 0


def thd_get_partitioned_indices(cu_seqlens: Tensor, total: int, cp_size: int, rank: int) -> Tensor:
    """Rows of the pack that a lane holds: chunks rank and 2 * cp - 1 - rank of each sequence."""
    boundaries, rows = _boundaries(cu_seqlens), []
    assert boundaries[-1] == total, f"boundaries end at {boundaries[-1]} of {total} rows: the rest is left as it was"
    for a, b in pairwise(boundaries):
        assert a % (2 * cp_size) == b % (2 * cp_size) == 0, "assertion on the device: multiples of 2 * cp"
        chunk = (b - a) // (2 * cp_size)
        for index in (rank, 2 * cp_size - 1 - rank):
            rows += range(a + index * chunk, a + (index + 1) * chunk)
    return torch.tensor(rows, dtype=torch.int32)


def _rows_of_all(x: Tensor, cu_seqlens: Tensor, cp_size: int, total: int) -> Tensor:
    assert total == len(x)
    return torch.cat([thd_get_partitioned_indices(cu_seqlens, total, cp_size, rank) for rank in range(cp_size)]).long()


def thd_sequence_order_to_cp_rank_order(x: Tensor, cu_seqlens: Tensor, cp_size: int, total: int) -> Tensor:
    return x[_rows_of_all(x, cu_seqlens, cp_size, total)].contiguous()


def thd_cp_rank_order_to_sequence_order(x: Tensor, cu_seqlens: Tensor, cp_size: int, total: int) -> Tensor:
    out = torch.full_like(x, NAN)
    out[_rows_of_all(x, cu_seqlens, cp_size, total)] = x
    return out


def thd_copy_valid_tokens_from_per_split_to_rank_local(out: Tensor, x: Tensor, padded: Tensor, valid: Tensor) -> None:
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    for (start, _), (first, last) in zip(pairwise(_boundaries(padded)), pairwise(_boundaries(valid)), strict=True):
        rows = slice(start, start + last - first)
        out[rows] = x[rows]


WRITTEN = (
    *(fused_attn_fwd, fused_attn_bwd, thd_read_half_tensor, thd_second_half_lse_correction, thd_read_second_half_lse),
    *(thd_out_correction, thd_grad_correction, thd_get_partitioned_indices, thd_sequence_order_to_cp_rank_order),
    *(thd_cp_rank_order_to_sequence_order, thd_copy_valid_tokens_from_per_split_to_rank_local),
)


def install(release: tuple[int, int], sources: Path) -> None:
    """Put the stand-in where `import transformer_engine_torch` finds it."""
    read_order(sources)
    module = Extension("transformer_engine_torch")
    names = BACKENDS if release >= (2, 16) else f"{BACKENDS} {OLD_BACKEND}"
    backends = enum.IntEnum("NVTE_Fused_Attn_Backend", names, start=-1)
    chosen = backends.NVTE_F16_arbitrary_seqlen
    vars(module).update(
        {function.__name__: function for function in (*WRITTEN, *products.WRITTEN, *adam.WRITTEN)},
        get_cudnn_version=lambda: CUDNN_VERSION,
        get_cublasLt_version=lambda: CUBLAS_VERSION,
        get_num_cublas_streams=lambda: 4,
        get_fused_attn_backend=lambda *_args, **_kwargs: (chosen, "") if release >= (2, 20) else chosen,
        NVTE_Fused_Attn_Backend=backends,
        DType=enum.IntEnum("DType", DTYPES),
        FP8TensorMeta=type("FP8TensorMeta", (), {}),
    )
    sys.modules[module.__name__] = module
