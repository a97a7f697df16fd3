"""Attention of many packs of rectangles: out and log-sum-exp added up in float32, gradients shared out.

A single pack gives out and gradients in the model's dtype; if it has all rows (one lane, a2a), nothing is merged.

Shapes: T local tokens, S keys at hand, H heads, D channels of a head, 2 keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.kernels.choice import Kernel, kernel_of
from megatron.dynamic_cp.attention.kernels.merging import SUM_DTYPE, merge_into
from megatron.dynamic_cp.attention.packs import Pack, exact_dtype


class _Selected:
    """Selects rows of some tensors, and keeps the last selection: neighbouring steps mostly have the same rows."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._rows: Tensor | None = None
        self._kept: tuple[Tensor, ...] = ()

    def of(self, rows: Tensor | None) -> tuple[Tensor, ...]:
        if rows is None:
            return self._tensors
        if rows is not self._rows:
            self._kept = ()  # frees them before their successors are made
            self._rows, self._kept = rows, tuple(x.index_select(0, rows) for x in self._tensors)
        return self._kept


class RowSums:
    """Softmax-weighted sum over packs, for all local tokens.

    Attributes:
        queries: [T, heads, dim].
        out_THD: [T, heads, dim], in the dtype of the model after one pack, float32 after more.
        lse_HT: float32 [heads, T].
    """

    out_THD: Tensor
    lse_HT: Tensor

    def __init__(self, q_THD: Tensor, kernel: Kernel, scale: float) -> None:
        self.queries, self._num_rows = q_THD, len(q_THD)
        self._selected = _Selected(q_THD)
        self._kernel, self._scale = kernel, scale
        self._is_first = True

    def over(self, q_THD: Tensor) -> RowSums:
        """Return empty sums for other queries, with the same kernel: output 0, log-sum-exp -inf."""
        sums = RowSums(q_THD, self._kernel, self._scale)
        sums._is_first = False
        sums.out_THD = torch.zeros_like(q_THD, dtype=SUM_DTYPE)
        sums.lse_HT = q_THD.new_full((q_THD.shape[1], len(q_THD)), -torch.inf, dtype=SUM_DTYPE)
        return sums

    def take(self, sums: RowSums) -> None:
        """Adopt the first rows of `sums`, as many as there are here."""
        self._is_first = False
        self.out_THD, self.lse_HT = sums.out_THD[: self._num_rows], sums.lse_HT[:, : self._num_rows].contiguous()

    def attend(self, pack: Pack, kv_2SHD: Tensor) -> None:
        """Add the rectangles of `pack` against the keys kv_2SHD[0] and values kv_2SHD[1]."""
        (query,) = self._selected.of(pack.rows)
        key, value = _columns(kv_2SHD, pack)
        kernel = kernel_of(pack, self._kernel, query)
        self.add(pack.rows, *kernel.forward(query, key, value, pack, self._scale))

    def add(self, rows: Tensor | None, out_THD: Tensor, lse_HT: Tensor) -> None:
        """Merge a pack's result for `rows` (None: all); rows that saw no key have output 0 and log-sum-exp -inf."""
        if self._is_first:
            self._is_first = False
            if rows is None:
                self.out_THD, self.lse_HT = out_THD, lse_HT
                return
            self.out_THD = out_THD.new_zeros((self._num_rows, *out_THD.shape[1:]), dtype=SUM_DTYPE)
            self.lse_HT = lse_HT.new_full((len(lse_HT), self._num_rows), -torch.inf, dtype=SUM_DTYPE)
        self.out_THD, self.lse_HT = self.out_THD.to(SUM_DTYPE), self.lse_HT.to(SUM_DTYPE).contiguous()
        merge_into(self.out_THD, self.lse_HT, rows, out_THD, lse_HT)

    def add_offset(self, offset_H: Tensor) -> None:
        """Let every row see one more score, `offset_H` of its head, with a value of 0; call it after all packs."""
        self.out_THD, self.lse_HT = with_offset(self.out_THD, self.lse_HT, offset_H)


