"""What a module of multi-token prediction reads of the local tokens: columns that are shifted before they are sharded.

The module of depth k (1, 2, ...) gets the token k places further on in the same sample, and predicts the one after it.
The place k further on may be on another lane, or another sample's: so the columns are made where whole samples are at
hand (`data/micro_batches.py`). Behind the end of a sample all of them are 0, and so is its loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

NUM_COLUMNS = 3
"""Tokens, labels and position ids."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FutureColumns:
    """Columns of every depth of a micro-batch with T local tokens, and what was found of their losses.

    Attributes:
        columns: int64 [depth, NUM_COLUMNS, T].
        loss_mask: float32 [depth, T], 1 where the label counts.
        found: filled by the model's last chunk, depth after depth: [sum of the losses that count, their number].
    """

    columns: Tensor
    loss_mask: Tensor
    found: list[Tensor] = field(default_factory=list)

    @property
    def num_depths(self) -> int:
        """Modules that read them."""
        return len(self.loss_mask)

    def inputs(self, depth: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, position ids), each [1, T], of the module of `depth`, which counts from 1."""
        tokens, _, position_ids = self.columns[depth - 1]
        return tokens[None], position_ids[None]

    def targets(self, depth: int) -> tuple[Tensor, Tensor]:
        """Return (labels, loss mask), each [1, T], of the module of `depth`, which counts from 1."""
        return self.columns[depth - 1, 1][None], self.loss_mask[depth - 1][None]
