"""One prompt with several responses as one sample: its loss and gradients are those of the pairs trained apart.

The prompt is there once. Each response sees it and itself, and its positions go on from the prompt's end. The last
token of the prompt is there once for each response, because in each it has another label: the token with which that
begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import SharedQuestion
from megatron.dynamic_cp.data.sample_tokens import SampleTokens


def shared_question(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> tuple[SampleTokens, SharedQuestion]:
    """Return the tokens of the sample, with a loss on those of the responses, and its mask.

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
    shared, last = list(prompt[:-1]), prompt[-1]
    tokens, labels, loss = shared[:], [0] * len(shared), [0.0] * len(shared)
    for response in responses:
        tokens += [last, *response]
        labels += [*response, 0]
        loss += [1.0] * len(response) + [0.0]
    mask = SharedQuestion(len(shared), tuple(1 + len(response) for response in responses))
    columns = np.asarray(tokens, np.int64), np.asarray(labels, np.int64), np.asarray(loss, np.float32)
    return SampleTokens(tokens=columns[0], labels=columns[1], loss_mask=columns[2]), mask
