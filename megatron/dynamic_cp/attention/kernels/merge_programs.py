"""The Triton program that adds a part's output and log-sum-exp to the sums of other parts, in one pass.

Import this module only where Triton is installed.
"""

# No `from __future__ import annotations`: Triton reads constants by their annotation.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "num_others"])
def merge(
    out_ptr,
    lse_ptr,
    other_ptr,
    other_lse_ptr,
    numbers,
    num_rows,
    num_others,
    out_row,
    out_head,
    other_row,
    other_head,
    HAS_NUMBERS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge rows of one head: out and lse float32, overwritten where `numbers` says, or row by row."""
    head = tl.program_id(1).to(tl.int64)
    others = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = others < num_others
    rows = others.to(tl.int64)
    if HAS_NUMBERS:
        rows = tl.load(numbers + others, mask=there, other=0)
    dims = tl.arange(0, PADDED_DIM)
    mask = there[:, None] & (dims < DIM)[None, :]
    at = out_ptr + head * out_head + rows[:, None] * out_row + dims[None, :]
    other_at = other_ptr + head * other_head + others.to(tl.int64)[:, None] * other_row + dims[None, :]
    lse = tl.load(lse_ptr + head * num_rows + rows, mask=there, other=float("-inf"))
    other_lse = tl.load(other_lse_ptr + head * num_others + others, mask=there, other=float("-inf"))
    largest = tl.maximum(tl.maximum(lse, other_lse), -1.0e38)  # -inf - -inf is no number
    weight, other_weight = tl.exp(lse - largest), tl.exp(other_lse - largest)
    both = weight + other_weight
    some = tl.where(both > 0.0, both, 1.0)
    sum_of_both = tl.load(at, mask=mask) * (weight / some)[:, None]
    sum_of_both += tl.load(other_at, mask=mask).to(tl.float32) * (other_weight / some)[:, None]
    tl.store(at, sum_of_both, mask=mask)
    tl.store(lse_ptr + head * num_rows + rows, largest + tl.log(both), mask=there)
