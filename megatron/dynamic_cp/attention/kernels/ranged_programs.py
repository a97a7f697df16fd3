"""The Triton programs of `ranged`: each computes one tile of rows, or of columns, against the tiles that it touches.

Scores are in powers of two, as exp2 is what the hardware has. A row sees at most two ranges of the columns of its
rectangle. Sums are float32. Nothing is added by atomics: results are the same every time. Only numbers of rows change
between packs; programs do not depend on what divides them, so each is compiled once in a run.

Import this module only where Triton is installed.
"""

# No `from __future__ import annotations`: Triton reads constants by their annotation.

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows_of(tiles, tile, ROWS: tl.constexpr):
    """Return rows of a tile, which of them there are, and the first column of their rectangle."""
    rows = tl.load(tiles + 3 * tile) + tl.arange(0, ROWS)
    return rows, rows < tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)


@triton.jit
def _load(tensor, numbers, there, stride, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Return rows of one head of a tensor, 0 where there are none."""
    dims = tl.arange(0, PADDED_DIM)
    at = numbers.to(tl.int64)[:, None] * stride + dims[None, :]
    return tl.load(tensor + at, mask=there[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def _store(tensor, values, numbers, there, stride, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    dims = tl.arange(0, PADDED_DIM)
    at = numbers.to(tl.int64)[:, None] * stride + dims[None, :]
    tl.store(tensor + at, values.to(tensor.dtype.element_ty), mask=there[:, None] & (dims < DIM)[None, :])


@triton.jit
def _load_ranges(ranges, rows, there):
    """Return the two ranges of each row; rows that are not there see nothing."""
    at = ranges + 4 * rows.to(tl.int64)
    begin, end = tl.load(at, mask=there, other=0), tl.load(at + 1, mask=there, other=0)
    return begin, end, tl.load(at + 2, mask=there, other=0), tl.load(at + 3, mask=there, other=0)


@triton.jit
def _scores(q, k, begin, end, second, last, columns, scale_log2):
    """Return the scores of a tile, -inf where a row does not see a column; `columns` count from the rectangle's."""
    seen = (columns[None, :] >= begin[:, None]) & (columns[None, :] < end[:, None])
    seen = seen | ((columns[None, :] >= second[:, None]) & (columns[None, :] < last[:, None]))
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _load_lse(lse, rows, there):
    """Return log2-sum-exp2 by which the weight of rows that see nothing, or are not there, is 0."""
    found = tl.load(lse + rows, mask=there, other=float("inf"))
    return tl.where(found == float("-inf"), float("inf"), found) * LOG2_E


@triton.jit(do_not_specialize=["num_rows"])
def forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    ranges,
    of_rows,
    of_columns,
    row_starts,
    columns_of,
    num_rows,
    scale_log2,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    out_row,
    out_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Output and log-sum-exp of a tile of rows of one head."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_head = head // GROUP
    rows, there, first_column = _rows_of(of_rows, tile, ROWS)
    q = _load(q_ptr + head * q_head, rows, there, q_row, DIM, PADDED_DIM)
    begin, end, second, last = _load_ranges(ranges, rows, there)
    # Not -inf: the difference of two of those is no number, where a row sees nothing.
    row_max = tl.full((ROWS,), -1.0e38, tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    for index in range(tl.load(row_starts + tile), tl.load(row_starts + tile + 1)):
        columns, are, _ = _rows_of(of_columns, tl.load(columns_of + index), COLUMNS)
        k = _load(k_ptr + kv_head * k_head, columns, are, k_row, DIM, PADDED_DIM)
        v = _load(v_ptr + kv_head * v_head, columns, are, v_row, DIM, PADDED_DIM)
        scores = _scores(q, k, begin, end, second, last, columns - first_column, scale_log2)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_max = new_max
    sees = row_sum > 0.0
    some = tl.where(sees, row_sum, 1.0)
    _store(out_ptr + head * out_head, total / some[:, None], rows, there, out_row, DIM, PADDED_DIM)
    lse = tl.where(sees, (row_max + tl.log2(some)) / LOG2_E, float("-inf"))
    tl.store(lse_ptr + head * num_rows + rows, lse, mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def backward_of_rows(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    dq_ptr,
    lse_ptr,
    delta_ptr,
    ranges,
    of_rows,
    of_columns,
    row_starts,
    columns_of,
    num_rows,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    grad_row,
    grad_head,
    dq_row,
    dq_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradient of a tile of queries of one head."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_head = head // GROUP
    rows, there, first_column = _rows_of(of_rows, tile, ROWS)
    q = _load(q_ptr + head * q_head, rows, there, q_row, DIM, PADDED_DIM)
    grad = _load(grad_ptr + head * grad_head, rows, there, grad_row, DIM, PADDED_DIM)
    lse = _load_lse(lse_ptr + head * num_rows, rows, there)
    delta = tl.load(delta_ptr + head * num_rows + rows, mask=there, other=0.0)
    begin, end, second, last = _load_ranges(ranges, rows, there)
    total = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    for index in range(tl.load(row_starts + tile), tl.load(row_starts + tile + 1)):
        columns, are, _ = _rows_of(of_columns, tl.load(columns_of + index), COLUMNS)
        k = _load(k_ptr + kv_head * k_head, columns, are, k_row, DIM, PADDED_DIM)
        v = _load(v_ptr + kv_head * v_head, columns, are, v_row, DIM, PADDED_DIM)
        scores = _scores(q, k, begin, end, second, last, columns - first_column, scale * LOG2_E)
        weights = tl.exp2(scores - lse[:, None])
        dweights = tl.dot(grad, tl.trans(v), input_precision="ieee")
        dscores = weights * (dweights - delta[:, None])
        total += tl.dot(dscores.to(k.dtype), k, input_precision="ieee")
    _store(dq_ptr + head * dq_head, total * scale, rows, there, dq_row, DIM, PADDED_DIM)


@triton.jit(do_not_specialize=["num_rows"])
def backward_of_columns(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    dk_ptr,
    dv_ptr,
    lse_ptr,
    delta_ptr,
    ranges,
    of_rows,
    of_columns,
    column_starts,
    rows_of,
    num_rows,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    grad_row,
    grad_head,
    dk_row,
    dk_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradients of a tile of keys and values of one head, from all query heads that share it."""
    tile, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns, are, first_column = _rows_of(of_columns, tile, COLUMNS)
    k = _load(k_ptr + kv_head * k_head, columns, are, k_row, DIM, PADDED_DIM)
    v = _load(v_ptr + kv_head * v_head, columns, are, v_row, DIM, PADDED_DIM)
    total_k = tl.zeros((COLUMNS, PADDED_DIM), tl.float32)
    total_v = tl.zeros((COLUMNS, PADDED_DIM), tl.float32)
    for index in range(tl.load(column_starts + tile), tl.load(column_starts + tile + 1)):
        rows, there, _ = _rows_of(of_rows, tl.load(rows_of + index), ROWS)
        begin, end, second, last = _load_ranges(ranges, rows, there)
        for of_group in range(GROUP):
            head = kv_head * GROUP + of_group
            q = _load(q_ptr + head * q_head, rows, there, q_row, DIM, PADDED_DIM)
            grad = _load(grad_ptr + head * grad_head, rows, there, grad_row, DIM, PADDED_DIM)
            lse = _load_lse(lse_ptr + head * num_rows, rows, there)
            delta = tl.load(delta_ptr + head * num_rows + rows, mask=there, other=0.0)
            scores = _scores(q, k, begin, end, second, last, columns - first_column, scale * LOG2_E)
            weights = tl.exp2(scores - lse[:, None])
            total_v += tl.dot(tl.trans(weights).to(grad.dtype), grad, input_precision="ieee")
            dweights = tl.dot(grad, tl.trans(v), input_precision="ieee")
            dscores = weights * (dweights - delta[:, None])
            total_k += tl.dot(tl.trans(dscores).to(q.dtype), q, input_precision="ieee")
    _store(dk_ptr + kv_head * dk_head, total_k * scale, columns, are, dk_row, DIM, PADDED_DIM)
    _store(dv_ptr + kv_head * dk_head, total_v, columns, are, dk_row, DIM, PADDED_DIM)
