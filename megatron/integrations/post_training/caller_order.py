"""The caller's order of samples: it takes their columns to the lanes and brings the outputs of a pass back.

    samples of 3 and 2 tokens, in the caller's order:   0 1 2 | 3 4        a place for each token, 5 is padding
    lane 1 of 2, where both are in one bucket:          1 2 | 4 5          zigzag: its shard of each sample

The same places serve both ways, whatever lane, shard and micro-batch a token is in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dynamic_cp.errors import DataError, DisagreementError, InvalidInputError
from dynamic_cp.plans.lane_plan import LanePlan
from dynamic_cp.types import Sample
from megatron.dynamic_cp.agreement.verify import agree
from megatron.dynamic_cp.attention.packs import to_device
from megatron.dynamic_cp.data.micro_batches import PackedBucket, packed_buckets, shards_of
from megatron.dynamic_cp.packed_seq_params import segments_of


@dataclass(frozen=True, kw_only=True, eq=False)
class CallerOrder:
    """The samples of a global batch in the caller's order; each id is there once."""

    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if len(self.number_of_id) != len(self.samples):
            raise InvalidInputError(
                f"{len(self.samples)} samples have {len(self.number_of_id)} ids: give each sample an id of its own"
            )

    @cached_property
    def number_of_id(self) -> dict[int, int]:
        """Sample id -> index of the sample."""
        return {sample.sample_id: index for index, sample in enumerate(self.samples)}

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The place of each sample's first token, and the end of all, int64 [samples + 1]."""
        return _starts([sample.seqlen for sample in self.samples])

    @cached_property
    def first_responses(self) -> NDArray[np.int64]:
        """The number of each sample's first response, and the end of all, int64 [samples + 1]."""
        return _starts([len(segments_of(sample).sequences) for sample in self.samples])

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples; also the place of padding."""
        return int(self.starts[-1])

    @property
    def num_responses(self) -> int:
        return int(self.first_responses[-1])

    def digest(self) -> str:
        """Return a digest of the samples in their order (hex)."""
        return hashlib.sha256(repr(self.samples).encode()).hexdigest()

    def of_lane(self, plan: LanePlan, device: torch.device) -> list[LocalTokens]:
        """Return the local tokens of each micro-batch of a lane; refuse plans of other samples (DisagreementError)."""
        packed = packed_buckets(plan)
        return [
            self._of_bucket(bucket.samples, of_lane, plan.lane, device)
            for bucket, of_lane in zip(plan.buckets, packed, strict=True)
        ]

    def _of_bucket(
        self, samples: Sequence[Sample], bucket: PackedBucket, lane: int, device: torch.device
    ) -> LocalTokens:
        places = np.full(bucket.rank_tokens, self.num_tokens)
        none = np.zeros(0, np.int64)
        tokens, responses, present = [none], [none], [none]
        start = 0
        for sample, shard in zip(samples, shards_of(bucket, lane), strict=False):
            index = self.number_of_id.get(sample.sample_id)
            if index is None or self.samples[index] != sample:
                raise DisagreementError(
                    f"the plan has sample {sample.sample_id} of {sample.seqlen} tokens, the {len(self.samples)} "
                    "samples of the pass do not: give those that were planned, with their masks",
                    sample_id=sample.sample_id,
                )
            here = slice(start, start + len(shard))
            start = here.stop
            places[here] = np.where(shard < sample.seqlen, self.starts[index] + shard, self.num_tokens)
            present.append(np.arange(*self.first_responses[index : index + 2]))
            lengths, sequences = segments_of(sample)
            has_part = np.zeros((len(sequences), len(lengths) + 1), np.bool_)  # last column: padding
            for number, parts in enumerate(sequences):
                has_part[number, parts] = True
            of_token = np.searchsorted(np.cumsum(lengths), shard, side="right")
            of_response, token = np.nonzero(has_part[:, of_token])
            tokens.append(here.start + token)
            responses.append(self.first_responses[index] + of_response)
        every = np.concatenate(tokens)
        copies = np.bincount(every, minlength=1)
        return LocalTokens(
            places=to_device(places, device),
            tokens=to_device(every, device),
            responses=to_device(np.concatenate(responses), device),
            weights=to_device((1 / copies[every]).astype(np.float32), device),
            present=to_device(np.concatenate(present), device),
        )


def agreed_order(
    samples: Sequence[Sample], plan: LanePlan, device: torch.device, check: Callable[[], None] = lambda: None
) -> tuple[CallerOrder, list[LocalTokens]]:
    """Return the order of samples, equal on all ranks, and the local tokens of this lane's micro-batches. Collective
    over the job: other samples on a rank, or what its `check` raises, is an error on all."""

    def prepare() -> tuple[CallerOrder, list[LocalTokens]]:
        check()
        order = CallerOrder(samples=tuple(samples))
        return order, order.of_lane(plan, device)

    return agree(prepare, lambda prepared: prepared[0].digest(), what="the samples of a pass", device=device)


def _starts(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalTokens:
    """Where the T local tokens of a micro-batch are in the caller's order.

    A token is an entry of each response that has it, several if they share it; padding has none.

    Attributes:
        places: int64 [T], `CallerOrder.num_tokens` for padding.
        tokens, responses: local token and response of each entry, int64 [entries].
        weights: 1 over the number of entries of the same token, float32 [entries].
        present: the responses of all samples here, whether or not this lane has tokens of theirs, int64 [present].
    """

    places: torch.Tensor
    tokens: torch.Tensor
    responses: torch.Tensor
    weights: torch.Tensor
    present: torch.Tensor

    def masked(self, loss_mask: torch.Tensor) -> torch.Tensor:
        """Return the loss mask of each entry, [entries]; over the entries of a token it adds up to the token's own."""
        return loss_mask.reshape(-1)[self.tokens] * self.weights

    def sums(self, values: torch.Tensor, num_responses: int) -> torch.Tensor:
        """Return the sums of values [n, entries] over the local entries of each response, [n, num_responses]."""
        return values.new_zeros(len(values), num_responses).index_add(1, self.responses, values)


