"""What is read of one sample: its tokens, labels and loss mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class HasTokens(Protocol):
    """What a loop's own reader may return; labels are shifted already: labels[i] follows tokens[i]."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleTokens:
    """A sample of S tokens; labels[i] is the token after tokens[i].

    Attributes:
        tokens, labels: int64 [S].
        loss_mask: float32 [S], 1 where the label counts: everywhere, or in a chat where its assistant wrote it.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]

    @classmethod
    def repeating(cls, tokens: NDArray[np.int64]) -> SampleTokens:
        """Return a sample for measuring: every token is its own label, and all of them count."""
        return cls(tokens=tokens, labels=tokens, loss_mask=np.ones(len(tokens), np.float32))