def with_offset(out_THD: Tensor, lse_HT: Tensor, offset_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of rows that see one more score, `offset_H` of their head, with a value of 0."""
    lse_HT, offset_H1 = lse_HT.to(SUM_DTYPE), offset_H.to(SUM_DTYPE)[:, None]
    out_THD = out_THD * torch.sigmoid(lse_HT - offset_H1).t()[..., None].to(out_THD.dtype)
    return out_THD, torch.logaddexp(lse_HT, offset_H1)


def offset_gradient(offset_H: Tensor, grad_THD: Tensor, out_THD: Tensor, lse_TH: Tensor) -> Tensor:
    """Return the gradient of the offset of `with_offset`, [heads]."""
    exact = exact_dtype(grad_THD)
    share_TH = torch.exp(offset_H.to(exact) - lse_TH)
    return -(share_TH * (grad_THD.to(exact) * out_THD.to(exact)).sum(dim=-1)).sum(dim=0)


class RowGradients:
    """The tensors of rows that the backward pass of any pack needs, and the gradient of queries, summed over packs.

    Attributes:
        tensors: gradient of the output, queries and output, [T, heads, dim], and log-sum-exp, float32 [T, heads].
        grad_q_THD: [T, heads, dim], in the dtype of the model after one pack, float32 after more.
    """

    grad_q_THD: Tensor

    def __init__(
        self, grad_THD: Tensor, q_THD: Tensor, out_THD: Tensor, lse_HT: Tensor, kernel: Kernel, scale: float
    ) -> None:
        self.tensors = grad_THD, q_THD, out_THD, lse_HT.t()
        self._rows, self._num_rows = _Selected(*self.tensors), len(q_THD)
        self._kernel, self._scale = kernel, scale
        self._is_first = True

    def over(self, grad_THD: Tensor, q_THD: Tensor, out_THD: Tensor, lse_TH: Tensor) -> RowGradients:
        """Return gradients of 0 for other rows, with the same kernel."""
        rows = RowGradients(grad_THD, q_THD, out_THD, lse_TH.t(), self._kernel, self._scale)
        rows._is_first = False
        rows.grad_q_THD = torch.zeros_like(q_THD, dtype=SUM_DTYPE)
        return rows

    def offset_gradient(self, offset_H: Tensor) -> Tensor:
        """Return the gradient of `RowSums.add_offset`'s offset, [heads]."""
        grad_THD, _, out_THD, lse_TH = self.tensors
        return offset_gradient(offset_H, grad_THD, out_THD, lse_TH)

    def take(self, rows: RowGradients) -> None:
        """Adopt the first rows of `rows`, as many as there are here."""
        self._is_first = False
        self.grad_q_THD = rows.grad_q_THD[: self._num_rows]

    def attend(self, pack: Pack, kv_2SHD: Tensor, total_2SHD: Tensor | None = None) -> Tensor:
        """Return the gradient of kv_2SHD from `pack`, added to `total_2SHD` if given, and add its rows' to
        `grad_q_THD`. A key or value gets one or two shares here, and the ring adds the rest: its own dtype is
        enough. Where it gets more, from many packs or many sequences of one, give a float32 total."""
        grad, query, out, lse_TH = self._rows.of(pack.rows)
        key, value = _columns(kv_2SHD, pack)
        kernel = kernel_of(pack, self._kernel, query)
        dq, dk, dv = kernel.backward(grad, query, key, value, out, lse_TH.t(), pack, self._scale)
        self._add(pack.rows, dq)
        share = torch.stack((dk, dv))
        if total_2SHD is None and pack.columns is None:
            return share
        if total_2SHD is None:
            total_2SHD = torch.zeros_like(kv_2SHD)
        if pack.columns is None:
            return total_2SHD.add_(share)
        return total_2SHD.index_add_(1, pack.columns, share.to(total_2SHD.dtype))

    def _add(self, rows: Tensor | None, grad_q_THD: Tensor) -> None:
        if self._is_first:
            self._is_first = False
            if rows is None:
                self.grad_q_THD = grad_q_THD
                return
            self.grad_q_THD = grad_q_THD.new_zeros((self._num_rows, *grad_q_THD.shape[1:]), dtype=SUM_DTYPE)
        self.grad_q_THD = self.grad_q_THD.to(SUM_DTYPE)
        if rows is None:
            self.grad_q_THD += grad_q_THD
        else:
            self.grad_q_THD.index_add_(0, rows, grad_q_THD.to(SUM_DTYPE))


def _columns(kv_2SHD: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
    key, value = kv_2SHD if pack.columns is None else kv_2SHD.index_select(1, pack.columns)
    return key, value
