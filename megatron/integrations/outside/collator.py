"""A data collator that turns the samples of a global batch into what this lane computes of them.

    loader = DataLoader(dataset, batch_size=global_batch_size, collate_fn=PlannedCollator(problem, lanes.lane))
    for step in lanes.agreed(loader): ...

Every lane's loader must yield the same global batches: use a sampler with a fixed seed that does not split by rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamic_cp.errors import DataError
from dynamic_cp.types import Branches, Problem, Sample
from megatron.dynamic_cp.data.micro_batches import pack_step
from megatron.dynamic_cp.data.sample_tokens import SampleTokens, shared_question
from megatron.integrations.outside.documents import HONOURED, IGNORED, Document, check_columns, documents_of
from megatron.integrations.outside.lanes import LaneStep, plan_for_lane
from megatron.integrations.turns import Turn, tree_of_turns

_QUESTION = ("prompt_ids", "response_ids")
_TREE = "turns"
COLUMNS = (*HONOURED, *_QUESTION, _TREE)
"""Columns of rows that change what is trained."""


class PlannedCollator:
    """Plans, packs, pads and shards a list of samples. No collective: it may run in a DataLoader's workers.

    Args:
        problem: as given to `Lanes.build`.
        lane: of this rank.
    """

    def __init__(self, problem: Problem, lane: int) -> None:
        self.problem, self.lane = problem, lane

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> LaneStep:
        """Return this lane's part of a global batch.

        Args:
            features: rows with "input_ids" [S], of one document or of several, and what else `documents_of` honours.
                Labels are not shifted yet, as transformers wants them: labels[i] is that of input_ids[i]. Where the
                model is causal, shifting happens here, before sharding: afterwards a token's successor may be on
                another lane. With full attention (masked LMs) they are needed, and stay as they are. Or rows with
                "prompt_ids" [P] and "response_ids", a list of [A]: one sample that trains all responses
                (`data.shared_question`). Or rows with "turns", a tree of {"tokens", "learned", "children"}: one sample
                that trains all its branches (`data.turns`).

        Raises:
            DataError: what `documents_of` refuses.
            InvalidInputError: a prompt of fewer than 2 tokens, or without a response; a turn that is none.
            InfeasibleSampleError: a sample that no CP size can hold.
        """
        causal = self.problem.model.causal_attention
        read = [sample for index, feature in enumerate(features) for sample in read_row(index, feature, causal)]
        values = [one for one, _ in read]
        samples = [Sample(sample_id=index, seqlen=len(one.tokens), mask=mask) for index, (one, mask) in enumerate(read)]
        plan = plan_for_lane(self.problem, samples, self.lane)
        digest = hashlib.sha256(plan.facts.digest.encode())
        for one in values:
            digest.update(one.tokens)
            digest.update(one.labels)
            digest.update(one.loss_mask)
        return LaneStep(plan=plan, packed=pack_step(plan, values.__getitem__), digest=digest.hexdigest())


def read_row(index: int, feature: Mapping[str, Any], causal: bool) -> list[tuple[SampleTokens, Branches | None]]:
    """Return the samples of a row as `PlannedCollator` takes it, each with its mask.

    Args:
        index: of the row, for messages.
        causal: whether the model's attention is.
    """
    if all(name in feature for name in _QUESTION):
        check_columns(index, feature, _QUESTION)
        return [shared_question(feature["prompt_ids"], feature["response_ids"])]
    if feature.get(_TREE) is not None:
        check_columns(index, feature, (_TREE,))
        return [tree_of_turns(Turn.read(feature[_TREE], f"sample {index}: turn"))]
    if not causal and feature.get("labels") is None:
        raise DataError(
            f"sample {index} has input_ids and 0 labels, the model's attention is full: a token sees itself, so give "
            "labels, -100 where there is no loss (DataCollatorForLanguageModeling masks tokens and makes them)",
            sample=index,
        )
    return [(_values(document, causal), None) for document in documents_of(index, feature, causal=causal)]


def _values(document: Document, causal: bool) -> SampleTokens:
    labels = np.append(document.labels[1:], IGNORED) if causal else document.labels
    mask = labels != IGNORED
    return SampleTokens(tokens=document.tokens, labels=np.where(mask, labels, 0), loss_mask=mask.astype(np.float32))
