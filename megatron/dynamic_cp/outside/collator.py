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
from dynamic_cp.types import Problem, Sample, SharedQuestion
from megatron.dynamic_cp.data.micro_batches import pack_step
from megatron.dynamic_cp.data.sample_tokens import SampleTokens
from megatron.dynamic_cp.data.shared_question import shared_question
from megatron.dynamic_cp.outside.lanes import LaneStep, plan_for_lane

IGNORED = -100
"""Label of a token without a loss, as in torch and transformers."""


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
            features: one mapping a sample with "input_ids" [S] and, if some tokens have no loss, "labels" [S] that are
                -100 there. Labels are not shifted yet, as transformers wants them: labels[i] is that of input_ids[i].
                Where the model is causal, shifting happens here, before sharding: afterwards a token's successor may be
                on another lane. With full attention (masked LMs) they are needed, and stay as they are. Or one with
                "prompt_ids" [P] and "response_ids", a list of [A]: one sample that trains all responses
                (`data.shared_question`).

        Raises:
            DataError: labels of another length, or samples that are padded.
            InvalidInputError: a prompt of fewer than 2 tokens, or without a response.
            InfeasibleSampleError: a sample that no CP size can hold.
        """
        causal = self.problem.model.causal_attention
        read = [_read(index, feature, causal) for index, feature in enumerate(features)]
        values = [one for one, _ in read]
        samples = [Sample(sample_id=index, seqlen=len(one.tokens), mask=mask) for index, (one, mask) in enumerate(read)]
        plan = plan_for_lane(self.problem, samples, self.lane)
        digest = hashlib.sha256(plan.facts.digest.encode())
        for one in values:
            digest.update(one.tokens)
            digest.update(one.labels)
        return LaneStep(plan=plan, packed=pack_step(plan, values.__getitem__), digest=digest.hexdigest())


def _read(index: int, feature: Mapping[str, Any], causal: bool) -> tuple[SampleTokens, SharedQuestion | None]:
    if "prompt_ids" in feature:
        return shared_question(feature["prompt_ids"], feature["response_ids"])
    return _values(index, feature, causal), None


def _values(index: int, feature: Mapping[str, Any], causal: bool) -> SampleTokens:
    if not causal and "labels" not in feature:
        raise DataError(
            f"sample {index} has input_ids and 0 labels, the model's attention is full: a token sees itself, so give "
            "labels, -100 where there is no loss (DataCollatorForLanguageModeling masks tokens and makes them)",
            sample=index,
        )
    tokens = np.asarray(feature["input_ids"], dtype=np.int64)
    labels = np.asarray(feature.get("labels", tokens), dtype=np.int64)
    if tokens.ndim != 1 or labels.shape != tokens.shape:
        raise DataError(
            f"sample {index} has input_ids of shape {tokens.shape} and labels of shape {labels.shape}: both must be "
            "one-dimensional and equally long",
            sample=index,
        )
    real = int(np.asarray(feature.get("attention_mask", np.ones(len(tokens)))).sum())
    if real != len(tokens):
        raise DataError(
            f"sample {index} has {len(tokens)} tokens, {real} of them are not padding: give samples without padding "
            "(tokenizer(..., padding=False)); the plan pads as little as its CP sizes need",
            sample=index,
            num_tokens=len(tokens),
            num_real_tokens=real,
        )
    if causal:
        labels = np.append(labels[1:], IGNORED)
    mask = labels != IGNORED
    return SampleTokens(tokens=tokens, labels=np.where(mask, labels, 0), loss_mask=mask.astype(np.float32))
