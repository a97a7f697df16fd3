"""What Megatron-LM's own GPTDataset makes of each document, and what --use-varlen-dataset does."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

Document = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Tokens, labels and loss mask."""


def gpt_documents(prefix: str, indices: Sequence[int], config: GPTDatasetConfig) -> list[Document]:
    """Return what a GPTDataset makes of the documents `indices`, sorted, each without its last token."""
    low_level = GPTDataset.build_low_level_dataset(prefix, config)
    config = copy.copy(config)
    config.sequence_length = int(low_level.sequence_lengths[np.asarray(indices)].sum()) - 1
    dataset = GPTDataset(low_level, prefix, np.asarray(indices, dtype=np.int32), None, Split.train, config)
    assert len(dataset) == 1
    item, documents, first = dataset[0], [], 0
    for length in low_level.sequence_lengths[dataset.document_index].tolist():
        documents.append(as_document(item, first, first + length - 1))
        first += length
    assert first == config.sequence_length + 1
    return sorted(documents)


def as_document(item: Mapping[str, Any], first: int = 0, end: int | None = None) -> Document:
    """Return positions `first` .. `end` - 1 of an item of a data set."""
    tokens, labels, mask = (tuple(item[name][first:end].tolist()) for name in ("tokens", "labels", "loss_mask"))
    return tokens, labels, mask


def varlen_documents(dataset: Iterable[Mapping[str, Any]], num_samples: int) -> list[Document]:
    """Return the different samples among the first ones of one of our data sets, sorted."""
    items = (dataset[index] for index in range(num_samples))  # type: ignore[index]
    return sorted({as_document(item) for item in items})
