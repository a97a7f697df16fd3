"""What is read of one sample: tokens, labels and loss mask; of plain samples and of several responses to a prompt."""

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
        loss_mask: float32 [S], 1 where the label counts: everywhere, or in a chat where its assistant wrote it.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]

    @classmethod
    def repeating(cls, tokens: NDArray[np.int64]) -> SampleTokens:
        """Return a sample for measuring: every token is its own label, and all of them count."""
        return cls(tokens=tokens, labels=tokens, loss_mask=np.ones(len(tokens), np.float32))


def shared_question(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> tuple[SampleTokens, SharedQuestion]:
    """Return one prompt with several responses as one sample, with a loss on the responses, and its mask.

    Its loss and gradients are those of the pairs trained apart. The prompt is there once. Each response sees it and
    itself, and its positions go on from the prompt's end. The last token of the prompt is there once for each response,
    because its label is the first token of that response. So the labels are prompt and responses one after the other.

    Args:
        prompt: at least 2 tokens.
        responses: at least 1 of at least 1 token; their ends of document are tokens like others.

    Raises:
        InvalidInputError: fewer.
    """
    if len(prompt) < 2 or not responses or min(map(len, responses)) < 1:
        raise InvalidInputError(
            f"a prompt of {len(prompt)} tokens has {len(responses)} responses, the shortest of "
            f"{min(map(len, responses), default=0)}: at least 2 tokens, and 1 response of 1 token are needed",
            prompt=len(prompt),
            responses=len(responses),
        )
    document = np.concatenate([prompt, *responses]).astype(np.int64)
    mask = SharedQuestion(len(prompt) - 1, tuple(map(len, responses)))
    is_target = np.arange(len(document)) >= len(prompt)
    return sample_of(document, is_target, mask), mask


def sample_of(document: NDArray[np.int64], is_target: NDArray[np.bool_] | None, mask: Branches | None) -> SampleTokens:
    """Return the sample of a document, or of its beginning: all but its first token are labels.

    A token that is learned counts once for each branch that it is part of, as with the branches apart.

    Args:
        document: of segments these one after the other, each with its first token that has a label.
        is_target: which of its tokens are learned; None: all.
        mask: of such a document; None: one of other kinds.
    """
    tokens = document[:-1].copy()  # a view would share its memory with the labels
    loss_mask = np.ones(len(tokens), np.float32) if is_target is None else is_target[1:].astype(np.float32)
    if mask is not None:
        segments = mask.segments()
        for segment in segments[1:]:
            tokens[segment.start] = document[segments[segment.parent].stop]
        loss_mask *= np.repeat([one.num_branches for one in segments], [one.num_tokens for one in segments])
    return SampleTokens(tokens=tokens, labels=document[1:], loss_mask=loss_mask)