OUTPUTS = ("log_probs", "entropies", "values")
"""Outputs of a model for each token."""
RESERVED = (*OUTPUTS, "num_tokens")

Values = Mapping[str, Tensor]
"""Name -> values of tokens [T] or of responses [R]: outputs of the model, sums of terms, and columns."""

GivenColumns = Mapping[str, Sequence[Any]]
"""Name -> for each sample in the caller's order [S] values, one for each of its responses, or a single one; or one
value for each response of all samples, such as `PassOutputs.sums`. Value i belongs to label i, which follows token i.
Equal on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Columns of a global batch as flat tensors: name -> float32 [tokens] or [responses]."""

    of_tokens: Mapping[str, Tensor]
    of_responses: Mapping[str, Tensor]

    @classmethod
    def of(cls, order: CallerOrder, given: GivenColumns) -> Columns:
        """Return the columns of samples; DataError for a name that is taken, another number of samples, or values that
        fit neither tokens nor responses or are no finite numbers."""
        of_tokens, of_responses = {}, {}
        for name, values in given.items():
            if name in RESERVED:
                raise DataError(
                    f"column {name!r} has one of {len(RESERVED)} names that are taken ({', '.join(RESERVED)}): "
                    "rename it"
                )
            if len(values) == order.num_responses != len(order.samples):
                values = np.split(_array(name, values), order.first_responses[1:-1])
            if len(values) != len(order.samples):
                raise DataError(
                    f"column {name!r} has {len(values)} entries, the pass {len(order.samples)} samples of "
                    f"{order.num_responses} responses: give one for each sample, in the order of the samples"
                )
            arrays = [_values(name, index, value) for index, value in enumerate(values)]
            if _are_of_responses(name, order, arrays):
                numbers = np.diff(order.first_responses)
                arrays = [np.broadcast_to(array.ravel(), n) for array, n in zip(arrays, numbers, strict=True)]
                of_responses[name] = _flat(arrays)
            else:
                of_tokens[name] = _flat(arrays)
        return cls(of_tokens=of_tokens, of_responses=of_responses)

    @property
    def names(self) -> set[str]:
        return {*self.of_tokens, *self.of_responses}

    def digest(self) -> str:
        """Return a digest of all values (hex)."""
        digest = hashlib.sha256()
        for name, values in [*self.of_tokens.items(), *self.of_responses.items()]:
            digest.update(f"{name} {len(values)}\n".encode())
            digest.update(values.numpy())
        return digest.hexdigest()

    def to(self, device: torch.device) -> Columns:
        of_tokens, of_responses = (
            {name: to_device(values.numpy(), device) for name, values in columns.items()}
            for columns in (self.of_tokens, self.of_responses)
        )
        return Columns(of_tokens=of_tokens, of_responses=of_responses)

    def on_entries(self, local: LocalTokens) -> dict[str, Tensor]:
        """Return the values of local entries, each [entries]; a response's value is that of all its entries."""
        places = local.places[local.tokens]
        shards = {name: values[places] for name, values in self.of_tokens.items()}
        return shards | {name: values[local.responses] for name, values in self.of_responses.items()}

    def on_responses(self, local: LocalTokens) -> dict[str, Tensor]:
        """Return the values of the responses that this lane works with, each [present]."""
        return {name: values[local.present] for name, values in self.of_responses.items()}


