"""Draws a global batch from the lanes' own iterators, so that all ranks agree on what was drawn.

Only TP rank 0 of the stages that read tokens or labels draws. The collectives are small: an outcome, one sum of a few
counts per pipeline stage, and the lengths (8 bytes each) and masks of samples over the lanes of the first stage.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from dynamic_cp.errors import DataError, DisagreementError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import Mask, Sample, parse_mask
from megatron.dynamic_cp.agreement.messages import all_gather_bytes
from megatron.dynamic_cp.agreement.verify import run_on_all_ranks
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
from megatron.dynamic_cp.data.token_audit import token_checksum
from megatron.integrations.foreign.rerouting import (
    MAX_SAMPLES_PER_DRAW,
    SentColumns,
    columns_to_send,
    in_phase,
    make_sample_id,
)
from megatron.integrations.foreign.samples import ForeignSample, read_item

logger = logging.getLogger(__name__)

DataIterators = Iterator[Any] | Sequence[Iterator[Any] | None] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnBatch:
    """A drawn global batch. On ranks that do not draw, `samples` and `sample_ids` are ().

    Attributes:
        num_items: items that all lanes drew; a pack is one item.
        max_samples: no lane drew more samples; the same on all ranks.
        sent: columns that travel to the stages that read them.
        lengths: the whole batch on rank 0, () elsewhere.
    """

    step: int
    samples: tuple[ForeignSample, ...]
    sample_ids: tuple[int, ...]
    num_items: int
    max_samples: int
    sent: SentColumns
    lengths: tuple[Sample, ...]


class BatchDrawer:
    """Draws this lane's share of each global batch; `draws` says whether this rank draws.

    Args:
        data_iterators, chunks, global_batch_size, drop_last: as `ForeignIteratorWrapper` gets them.
        device: where the tensors of collectives live.
        why_no_masks: why samples must not bring masks, in words; None: they may.
    """

    def __init__(
        self,
        data_iterators: DataIterators,
        *,
        chunks: Sequence[ChunkNeeds],
        lane: int,
        num_lanes: int,
        global_batch_size: int,
        drop_last: bool,
        device: torch.device,
        why_no_masks: str | None = None,
    ) -> None:
        if global_batch_size < 1:
            raise InvalidInputError(f"global_batch_size is {global_batch_size}, at least 1 is needed")
        self._data_iterators = data_iterators
        self._chunks = tuple(chunks)
        self._lane, self._num_lanes = lane, num_lanes
        self._global_batch_size = global_batch_size
        self._drop_last = drop_last
        self._device = device
        self._why_no_masks = why_no_masks
        self._needs = ChunkNeeds(
            tokens=any(chunk.tokens for chunk in chunks), labels=any(chunk.labels for chunk in chunks)
        )
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._share = global_batch_size // num_lanes + (lane < global_batch_size % num_lanes)
        self._is_at_its_end = False
        reads = self._needs.tokens or self._needs.labels
        self.draws = reads and parallel_state.get_tensor_model_parallel_rank() == 0

    def draw(self, step: int) -> DrawnBatch | None:
        """Return the next global batch, None at the end of the data. Collective over the job. DynamicCPError: bad data,
        or stages that drew different samples, on all ranks alike; or a rank died or hung."""
        where = f"drawing the samples of step {step}"
        with in_phase(where):
            samples, num_items = run_on_all_ranks(lambda: self._draw_share(step), self._device)
            stages, given, num_masks = self._sum_over_ranks(samples, num_items)
        self._check_stages(step, stages)
        if num_masks and self._why_no_masks is not None:
            raise UnsupportedFeatureError(
                f"{num_masks} samples of step {step} came with a mask (key 'mask'), and {self._why_no_masks}: use "
                "local layers, or samples without masks"
            )
        num_drawn = int(stages[0, 1])
        if num_drawn == 0 or (self._drop_last and num_drawn < self._global_batch_size):
            return None
        has_packs = stages[0, 2] != num_drawn
        with in_phase(where):
            max_samples = self._max_samples(len(samples), has_packs)
            lengths = self._gather_lengths(step, samples, max_samples, self._gather_masks(samples, num_masks))
        return DrawnBatch(
            step=step,
            samples=samples,
            sample_ids=tuple(make_sample_id(step, self._lane, order, self._num_lanes) for order in range(len(samples))),
            num_items=num_drawn,
            max_samples=max_samples,
            sent=columns_to_send(*given.tolist()),
            lengths=lengths,
        )

    def _draw_share(self, step: int) -> tuple[tuple[ForeignSample, ...], int]:
        if not self.draws:
            return (), 0
        iterator = self._own_iterator()
        samples: list[ForeignSample] = []
        num_items = 0
        while num_items < self._share and not self._is_at_its_end:
            where = f"item {num_items} of the {self._share} that lane {self._lane} draws for step {step}"
            try:
                item = next(iterator)
            except StopIteration:
                self._is_at_its_end = True
                break
            except Exception as error:  # foreign code may raise anything, and all ranks must hear of it
                logger.exception("the data iterator raised at %s", where)
                raise DataError(f"the data iterator raised {type(error).__name__}: {error}; at {where}") from error
            try:
                samples += read_item(item, self._needs)
            except DataError as error:
                raise DataError(f"{error}; in {where}", **error.details) from error
            num_items += 1
        if len(samples) > MAX_SAMPLES_PER_DRAW:
            raise DataError(
                f"lane {self._lane} drew {len(samples)} samples for step {step}, at most {MAX_SAMPLES_PER_DRAW} can "
                "be numbered: lower the global batch size"
            )
        return tuple(samples), num_items

    def _own_iterator(self) -> Iterator[Any]:
        given = self._data_iterators
        if isinstance(given, list | tuple):
            if len(given) != len(self._chunks):
                raise InvalidInputError(
                    f"{len(given)} data iterators were given for {len(self._chunks)} model chunks: give one for each, "
                    "None for those that read nothing"
                )
            reading = (it for it, chunk in zip(given, self._chunks, strict=True) if chunk.tokens or chunk.labels)
            given = next((iterator for iterator in reading if iterator is not None), None)
        if given is None:
            raise InvalidInputError(
                f"lane {self._lane} of pipeline stage {self._stage} has no data iterator: TP rank 0 of the stages that "
                "read tokens or labels needs one"
            )
        if not hasattr(given, "__next__"):
            raise InvalidInputError(f"the data iterator is a {type(given).__name__}: pass iter(...) of it")
        return given  # type: ignore[return-value]

    def _sum_over_ranks(
        self, samples: Sequence[ForeignSample], num_items: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return sums over all ranks: [ranks that draw, items, samples, checksum of lengths and masks] of each stage;
        samples with position ids, a loss mask, labels, and no labels; samples with a mask."""
        stages, given = np.zeros((self._num_stages, 4), np.int64), np.zeros(5, np.int64)
        if self.draws:
            masks = {place: str(sample.mask) for place, sample in enumerate(samples) if sample.mask is not None}
            seqlens = np.array([sample.seqlen for sample in samples], dtype=np.int64)
            stages[self._stage] = (
                1,
                num_items,
                len(samples),
                token_checksum(self._lane, np.arange(len(seqlens)), seqlens)
                + token_checksum(
                    self._lane,
                    np.fromiter(masks, np.int64),
                    np.array([zlib.crc32(text.encode()) for text in masks.values()], dtype=np.int64),
                    column=1,
                ),
            )
            with_labels = sum(sample.own_labels for sample in samples)
            given[:2] = (
                sum(sample.position_ids is not None for sample in samples),
                sum(sample.loss_mask is not None for sample in samples),
            )
            given[2:4] = (with_labels, len(samples) - with_labels) if self._needs.labels else (0, 0)
            given[4] = len(masks) if self._stage == 0 else 0
        totals = torch.from_numpy(np.concatenate([stages.reshape(-1), given])).to(self._device)
        dist.all_reduce(totals)
        summed = totals.cpu().numpy()
        return summed[:-5].reshape(stages.shape), summed[-5:-1], int(summed[-1])

    def _check_stages(self, step: int, stages: NDArray[np.int64]) -> None:
        """Raise the same error on all ranks unless all stages that draw have drawn the same."""
        if stages[0, 0] != self._num_lanes:
            raise InvalidInputError(
                f"{stages[0, 0]} ranks of the first pipeline stage draw samples, one for each of the "
                f"{self._num_lanes} lanes is needed: the first model chunk must read tokens"
            )
        for stage, row in enumerate(stages):
            if row[0] and row.tolist() != stages[0].tolist():
                raise DisagreementError(
                    f"pipeline stage {stage} drew {row[2]} samples in {row[1]} items for step {step}, the first stage "
                    f"{stages[0, 2]} in {stages[0, 1]}{'' if row[2] != stages[0, 2] else ', of other lengths'}: the "
                    "data iterators of a lane must yield the same samples on every stage that reads",
                    stage=stage,
                )

    def _max_samples(self, num_samples: int, has_packs: bool) -> int:
        """Return the most samples that a lane can have drawn; only packs need a collective for that."""
        if not has_packs:
            return -(-self._global_batch_size // self._num_lanes)
        most = torch.tensor([num_samples], device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most.item())

    def _gather_masks(self, samples: Sequence[ForeignSample], num_masks: int) -> list[dict[int, Mask]]:
        """Return each lane's masks by the order of its samples. Collective over the lanes of the first stage."""
        if not num_masks or not self.draws or self._stage != 0:
            return [{}] * self._num_lanes
        own = {order: str(sample.mask) for order, sample in enumerate(samples) if sample.mask is not None}
        texts = all_gather_bytes(json.dumps(own).encode(), self._device, self._group)
        return [{int(order): parse_mask(mask) for order, mask in json.loads(text).items()} for text in texts]

    def _gather_lengths(
        self, step: int, samples: Sequence[ForeignSample], max_samples: int, masks: Sequence[Mapping[int, Mask]]
    ) -> tuple[Sample, ...]:
        """Return the global batch on rank 0, () elsewhere. Collective over the lanes of the first stage."""
        if not self.draws or self._stage != 0:
            return ()
        own = torch.zeros(max_samples, dtype=torch.int64)
        own[: len(samples)] = torch.tensor([sample.seqlen for sample in samples], dtype=torch.int64)
        gathered = torch.empty(self._num_lanes * max_samples, dtype=torch.int64, device=self._device)
        dist.all_gather_into_tensor(gathered, own.to(self._device), group=self._group)
        if dist.get_rank() != 0:
            return ()
        by_lane = gathered.cpu().numpy().reshape(self._num_lanes, max_samples)
        return tuple(
            Sample(
                sample_id=make_sample_id(step, lane, order, self._num_lanes),
                seqlen=int(by_lane[lane, order]),
                mask=masks[lane].get(order),
            )
            for lane, order in np.argwhere(by_lane).tolist()
        )
