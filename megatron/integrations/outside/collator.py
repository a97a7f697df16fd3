"""Reads rows of data sets, and turns those of a global batch into what this lane computes of them.

    loader = DataLoader(dataset, batch_size=global_batch_size, collate_fn=PlannedCollator(problem, lanes.lane))
    for step in lanes.agreed(loader): ...

Every lane's loader must yield the same global batches: use a sampler with a fixed seed that does not split by rank.
Rows are read as tokenizers, TRL and other packers write them; a column that would change what is trained is honoured or
refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from dynamic_cp.types import Branches, Problem, Sample
from megatron.dynamic_cp.data.micro_batches import pack_step
from megatron.dynamic_cp.data.sample_tokens import SampleTokens, shared_question
from megatron.integrations.outside.lanes import LaneStep, plan_for_lane
from megatron.integrations.turns import Turn, tree_of_turns

IGNORED = -100
"""Label of a token without a loss, as in torch and transformers."""

LOSS_MASKS = ("completion_mask", "assistant_masks")
HONOURED = ("input_ids", "labels", *LOSS_MASKS, "attention_mask", "seq_lengths", "position_ids")
_ALWAYS_IDLE = ("special_tokens_mask", "offset_mapping", "word_ids", "length")
_IDLE_IF_ZERO = ("token_type_ids",)
_WEIGHTS = ("weight", "loss_weight", "sample_weight")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """Tokens [S] that attend to each other and to no others, and their labels [S], not shifted; IGNORED: no loss."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]


def documents_of(index: int, row: Mapping[str, Any], *, causal: bool = True) -> list[Document]:
    """Return the documents of a row: one, or those that `seq_lengths` or restarting `position_ids` divide it into.

    A token has a loss where "labels" (default: the tokens), "completion_mask" and "assistant_masks" all say so; the
    first of a document has none if attention is causal, because nothing predicts it. `index` of the row is for
    messages.

    Raises DataError: columns that disagree, padding, or a column that would change the training and is not supported.
    """
    row = {name: value for name, value in row.items() if value is not None}
    if "input_ids" not in row:
        raise DataError(
            f"sample {index} has {', '.join(map(repr, row)) or 'no column'} and no input_ids: tokenize it first",
            sample=index,
        )
    check_columns(index, row, HONOURED)
    tokens = np.asarray(row["input_ids"], dtype=np.int64)
    labels = np.array(_column(index, row, "labels", tokens), dtype=np.int64)
    real = int(_mask(index, row, "attention_mask", tokens).sum())
    if real != len(tokens):
        raise DataError(
            f"sample {index} has {len(tokens)} tokens, {real} of them are not padding: give samples without padding "
            "(tokenizer(..., padding=False)); the plan pads as little as its CP sizes need",
            sample=index,
        )
    for name in LOSS_MASKS:
        labels[~_mask(index, row, name, tokens)] = IGNORED
    ends = np.cumsum(_lengths(index, row, tokens))
    firsts = np.append(0, ends[:-1])
    if causal:
        labels[firsts[firsts < len(labels)]] = IGNORED
    return [
        Document(tokens=tokens[first:end], labels=labels[first:end]) for first, end in zip(firsts, ends, strict=True)
    ]


def check_columns(index: int, row: Mapping[str, Any], heeded: Sequence[str]) -> None:
    """Raise DataError for a column that is not `heeded` and would change what is trained; texts and numbers do not."""
    for name, value in row.items():
        if name in heeded or name in _ALWAYS_IDLE or value is None:
            continue
        if name in _IDLE_IF_ZERO and not np.any(np.asarray(value)):
            continue
        if name in _WEIGHTS or not (isinstance(value, (int, float, np.number)) or _is_words(value)):
            raise DataError(
                f"sample {index} has {name!r}, which nothing here heeds (heeded: {', '.join(heeded)}): remove the "
                "column if the loss does not need it",
                sample=index,
            )


