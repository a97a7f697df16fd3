"""Which documents of an index are prompts with several responses, or trees of turns, and their masks.

A document is the prompt and its responses, one after the other, as many tokens as its samples predict and one. Columns
of the index: `questions`, the documents that are prompts with responses, int64 [Q]; `question_answers`, the tokens of
their responses, one after the other; `first_answers`, which of those is the first of each question, int64 [Q + 1].

A tree is its parts, depth first: what all share, and as answers those that begin where it branches. Where there is one,
there are also `answer_depths`, int64 as the answers, and `question_targets`, the first token that each question learns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.types import Branches, SharedQuestion, Tree
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.source import count


def columns(scanned: Mapping[str, NDArray[np.int64]], *, of_chats: bool) -> dict[str, NDArray[np.int64]]:
    """Return the columns of an index from those of `scan`; none where there are no questions."""
    questions, answers = scanned["questions"], scanned["answers"]
    if not len(questions):
        return {}
    first_answers = np.concatenate([[0], np.cumsum(scanned["num_answers"])])
    found = {"questions": questions, "question_answers": answers, "first_answers": first_answers}
    if of_chats:  # none is a tree
        return found
    targets, of_prompts = scanned["first_targets"], np.add.reduceat(answers, first_answers[:-1])
    if (scanned["depths"] > 1).any() or (targets != scanned["lengths"][questions] - of_prompts).any():
        found |= {"answer_depths": scanned["depths"], "question_targets": targets}
    return found


class Questions:
    """The prompts with responses, and the trees, among the documents of an index."""

    def __init__(self, index: LengthIndex) -> None:
        none = np.zeros(0, np.int64)
        # Copies: global batches have their masks from these, whatever becomes of the file of the index.
        self._lengths = np.array(index.columns["lengths"])
        self._documents = np.array(index.columns.get("questions", none))
        self._answers = np.array(index.columns.get("question_answers", none))
        self._first_answers = np.array(index.columns.get("first_answers", np.zeros(1, np.int64)))
        self._depths = np.array(index.columns.get("answer_depths", np.ones_like(self._answers)))
        self._targets = np.array(index.columns.get("question_targets", none))

    @property
    def has_masks(self) -> bool:
        """Whether a document has several branches, so that they must not see each other."""
        return len(self._answers) > len(self._documents)

    def parts(self, document: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return tokens and depth of each response, or part of a tree, of a document; none where it is no question."""
        place = int(np.searchsorted(self._documents, document))
        if place == len(self._documents) or self._documents[place] != document:
            return (), ()
        of_question = slice(*self._first_answers[place : place + 2].tolist())
        return tuple(self._answers[of_question].tolist()), tuple(self._depths[of_question].tolist())

    def first_targets(self) -> NDArray[np.int64] | None:
        """Return the first token that is learned of each document, 1 where it is no question; None: there is none."""
        if not len(self._documents):
            return None
        first_targets = np.ones_like(self._lengths)
        num_learned = np.add.reduceat(self._answers, self._first_answers[:-1])
        of_prompts = self._lengths[self._documents] - num_learned
        first_targets[self._documents] = self._targets if len(self._targets) else of_prompts
        return first_targets

    def mask(self, document: int, num_predicted: int) -> Branches | None:
        """Return the mask of the sample that predicts the first tokens of a document; None where it is causal."""
        answers, depths = self.parts(document)
        shared = int(self._lengths[document]) - sum(answers) - 1
        rest, kept = num_predicted - shared, []
        for answer in answers:
            if rest <= 0:
                break
            kept.append(min(answer, rest))
            rest -= answer
        depths = depths[: len(kept)]
        if depths == tuple(range(1, len(kept) + 1)):  # nothing of it branches
            return None
        return SharedQuestion(shared, tuple(kept)) if set(depths) == {1} else Tree((shared, *kept), (0, *depths))

    def identity(self) -> bytes:
        """Return what decides the masks besides the lengths of documents; nothing where there are no questions."""
        if not len(self._documents):
            return b""
        of_trees = (self._depths, self._targets) if len(self._targets) else ()
        return b"".join(one.tobytes() for one in (self._documents, self._answers, self._first_answers, *of_trees))

    def describe(self) -> str:
        """Return the numbers of prompts and responses or turns, to add to the description of a source."""
        if not len(self._documents):
            return ""
        prompts = count(len(self._documents), "prompt")
        what = ("response or turn", "responses or turns") if len(self._targets) else ("response",)
        responses = count(len(self._answers), *what)
        return f", {prompts} with {responses} of {self._answers.sum()} tokens"
