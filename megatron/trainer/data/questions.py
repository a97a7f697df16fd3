"""Which documents of an index are prompts with several responses, and the masks that this gives them.

A document is the prompt and its responses, one after the other, as many tokens as its samples predict and one. Columns
of the index: `questions`, the documents that are prompts with responses, int64 [Q]; `question_answers`, the tokens of
their responses, one after the other; `first_answers`, which of those is the first of each question, int64 [Q + 1].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.types import SharedQuestion
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.source import count


def columns(
    questions: NDArray[np.int64], num_answers: NDArray[np.int64], answers: NDArray[np.int64]
) -> dict[str, NDArray[np.int64]]:
    """Return the columns of an index; none where there are no questions."""
    if not len(questions):
        return {}
    return {
        "questions": questions,
        "question_answers": answers,
        "first_answers": np.concatenate([[0], np.cumsum(num_answers)]),
    }


class Questions:
    """The prompts with responses among the documents of an index."""

    def __init__(self, index: LengthIndex) -> None:
        none = np.zeros(0, np.int64)
        # Copies: global batches have their masks from these, whatever becomes of the file of the index.
        self._lengths = np.array(index.columns["lengths"])
        self._documents = np.array(index.columns.get("questions", none))
        self._answers = np.array(index.columns.get("question_answers", none))
        self._first_answers = np.array(index.columns.get("first_answers", np.zeros(1, np.int64)))

    @property
    def has_masks(self) -> bool:
        """Whether a document has several responses, so that they must not see each other."""
        return len(self._answers) > len(self._documents)

    def answers(self, document: int) -> list[int]:
        """Return the tokens of each response of a document; none where it is no question."""
        place = int(np.searchsorted(self._documents, document))
        if place == len(self._documents) or self._documents[place] != document:
            return []
        first, end = self._first_answers[place : place + 2].tolist()
        answers: list[int] = self._answers[first:end].tolist()
        return answers

    def first_targets(self) -> NDArray[np.int64] | None:
        """Return the first token that is learned of each document, 1 where it is no question; None: there is none."""
        if not len(self._documents):
            return None
        first_targets = np.ones_like(self._lengths)
        num_learned = np.add.reduceat(self._answers, self._first_answers[:-1])
        first_targets[self._documents] = self._lengths[self._documents] - num_learned
        return first_targets

    def mask(self, document: int, num_predicted: int) -> SharedQuestion | None:
        """Return the mask of the sample that predicts the first tokens of a document; None where it is causal."""
        answers = self.answers(document)
        if len(answers) < 2:
            return None
        shared = int(self._lengths[document]) - sum(answers) - 1
        rest, kept = num_predicted - shared, []
        for answer in answers:
            if rest <= 0:
                break
            kept.append(min(answer, rest))
            rest -= answer
        return SharedQuestion(shared, tuple(kept)) if len(kept) > 1 else None

    def identity(self) -> bytes:
        """Return what decides the masks besides the lengths of documents; nothing where there are no questions."""
        if not len(self._documents):
            return b""
        return b"".join(column.tobytes() for column in (self._documents, self._answers, self._first_answers))

    def describe(self) -> str:
        """Return the numbers of prompts and responses, to add to the description of a source."""
        if not len(self._documents):
            return ""
        prompts, responses = count(len(self._documents), "prompt"), count(len(self._answers), "response")
        return f", {prompts} with {responses} of {self._answers.sum()} tokens"