def _values(name: str, index: int, value: Any) -> NDArray[np.float32]:
    array = _array(name, value)
    num_bad = int(array.size - np.isfinite(array).sum())
    if num_bad:
        raise DataError(
            f"column {name!r} has {num_bad} values of {array.size} that are not finite in the sample at place {index}: "
            "give 0 where a token has no loss"
        )
    return array


def _array(name: str, value: Any) -> NDArray[np.float32]:
    try:
        return np.asarray(value.detach().float().cpu() if isinstance(value, Tensor) else value, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"column {name!r} is not of numbers ({error}): give arrays or tensors") from None


def _are_of_responses(name: str, order: CallerOrder, arrays: Sequence[NDArray[np.float32]]) -> bool:
    """Return whether a column has a value for each response or sample, rather than for each token."""
    numbers = np.diff(order.first_responses).tolist()
    of_responses = [array.size in (1, number) for array, number in zip(arrays, numbers, strict=True)]
    of_tokens = [array.shape == (sample.seqlen,) for array, sample in zip(arrays, order.samples, strict=True)]
    if all(of_responses) or all(of_tokens):
        return all(of_responses)
    fits_neither = [not one and not other for one, other in zip(of_responses, of_tokens, strict=True)]
    index = fits_neither.index(True) if any(fits_neither) else of_tokens.index(False)
    sample, number = order.samples[index], numbers[index]
    raise DataError(
        f"column {name!r} has {arrays[index].size} values in sample {index} (id {sample.sample_id}), which "
        f"has {sample.seqlen} tokens and {number} response{'s' * (number > 1)}: give all samples one value for each "
        "token, or all one for each response",
        sample_id=sample.sample_id,
    )


def _flat(arrays: Sequence[NDArray[np.float32]]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassOutputs:
    """Outputs of a forward pass.

    Attributes:
        tokens: name -> for each sample float32 [S]; value i belongs to the label that follows token i.
        sums, num_tokens: name -> sum over a response's tokens with a loss, float64 [responses]; their number, int64.
    """

    tokens: Mapping[str, list[NDArray[np.float32]]]
    sums: Mapping[str, NDArray[np.float64]]
    num_tokens: NDArray[np.int64]


class Gatherer:
    """Puts the outputs of micro-batches in their places. `names` are those of the outputs, the same on all ranks;
    `is_speaker` is false on ranks that have no outputs or repeat those of another."""

    def __init__(
        self, order: CallerOrder, names: tuple[str, ...], device: torch.device, *, is_speaker: bool = True
    ) -> None:
        self._order, self._names, self._is_speaker = order, names, is_speaker
        # The last row counts: how often a token came, and how many tokens of a response have a loss.
        self._tokens = torch.zeros(len(names) + 1, order.num_tokens + 1, device=device)
        self._sums = torch.zeros(len(names) + 1, order.num_responses, dtype=torch.float64, device=device)

    def add(self, outputs: Values, loss_mask: Tensor, local: LocalTokens) -> None:
        """Take the outputs of a micro-batch, each [T] or [1, T]."""
        if not self._is_speaker:
            return
        values = [outputs[name].detach().reshape(-1).float() for name in self._names]
        every = torch.stack([*values, torch.ones_like(loss_mask.reshape(-1))])
        self._tokens.index_add_(1, local.places, every)
        self._sums += local.sums((every[:, local.tokens] * local.masked(loss_mask)).double(), self._sums.shape[1])

    def gathered(self) -> PassOutputs:
        """Return the results. Collective over the job, two all-reduces: of all tokens, and of all responses.
        DisagreementError if a token was not computed exactly once."""
        dist.all_reduce(self._tokens)
        dist.all_reduce(self._sums)
        tokens, sums = self._tokens[:, :-1].cpu().numpy(), self._sums.cpu().numpy()
        num_wrong = int((tokens[-1] != 1).sum())
        if num_wrong:
            raise DisagreementError(
                f"{num_wrong} of {self._order.num_tokens} tokens were not computed exactly once: run the plan of these "
                f"{len(self._order.samples)} samples, and no other"
            )
        ends = self._order.starts[1:-1]
        return PassOutputs(
            tokens={name: np.split(values, ends) for name, values in zip(self._names, tokens, strict=False)},
            sums=dict(zip(self._names, sums, strict=False)),
            num_tokens=sums[-1].round().astype(np.int64),
        )


@contextmanager
def evaluating(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Run models in evaluation mode, without gradients."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
