"""The Triton programs: attention of ranged packs (`ranged`), and the sum of two parts (`merging`).

An attention program computes one tile of rows, or of columns, against the tiles that it touches. Scores are in powers
of two, because the hardware has exp2. A row sees at most two ranges of its rectangle's columns; in full tiles it sees
all, and nothing is compared. Sums are float32 and never use atomics, so results repeat exactly. Neighbouring programs
are heads of one tile, which share keys and values in the cache. Import this only where Triton is installed.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _place(HEADS: tl.constexpr):
    return tl.program_id(0) // HEADS, (tl.program_id(0) % HEADS).to(tl.int64)


@triton.jit
def _numbers_of(tiles, tile, SIZE: tl.constexpr):
    """Return a tile's rows (or columns), which of them exist, and the first column of their rectangle."""
    numbers = tl.load(tiles + 3 * tile) + tl.arange(0, SIZE)
    return numbers, numbers < tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)


@triton.jit
def _load(tensor, numbers, there, stride, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ALL: tl.constexpr):
    """Return rows of one head of a tensor, 0 where they do not exist; ALL: all of them exist."""
    dims = tl.arange(0, PADDED_DIM)
    at = tensor + numbers.to(tl.int64)[:, None] * stride + dims[None, :]
    if ALL and DIM == PADDED_DIM:
        return tl.load(at)
    if ALL:
        return tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(at, mask=there[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def _store(tensor, values, numbers, there, stride, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    dims = tl.arange(0, PADDED_DIM)
    at = numbers.to(tl.int64)[:, None] * stride + dims[None, :]
    tl.store(tensor + at, values.to(tensor.dtype.element_ty), mask=there[:, None] & (dims < DIM)[None, :])


@triton.jit
def _load_ranges(ranges, rows, there):
    """Return both ranges of each row; rows that do not exist see nothing."""
    at = ranges + 4 * rows.to(tl.int64)
    begin, end = tl.load(at, mask=there, other=0), tl.load(at + 1, mask=there, other=0)
    return begin, end, tl.load(at + 2, mask=there, other=0), tl.load(at + 3, mask=there, other=0)


@triton.jit
def _scores(q, k, begin, end, second, last, columns, scale_log2, FULL: tl.constexpr):
    """Return the scores of a tile, -inf where a column is not seen; `columns` count from the rectangle's first."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if not FULL:
        seen = (columns[None, :] >= begin[:, None]) & (columns[None, :] < end[:, None])
        seen = seen | ((columns[None, :] >= second[:, None]) & (columns[None, :] < last[:, None]))
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _load_lse(lse, rows, there):
    """Return log2-sum-exp2; it is +inf, so that weights are 0, for rows that see nothing or do not exist."""
    found = tl.load(lse + rows, mask=there, other=float("inf"))
    return tl.where(found == float("-inf"), float("inf"), found) * LOG2_E


@triton.jit
def _attended(
    first,
    last_index,
    q,
    row_max,
    row_sum,
    total,
    k_ptr,
    v_ptr,
    k_row,
    v_row,
    of_columns,
    columns_of,
    begin,
    end,
    second,
    last,
    first_column,
    scale_log2,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Return the rows' largest score, sum of weights and weighted values after more tiles of columns."""
    for index in range(first, last_index):
        columns, are, _ = _numbers_of(of_columns, tl.load(columns_of + index), COLUMNS)
        k = _load(k_ptr, columns, are, k_row, DIM, PADDED_DIM, FULL)
        v = _load(v_ptr, columns, are, v_row, DIM, PADDED_DIM, FULL)
        scores = _scores(q, k, begin, end, second, last, columns - first_column, scale_log2, FULL)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_max = new_max
    return row_max, row_sum, total


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
    starts,
    full_ends,
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
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute output and log-sum-exp of a tile of rows of one head."""
    tile, head = _place(HEADS)
    k_ptr, v_ptr = k_ptr + head // GROUP * k_head, v_ptr + head // GROUP * v_head
    rows, there, first_column = _numbers_of(of_rows, tile, ROWS)
    q = _load(q_ptr + head * q_head, rows, there, q_row, DIM, PADDED_DIM, False)
    begin, end, second, last = _load_ranges(ranges, rows, there)
    # Not -inf: in rows that see nothing, -inf - -inf would be NaN.
    row_max = tl.full((ROWS,), -1.0e38, tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    first, full_end = tl.load(starts + tile), tl.load(full_ends + tile)
    for part in tl.static_range(2):
        row_max, row_sum, total = _attended(
            first if part == 0 else full_end,
            full_end if part == 0 else tl.load(starts + tile + 1),
            q,
            row_max,
            row_sum,
            total,
            k_ptr,
            v_ptr,
            k_row,
            v_row,
            of_columns,
            columns_of,
            begin,
            end,
            second,
            last,
            first_column,
            scale_log2,
            DIM,
            PADDED_DIM,
            COLUMNS,
            part == 0,
        )
    sees = row_sum > 0.0
    some = tl.where(sees, row_sum, 1.0)
    _store(out_ptr + head * out_head, total / some[:, None], rows, there, out_row, DIM, PADDED_DIM)
    lse = tl.where(sees, (row_max + tl.log2(some)) / LOG2_E, float("-inf"))
    tl.store(lse_ptr + head * num_rows + rows, lse, mask=there)


@triton.jit
def _row_gradient(
    first,
    last_index,
    q,
    grad,
    lse,
    delta,
    total,
    k_ptr,
    v_ptr,
    k_row,
    v_row,
    of_columns,
    columns_of,
    begin,
    end,
    second,
    last,
    first_column,
    scale,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Return the gradient of queries, without the scale, after more tiles of columns."""
    for index in range(first, last_index):
        columns, are, _ = _numbers_of(of_columns, tl.load(columns_of + index), COLUMNS)
        k = _load(k_ptr, columns, are, k_row, DIM, PADDED_DIM, FULL)
        v = _load(v_ptr, columns, are, v_row, DIM, PADDED_DIM, FULL)
        scores = _scores(q, k, begin, end, second, last, columns - first_column, scale * LOG2_E, FULL)
        weights = tl.exp2(scores - lse[:, None])
        dweights = tl.dot(grad, tl.trans(v), input_precision="ieee")
        dscores = weights * (dweights - delta[:, None])
        total += tl.dot(dscores.to(k.dtype), k, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def backward_of_rows(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    out_ptr,
    dq_ptr,
    lse_ptr,
    delta_ptr,
    ranges,
    of_rows,
    of_columns,
    starts,
    full_ends,
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
    out_row,
    out_head,
    dq_row,
    dq_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradient of a tile of queries of one head, and delta, the products of outputs and gradients."""
    tile, head = _place(HEADS)
    k_ptr, v_ptr = k_ptr + head // GROUP * k_head, v_ptr + head // GROUP * v_head
    rows, there, first_column = _numbers_of(of_rows, tile, ROWS)
    grad = _load(grad_ptr + head * grad_head, rows, there, grad_row, DIM, PADDED_DIM, False)
    out = _load(out_ptr + head * out_head, rows, there, out_row, DIM, PADDED_DIM, False)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + head * num_rows + rows, delta, mask=there)
    q = _load(q_ptr + head * q_head, rows, there, q_row, DIM, PADDED_DIM, False)
    lse = _load_lse(lse_ptr + head * num_rows, rows, there)
    begin, end, second, last = _load_ranges(ranges, rows, there)
    total = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    first, full_end = tl.load(starts + tile), tl.load(full_ends + tile)
    for part in tl.static_range(2):
        total = _row_gradient(
            first if part == 0 else full_end,
            full_end if part == 0 else tl.load(starts + tile + 1),
            q,
            grad,
            lse,
            delta,
            total,
            k_ptr,
            v_ptr,
            k_row,
            v_row,
            of_columns,
            columns_of,
            begin,
            end,
            second,
            last,
            first_column,
            scale,
            DIM,
            PADDED_DIM,
            COLUMNS,
            part == 0,
        )
    _store(dq_ptr + head * dq_head, total * scale, rows, there, dq_row, DIM, PADDED_DIM)


@triton.jit
def _column_gradients(
    first,
    last_index,
    k,
    v,
    total_k,
    total_v,
    q_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    q_row,
    q_head,
    grad_row,
    grad_head,
    ranges,
    of_rows,
    rows_of,
    num_rows,
    columns,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Return the gradients of keys, without the scale, and values after more tiles of rows and all heads of a group."""
    for index in range(GROUP * first, GROUP * last_index):
        rows, there, _ = _numbers_of(of_rows, tl.load(rows_of + index // GROUP), ROWS)
        begin, end, second, last = _load_ranges(ranges, rows, there)
        head = index % GROUP
        q = _load(q_ptr + head * q_head, rows, there, q_row, DIM, PADDED_DIM, False)
        grad = _load(grad_ptr + head * grad_head, rows, there, grad_row, DIM, PADDED_DIM, False)
        lse = _load_lse(lse_ptr + head * num_rows, rows, there)
        delta = tl.load(delta_ptr + head * num_rows + rows, mask=there, other=0.0)
        scores = _scores(q, k, begin, end, second, last, columns, scale * LOG2_E, FULL)
        weights = tl.exp2(scores - lse[:, None])
        total_v += tl.dot(tl.trans(weights).to(grad.dtype), grad, input_precision="ieee")
        dweights = tl.dot(grad, tl.trans(v), input_precision="ieee")
        dscores = weights * (dweights - delta[:, None])
        total_k += tl.dot(tl.trans(dscores).to(q.dtype), q, input_precision="ieee")
    return total_k, total_v


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
    starts,
    full_ends,
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
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradients of a tile of keys and values of one head, from all query heads that share it."""
    tile, kv_head = _place(HEADS)
    first_head = kv_head * GROUP
    columns, are, first_column = _numbers_of(of_columns, tile, COLUMNS)
    k = _load(k_ptr + kv_head * k_head, columns, are, k_row, DIM, PADDED_DIM, False)
    v = _load(v_ptr + kv_head * v_head, columns, are, v_row, DIM, PADDED_DIM, False)
    total_k = tl.zeros((COLUMNS, PADDED_DIM), tl.float32)
    total_v = tl.zeros((COLUMNS, PADDED_DIM), tl.float32)
    first, full_end = tl.load(starts + tile), tl.load(full_ends + tile)
    for part in tl.static_range(2):
        total_k, total_v = _column_gradients(
            first if part == 0 else full_end,
            full_end if part == 0 else tl.load(starts + tile + 1),
            k,
            v,
            total_k,
            total_v,
            q_ptr + first_head * q_head,
            grad_ptr + first_head * grad_head,
            lse_ptr + first_head * num_rows,
            delta_ptr + first_head * num_rows,
            q_row,
            q_head,
            grad_row,
            grad_head,
            ranges,
            of_rows,
            rows_of,
            num_rows,
            columns - first_column,
            scale,
            GROUP,
            DIM,
            PADDED_DIM,
            ROWS,
            part == 0,
        )
    _store(dk_ptr + kv_head * dk_head, total_k * scale, columns, are, dk_row, DIM, PADDED_DIM)
    _store(dv_ptr + kv_head * dk_head, total_v, columns, are, dk_row, DIM, PADDED_DIM)


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
    """Merge rows of one head into out and lse (float32): into rows `numbers`, or without them row by row."""
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
    largest = tl.maximum(tl.maximum(lse, other_lse), -1.0e38)  # -inf - -inf would be NaN
    weight, other_weight = tl.exp(lse - largest), tl.exp(other_lse - largest)
    both = weight + other_weight
    some = tl.where(both > 0.0, both, 1.0)
    sum_of_both = tl.load(at, mask=mask) * (weight / some)[:, None]
    sum_of_both += tl.load(other_at, mask=mask).to(tl.float32) * (other_weight / some)[:, None]
    tl.store(at, sum_of_both, mask=mask)
    tl.store(lse_ptr + head * num_rows + rows, largest + tl.log(both), mask=there)
