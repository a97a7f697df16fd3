"""Lengths that are unknown before samples are tokenized: every rank probes its share, one all-gather shares them.

    samples = ProbedSamples(dataset)                       # anything with __len__ and __getitem__
    batch = samples.global_batch(consumed_samples, 512)    # collective: the same lengths on every rank
    wrapper = DataIteratorWrapper(read_sample=samples.read, ...); wrapper.wrap(step, batch)

A sample is tokenized twice, once for its length and once where it is trained on; sending tokens instead would move the
whole global batch. Data whose index knows the lengths (.idx, JSONL, text) need no probing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dynamic_cp.errors import DataError, DynamicCPError
from dynamic_cp.types import MAX_COUNT, Mask, Sample, parse_mask
from megatron.dynamic_cp.agreement.messages import all_gather_bytes, decode_error, encode_error
from megatron.dynamic_cp.agreement.verify import collective_device
from megatron.dynamic_cp.data.sample_tokens import SampleTokens

NOT_PROBED, FAILED = -1, -2


def probe_lengths(
    sample_ids: Sequence[int],
    length_of: Callable[[int], int],
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    noun: str = "sample",
) -> NDArray[np.int64]:
    """Return the length in tokens of each sample, int64 [n], the same on every rank. Collective over `group`.

    Rank r of R probes samples r, r + R, r + 2 R ... One all-gather of ceil(n / R) numbers per rank carries lengths and
    failures; only a failure needs a second collective, for its text.

    Args:
        sample_ids: the same on every rank.
        length_of: sample_id -> its length >= 1; called for this rank's share. Any exception of it is exchanged.
        group: default: all ranks of the job. Errors do not reach ranks outside the group.
        device: where the numbers live during the collective; default: what the job's backend needs.
        noun: what `sample_ids` number, for messages.

    Raises:
        DataError: the first sample that cannot be probed; the same error on every rank.
        DynamicCPError: a rank ended, or did not answer in time. (On NCCL the watchdog ends the process instead.)
    """
    group = group or dist.group.WORLD
    assert group is not None
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    share = -(-len(sample_ids) // num_ranks)
    if share == 0:
        return np.empty(0, dtype=np.int64)
    device = device or collective_device()
    probed, error = _probe_share(sample_ids[rank::num_ranks], length_of, rank=dist.get_rank(), noun=noun)
    mine = torch.full((share,), NOT_PROBED, dtype=torch.int64)
    mine[: len(probed)] = torch.tensor(probed, dtype=torch.int64)
    mine = mine.to(device)
    gathered = torch.empty(num_ranks * share, dtype=torch.int64, device=device)
    started_s = time.monotonic()
    try:
        dist.all_gather_into_tensor(gathered, mine, group=group)
        lengths: NDArray[np.int64] = (
            gathered.cpu().numpy().reshape(num_ranks, share).T.reshape(-1)[: len(sample_ids)].copy()
        )
        failures = np.flatnonzero(lengths == FAILED)
        if not len(failures):
            return lengths
        owner = int(failures[0]) % num_ranks
        gathered_errors = all_gather_bytes(b"" if error is None else encode_error(error), device, group)
    except RuntimeError as lost:
        raise DynamicCPError(
            f"probing the lengths of {noun}s {sample_ids[0]} .. {sample_ids[-1]}: one of {num_ranks} ranks ended or "
            f"did not answer, noticed after {time.monotonic() - started_s:.0f} s ({str(lost).splitlines()[0]}); "
            "see the logs of the other ranks"
        ) from lost
    if owner == rank and error is not None:
        raise error
    raise decode_error(gathered_errors[owner], f"from rank {owner} of the group")


def _probe_share(
    sample_ids: Iterable[int], length_of: Callable[[int], int], *, rank: int, noun: str
) -> tuple[list[int], DataError | None]:
    """Return the lengths up to the first failure, which is marked FAILED, and that failure."""
    lengths: list[int] = []
    for sample_id in sample_ids:
        try:
            length = length_of(sample_id)
            if not isinstance(length, Integral) or isinstance(length, bool) or not 1 <= length <= MAX_COUNT:
                raise DataError(f"its length is {length!r}, an integer from 1 to {MAX_COUNT} is needed")
        except Exception as error:  # the user's code may raise anything: the other ranks wait
            kind = "" if isinstance(error, DynamicCPError) else f"{type(error).__name__}: "
            failure = DataError(
                f"{noun} {sample_id} could not be probed for its length on rank {rank}: {kind}"
                f"{' '.join(str(error).split())}; fix it or leave it out of the data set",
                sample_id=sample_id,
                rank=rank,
            )
            failure.__cause__ = error
            return [*lengths, FAILED], failure
        lengths.append(int(length))
    return lengths, None


class MapStyleDataset(Protocol):
    """Items by number, as torch.utils.data.Dataset has them; `ProbedSamples` says what an item may be."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class ProbedSamples:
    """A data set that tokenizes on the fly, as the endless stream of samples that `DataIteratorWrapper` plans.

    Args:
        dataset: the same on every rank. Item i is the n >= 2 token ids of a document (the last n - 1 are predicted), or
            a mapping with `tokens` and `labels` (shifted already) of S ids each, and maybe `loss_mask` and `mask`. Its
            length and mask must never change.
        order: position in the stream -> item; default: item after item, again and again.
        num_batches: how many coming global batches one probing pass looks at.
        has_masks: items may have a `mask`, a text for `parse_mask`. Costs one more all-gather in each probing pass.
        group, device: of `probe_lengths`.
    """

    def __init__(
        self,
        dataset: MapStyleDataset,
        *,
        order: Callable[[int], int] | None = None,
        num_batches: int = 1,
        has_masks: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        if len(dataset) < 1:
            raise DataError(f"the data set has {len(dataset)} items, at least 1 is needed: check where it comes from")
        if num_batches < 1:
            raise DataError(f"num_batches is {num_batches}, at least 1 is needed")
        self._dataset = dataset
        self._order = order or (lambda position: position % len(dataset))
        self._num_batches = num_batches
        self._group, self._device = group, device
        self._seqlens = np.zeros(len(dataset), dtype=np.int64)  # 0: not probed yet
        self._has_masks = has_masks
        self._masks: dict[int, Mask] = {}

    def global_batch(self, consumed_samples: int, num_samples: int) -> tuple[Sample, ...]:
        """Return the samples at positions consumed_samples .. + num_samples - 1; sample_id is the position.

        Collective, unless all of them were probed before: call it on all ranks in the same order.

        Raises DataError: an item that cannot be read; the same on every rank. DynamicCPError: a rank is lost."""
        items = [self._order(position) for position in range(consumed_samples, consumed_samples + num_samples)]
        if not all(self._seqlens[items]):
            stop = consumed_samples + num_samples * self._num_batches
            wanted = dict.fromkeys(
                item for item in map(self._order, range(consumed_samples, stop)) if not self._seqlens[item]
            )
            self._probe(list(wanted))
        return tuple(
            Sample(sample_id=consumed_samples + place, seqlen=int(self._seqlens[item]), mask=self._masks.get(item))
            for place, item in enumerate(items)
        )

    def _probe(self, items: list[int]) -> None:
        masks: dict[int, str] = {}

        def length_of(item: int) -> int:
            values, mask = self._read_masked(item)
            if mask is not None:
                masks[item] = str(mask)
            return len(values.tokens)

        seqlens = probe_lengths(items, length_of, group=self._group, device=self._device, noun="item")
        if self._has_masks:
            device = self._device or collective_device()
            for text in all_gather_bytes(json.dumps(masks).encode(), device, self._group):
                self._masks |= {int(item): parse_mask(mask) for item, mask in json.loads(text).items()}
        self._seqlens[items] = seqlens

    def read(self, sample_id: int) -> SampleTokens:
        """Return the tokens of the sample at position `sample_id`. Raises DataError: an item that is not what the class
        says."""
        return self._read_masked(self._order(sample_id))[0]

    def _read_masked(self, index: int) -> tuple[SampleTokens, Mask | None]:
        item = self._dataset[index]
        values = self._read(index, item)
        text = item.get("mask") if isinstance(item, Mapping) else None
        if text is None:
            return values, None
        if not self._has_masks:
            raise DataError(
                f"item {index} has a mask, ProbedSamples(..., has_masks=False) looks for none: set it to True"
            )
        mask = parse_mask(str(text))
        reason = mask.why_unfit(len(values.tokens))
        if reason is not None:
            raise DataError(f"item {index} cannot have the mask {str(mask)[:60]}: {reason}")
        return values, mask

    def _read(self, index: int, item: Any) -> SampleTokens:
        if not isinstance(item, Mapping):
            ids = np.asarray(item, dtype=np.int64)
            if ids.ndim != 1 or len(ids) < 2:
                raise DataError(f"item {index} has shape {list(ids.shape)}, [n] with n >= 2 token ids is needed")
            return SampleTokens(tokens=ids[:-1].copy(), labels=ids[1:], loss_mask=np.ones(len(ids) - 1, np.float32))
        for key in ("tokens", "labels"):
            if key not in item:
                raise DataError(f"item {index} has no {key!r} (it has {', '.join(map(repr, item)) or 'nothing'})")
        tokens, labels = (np.asarray(item[key], dtype=np.int64) for key in ("tokens", "labels"))
        mask = np.asarray(item.get("loss_mask", np.ones(len(tokens))), dtype=np.float32)
        if not tokens.shape == labels.shape == mask.shape or tokens.ndim != 1:
            shapes = [list(array.shape) for array in (tokens, labels, mask)]
            raise DataError(
                f"item {index} has tokens, labels and loss mask of shapes {shapes}, one shape [S] is needed"
            )
        return SampleTokens(tokens=tokens, labels=labels, loss_mask=mask)
