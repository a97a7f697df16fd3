"""What samples bring besides their tokens: a value for each token, for each response, or for the sample."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynamic_cp.errors import DataError
from megatron.dynamic_cp.attention.packs import to_device
from megatron.integrations.post_training.rows import MicroBatchRows, Rows

OUTPUTS = ("log_probs", "entropies", "values")
"""What models compute of tokens."""
RESERVED = (*OUTPUTS, "num_tokens")

GivenColumns = Mapping[str, Sequence[Any]]
"""Name -> for each sample, in the caller's order: [S] values, one for each response, or a single one; or one value for
each response of all samples, such as `PassOutputs.sums`.

The value at place i belongs to the label at place i, which follows token i. On all ranks the same.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Columns of a global batch as flat tensors.

    Attributes:
        of_tokens: name -> float32 [tokens].
        of_responses: name -> float32 [responses].
    """

    of_tokens: Mapping[str, Tensor]
    of_responses: Mapping[str, Tensor]

    @classmethod
    def of(cls, rows: Rows, given: GivenColumns) -> Columns:
        """Return the columns of samples.

        Raises:
            DataError: a column with a name that is taken, that has not as many samples, or a sample's values that are
                neither for tokens nor for responses, no numbers, or not finite.
        """
        of_tokens, of_responses = {}, {}
        for name, values in given.items():
            if name in RESERVED:
                raise DataError(
                    f"column {name!r} has one of {len(RESERVED)} names that are taken ({', '.join(RESERVED)}): "
                    "rename it",
                    column=name,
                )
            if len(values) == rows.num_responses != len(rows.samples):
                values = np.split(_array(name, values), rows.first_responses[1:-1])
            if len(values) != len(rows.samples):
                raise DataError(
                    f"column {name!r} has {len(values)} entries, the pass {len(rows.samples)} samples of "
                    f"{rows.num_responses} responses: give one for each sample, in the order of the samples",
                    column=name,
                )
            arrays = [_values(name, row, value) for row, value in enumerate(values)]
            if _are_of_responses(name, rows, arrays):
                numbers = np.diff(rows.first_responses)
                arrays = [np.broadcast_to(array.ravel(), n) for array, n in zip(arrays, numbers, strict=True)]
                of_responses[name] = _flat(arrays)
            else:
                of_tokens[name] = _flat(arrays)
        return cls(of_tokens=of_tokens, of_responses=of_responses)

    @property
    def names(self) -> set[str]:
        """All names."""
        return {*self.of_tokens, *self.of_responses}

    def digest(self) -> str:
        """Return a digest of all values (hex)."""
        digest = hashlib.sha256()
        for name, values in [*self.of_tokens.items(), *self.of_responses.items()]:
            digest.update(f"{name} {len(values)}\n".encode())
            digest.update(values.numpy())
        return digest.hexdigest()

    def to(self, device: torch.device) -> Columns:
        """Return them on `device`."""
        of_tokens, of_responses = (
            {name: to_device(values.numpy(), device) for name, values in columns.items()}
            for columns in (self.of_tokens, self.of_responses)
        )
        return Columns(of_tokens=of_tokens, of_responses=of_responses)

    def on_entries(self, rows: MicroBatchRows) -> dict[str, Tensor]:
        """Return the values of local entries, each [entries]; those of a response are the same for all its tokens."""
        places = rows.places[rows.tokens]
        shards = {name: values[places] for name, values in self.of_tokens.items()}
        return shards | {name: values[rows.responses] for name, values in self.of_responses.items()}

    def on_responses(self, rows: MicroBatchRows) -> dict[str, Tensor]:
        """Return the values of the responses that this lane works with, each [present]."""
        return {name: values[rows.present] for name, values in self.of_responses.items()}


def _values(name: str, row: int, value: Any) -> NDArray[np.float32]:
    array = _array(name, value)
    num_bad = int(array.size - np.isfinite(array).sum())
    if num_bad:
        raise DataError(
            f"column {name!r} has {num_bad} values of {array.size} that are not finite in the sample at place {row}: "
            "give 0 where a token has no loss",
            column=name,
        )
    return array


def _array(name: str, value: Any) -> NDArray[np.float32]:
    try:
        return np.asarray(value.detach().float().cpu() if isinstance(value, Tensor) else value, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"column {name!r} is not of numbers ({error}): give arrays or tensors", column=name) from None


def _are_of_responses(name: str, rows: Rows, arrays: Sequence[NDArray[np.float32]]) -> bool:
    """Return whether a column has a value for each response or sample, rather than for each token."""
    numbers = np.diff(rows.first_responses).tolist()
    of_responses = [array.size in (1, number) for array, number in zip(arrays, numbers, strict=True)]
    of_tokens = [array.shape == (sample.seqlen,) for array, sample in zip(arrays, rows.samples, strict=True)]
    if all(of_responses) or all(of_tokens):
        return all(of_responses)
    fits_neither = [not one and not other for one, other in zip(of_responses, of_tokens, strict=True)]
    row = fits_neither.index(True) if any(fits_neither) else of_tokens.index(False)
    sample, number = rows.samples[row], numbers[row]
    raise DataError(
        f"column {name!r} has {arrays[row].size} values in the sample at place {row} (id {sample.sample_id}), which "
        f"has {sample.seqlen} tokens and {number} response{'s' * (number > 1)}: give all samples one value for each "
        "token, or all one for each response",
        column=name,
        sample_id=sample.sample_id,
    )


def _flat(arrays: Sequence[NDArray[np.float32]]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))
