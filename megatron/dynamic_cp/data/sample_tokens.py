"""What is read of one sample: tokens, labels and loss mask; also of several responses to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import Branches, SharedQuestion


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
        loss_mask: float32 [S], 0 where the label does not count, else 1, or the number of branches that share it.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]

    @classmethod
    def repeating(cls, tokens: NDArray[np.int64]) -> SampleTokens:
        """Return a sample for measuring: every token is its own label, and all count."""
        return cls(tokens=tokens, labels=tokens, loss_mask=np.ones(len(tokens), np.float32))


def shared_question(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> tuple[SampleTokens, SharedQuestion]:
    """Return one prompt with several responses as one sample, with a loss on the responses, and its mask.

    Loss and gradients equal those of the pairs trained apart. Each response sees the prompt and itself, and its
    positions go on from the prompt's end. The prompt is there once but for its last token, which each response repeats,
    because its label is the response's first token. So the labels are prompt and responses one after the other. Raises
    InvalidInputError for a prompt below 2 tokens, no response or an empty one.
    """
    if len(prompt) < 2 or not responses or min(map(len, responses)) < 1:
        raise InvalidInputError(
            f"a prompt of {len(prompt)} tokens has {len(responses)} responses, the shortest of "
            f"{min(map(len, responses), default=0)}: at least 2 tokens, and 1 response of 1 token are needed"
        )
    document = np.concatenate([prompt, *responses]).astype(np.int64)
    mask = SharedQuestion(len(prompt) - 1, tuple(map(len, responses)))
    is_target = np.arange(len(document)) >= len(prompt)
    return sample_of(document, is_target, mask), mask


def sample_of(document: NDArray[np.int64], is_target: NDArray[np.bool_] | None, mask: Branches | None) -> SampleTokens:
    """Return the sample of a document, or of its beginning: all but its first token are labels. A learned token counts
    once for each branch that it is part of. `is_target` says which tokens are learned, None: all. With a `mask` of
    branches, segments follow each other in the document, each with its first token that has a label."""
    tokens = document[:-1].copy()  # a view would share its memory with the labels
    loss_mask = np.ones(len(tokens), np.float32) if is_target is None else is_target[1:].astype(np.float32)
    if mask is not None:
        segments = mask.segments()
        for segment in segments[1:]:
            tokens[segment.start] = document[segments[segment.parent].stop]
        loss_mask *= np.repeat([one.num_branches for one in segments], [one.num_tokens for one in segments])
    return SampleTokens(tokens=tokens, labels=document[1:], loss_mask=loss_mask)
