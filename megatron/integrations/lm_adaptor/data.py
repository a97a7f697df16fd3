"""Megatron-LM's data sets, read in global batches of any size.

Lane r of N draws samples r, r + N, ... of each global batch, as consumed samples and global batch size alone say: a run
may resume with another number of lanes. Trailing tokens without a loss are cut off, because no later token attends to
them: less padding is computed, and loss and gradients stay the same.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from dynamic_cp.errors import DataError
from megatron.dynamic_cp.data.prefetch import keep_what_forks_inherit

COLUMNS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSampler:
    """Yields [index] for each sample that a lane draws, from `consumed_samples` on; whole global batches only."""

    num_samples: int
    consumed_samples: int
    global_batch_size: int
    lane: int
    num_lanes: int

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples
        while first + self.global_batch_size <= self.num_samples:
            for index in range(first + self.lane, first + self.global_batch_size, self.num_lanes):
                yield [index]
            first += self.global_batch_size


def only_item(items: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Return the one item of a list, trimmed, as numpy arrays; a DataLoader's collate_fn."""
    (item,) = items
    return trimmed({name: np.asarray(item[name]) for name in (*COLUMNS, "cu_seqlens") if item.get(name) is not None})


def trimmed(item: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return a sample or pack without the tokens of each sample that follow its last loss; at least one is kept,
    because a plan has no place for empty samples. Columns are [T], `cu_seqlens` [n + 1] for n samples; without
    `loss_mask` nothing is cut. DataError: boundaries that do not ascend from 0 to T."""
    mask = item.get("loss_mask")
    if mask is None:
        return item
    num_tokens = len(mask)
    bounds = item.get("cu_seqlens", np.array([0, num_tokens]))
    if bounds[0] != 0 or bounds[-1] != num_tokens or (np.diff(bounds) < 0).any():
        raise DataError(f"key 'cu_seqlens' is {bounds[:8].tolist()}, it must ascend from 0 to {num_tokens} tokens")
    kept, lengths = [], []
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if first == end:
            continue
        with_loss = np.flatnonzero(mask[first:end])
        length = int(with_loss[-1]) + 1 if len(with_loss) else 1
        kept.append(np.arange(first, first + length))
        lengths.append(length)
    places = np.concatenate(kept)
    cut = {name: column[places] for name, column in item.items() if name != "cu_seqlens"}
    if "cu_seqlens" in item:
        cut["cu_seqlens"] = np.concatenate([[0], np.cumsum(lengths)])
    return cut


def ignore(number: int, _worker: int) -> None:
    """Let a worker process ignore the signal that asks a run to save, so that it outlives it."""
    signal.signal(number, signal.SIG_IGN)


def build_loader(
    dataset: Dataset[Any],
    sampler: LaneSampler,
    *,
    num_workers: int,
    worker_init: Callable[[int], None] | None = None,
) -> DataLoader[dict[str, NDArray[Any]]]:
    """Return the loader of one lane: one sample or pack at a time, in numpy arrays."""
    keep_what_forks_inherit()
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=only_item,
        worker_init_fn=worker_init,
        generator=torch.Generator(),  # the run's own would advance, on ranks that read
    )


def end_workers(loader: DataLoader[Any]) -> None:
    """End a loader's worker processes: if they ignore SIGTERM, the interpreter would wait for them forever."""
    running = loader._iterator
    if running is not None:
        running._shutdown_workers()  # type: ignore[attr-defined]


class LaneIterator:
    """The data iterator that Megatron-LM passes around, on every rank; `items` is None on those that do not read."""

    def __init__(self, name: str, items: Iterator[Any] | None) -> None:
        self.name = name
        self.items = items

    def __iter__(self) -> LaneIterator:
        return self

    def __next__(self) -> Any:
        if self.items is None:
            raise DataError(f"this rank reads no {self.name} data")
        return next(self.items)