def _is_words(value: Any) -> bool:
    """Return whether a value is text or objects, alone or in a list."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(entry, (str, bytes, Mapping)) for entry in values)


def _column(index: int, row: Mapping[str, Any], name: str, tokens: NDArray[np.int64]) -> NDArray[Any]:
    """Return a column with one entry a token; without it the tokens themselves."""
    values = np.asarray(row.get(name, tokens))
    if tokens.ndim != 1 or values.shape != tokens.shape:
        raise DataError(
            f"sample {index} has input_ids of shape {tokens.shape} and {name} of shape {values.shape}: both must be "
            "one-dimensional and equally long",
            sample=index,
        )
    return values


def _mask(index: int, row: Mapping[str, Any], name: str, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    if name not in row:
        return np.ones(len(tokens), np.bool_)
    values = _column(index, row, name, tokens)
    wrong = (values != 0) & (values != 1)
    if wrong.any():
        raise DataError(f"sample {index}: {name} has {values[wrong][0]}, 0 and 1 are needed", sample=index)
    return values.astype(np.bool_)


def _lengths(index: int, row: Mapping[str, Any], tokens: NDArray[np.int64]) -> list[int]:
    """Return the number of tokens of each document of a row."""
    by_positions = _lengths_by_positions(index, row, tokens)
    if "seq_lengths" not in row:
        return by_positions or [len(tokens)]
    lengths = np.asarray(row["seq_lengths"]).tolist()
    if min(lengths, default=1) < 1:
        raise DataError(
            f"sample {index} has seq_lengths {lengths}: every document needs at least 1 token", sample=index
        )
    if sum(lengths) != len(tokens):
        raise DataError(
            f"sample {index}: seq_lengths adds up to {sum(lengths)}, it has {len(tokens)} tokens: pack it again",
            sample=index,
        )
    if by_positions and by_positions != lengths:
        raise DataError(
            f"sample {index} has seq_lengths {lengths}, its position_ids say {by_positions}: leave one of them out",
            sample=index,
        )
    return lengths


def _lengths_by_positions(index: int, row: Mapping[str, Any], tokens: NDArray[np.int64]) -> list[int]:
    """Return the same from positions, which start from 0 in every document; [] if the row has none."""
    if "position_ids" not in row:
        return []
    positions = _column(index, row, "position_ids", tokens)
    wrong = (positions != 0) & (np.diff(positions, prepend=-1) != 1)
    if wrong.any():
        place = int(wrong.argmax())
        after = f" after {positions[place - 1]}" if place else ""
        raise DataError(
            f"sample {index}: token {place} (from 0) has position {positions[place]}{after}: positions count on from 0 "
            "in every document; remove position_ids if they do not mark documents",
            sample=index,
        )
    return np.diff(np.append(np.flatnonzero(positions == 0), len(positions))).tolist()


_QUESTION = ("prompt_ids", "response_ids")
_TREE = "turns"
COLUMNS = (*HONOURED, *_QUESTION, _TREE)
"""Columns of rows that change what is trained."""


class PlannedCollator:
    """Plans, packs, pads and shards a global batch for `lane`, without collectives: DataLoader workers may run it."""

    def __init__(self, problem: Problem, lane: int) -> None:
        self.problem, self.lane = problem, lane

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> LaneStep:
        """Return this lane's part of a global batch, given as rows of one of three kinds.

        - "input_ids" [S], of one document or several, with what else `documents_of` honours. labels[i] is that of
          input_ids[i], as transformers wants it. For causal models they are shifted here, because after sharding a
          token's successor may be on another lane. With full attention (masked LMs) they are needed, and stay.
        - "prompt_ids" [P] and "response_ids", a list of [A]: one sample of all responses (`data.shared_question`).
        - "turns", a tree of {"tokens", "learned", "children"}: one sample that trains all its branches (`turns`).

        Raises:
            DataError: what `documents_of` refuses.
            InvalidInputError: a prompt of fewer than 2 tokens, or without a response; a malformed turn.
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
    """Return the samples of a row as `PlannedCollator` takes it, each with its mask; `index` is for messages."""
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
