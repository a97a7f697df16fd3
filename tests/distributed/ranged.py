"""What the tests of ranged packs share: which keys rows see, what a kernel computes of packs, and random ones."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.dynamic_cp.attention.kernels.choice import Kernel
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.attention.packs import Pack


def sees_of(pack: Pack, num_rows: int, num_columns: int) -> Tensor:
    """Return how often `pack` lets a row see a key, [num_rows, num_columns], pair by pair."""
    ranges = pack.host_ranges
    rows = np.arange(num_rows) if pack.rows is None else pack.rows.cpu().numpy()
    columns = np.arange(num_columns) if pack.columns is None else pack.columns.cpu().numpy()
    seen = np.zeros((num_rows, num_columns), np.int64)
    for of_rows, of_columns in pack.slices():
        for row in range(of_rows.start, of_rows.stop):
            for begin, end in (ranges[row, :2], ranges[row, 2:]):
                np.add.at(seen, (rows[row], columns[of_columns][begin:end]), 1)
    return torch.from_numpy(seen)


def attend(inputs: list[Tensor], packs: list[Pack], kernel: Kernel) -> list[Tensor]:
    """Return what `exact` does, by `kernel`, from the packs one after the other."""
    q, k, v, grad = inputs
    kv, scale = torch.stack((k, v)), q.shape[-1] ** -0.5
    sums = RowSums(q, kernel, scale)
    for pack in packs:
        sums.attend(pack, kv)
    rows = RowGradients(grad, q, sums.out_THD.to(q.dtype), sums.lse_HT, kernel, scale)
    total = torch.zeros_like(kv, dtype=torch.float32)
    for pack in packs:
        total = rows.attend(pack, kv, total)
    return [sums.out_THD, sums.lse_HT, rows.grad_q_THD, *total]


def attend_in_pieces(inputs: list[Tensor], pack: Pack, kernel: Kernel) -> list[Tensor]:
    """Return the same of one pack, from tensors of which no two neighbouring elements lie side by side in memory."""

    def spread(values: Tensor) -> Tensor:
        return torch.stack((values, torch.full_like(values, torch.nan)), -1)[..., 0]

    q, k, v, grad = map(spread, inputs)
    assert not any(x.stride(-1) == 1 for x in (q, k, v, grad))
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, pack, scale)
    return [out, lse, *kernel.backward(grad, q, k, v, spread(out), spread(lse), pack, scale)]


def random_ranges(num_rows: int, num_columns: int, seed: int) -> NDArray[np.int32]:
    """Return two ranges for each row that share no key, in any order; many are empty."""
    random = np.random.default_rng(seed)
    ranges = np.sort(random.integers(0, num_columns + 1, (num_rows, 4)), axis=1).astype(np.int32)
    kind = random.integers(0, 5, num_rows)
    ranges[kind == 0] = ranges[kind == 0][:, [2, 3, 0, 1]]
    ranges[kind == 1, 2:] = 0
    ranges[kind == 2] = 0
    return ranges


def random_pack(seed: int, device: torch.device) -> tuple[Pack, int, int]:
    """Return a pack and how many rows and columns it is of; rows in any order, some in no rectangle, or blind."""
    random = np.random.default_rng(seed)
    row_seqlens, column_seqlens = random.integers(1, 50, (2, 3)).tolist()
    num_rows, num_columns = sum(row_seqlens) + 3, 60
    ranges = [random_ranges(*shape, seed) for shape in zip(row_seqlens, column_seqlens, strict=True)]
    pack = Pack.build(
        row_seqlens, column_seqlens, device=device, rows=random.permutation(num_rows)[: sum(row_seqlens)],
        columns=np.concatenate([random.permutation(num_columns)[:number] for number in column_seqlens]),
        key_ranges=np.concatenate(ranges),
    )  # fmt: skip
    return pack, num_rows, num_columns
