"""Losses of your own: over tokens, or over whole responses that lie on several lanes.

    tokens (outputs of the model and columns, each [T])  -> a loss of each token                       TokenLoss
    tokens -> terms [T] -> their sums over each response, on all its lanes -> a loss of each response  ResponseLoss

T counts the tokens of a micro-batch on a lane; a token that several responses share is there once for each of them. The
parts of all lanes are added up and divided once, by what the mean of the global batch says. So no loss knows of lanes,
CP sizes or micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dynamic_cp.errors import DataError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.plans.lane_plan import LanePlan
from dynamic_cp.types import is_placed
from megatron.dynamic_cp.agreement.verify import agree
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams
from megatron.integrations.post_training.caller_order import (
    OUTPUTS,
    CallerOrder,
    Columns,
    GivenColumns,
    LocalTokens,
    Values,
)

Mean = Literal["tokens", "samples"] | float
"""Mean over the global batch: of all tokens with a loss; of the means of each response; or the sum divided by a number.
A response without a token with a loss does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss of each token. `of_tokens` takes values [T] and returns losses [T]; all values of a token without a loss
    are 0, and its result does not count. `needs` names the outputs and columns that it reads."""

    of_tokens: Callable[[Values], Tensor]
    needs: tuple[str, ...] = ()
    mean: Mean = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseLoss:
    """A loss of each response.

    Attributes:
        terms: values [T] -> terms, each [T], which are summed over the tokens of a response that have a loss.
        of_responses: sums of terms, columns of responses and "num_tokens", each [R] -> losses [R]. R counts all
            responses of some samples, in their order.
        needs: the outputs and columns that either reads.
        mean: "samples", or a number.
        group_size: how many responses every sample has, if a loss is of several together; None: any number.
        needs_all: a response without a token with a loss is an error; with a `group_size` it always is.
    """

    terms: Callable[[Values], Values]
    of_responses: Callable[[Values], Tensor]
    needs: tuple[str, ...] = ()
    mean: Mean = "samples"
    group_size: int | None = None
    needs_all: bool = False

    def __post_init__(self) -> None:
        if self.mean == "tokens":
            raise InvalidInputError("a loss of whole responses has no mean over tokens: give 'samples' or a number")


Loss = TokenLoss | ResponseLoss


def check_loss(
    loss: Loss, order: CallerOrder, columns: Columns, plan: LanePlan, outputs: Sequence[str] = OUTPUTS
) -> None:
    """Raise DataError if the loss needs a column or an output that is missing or samples have another number of
    responses, InvalidInputError if its mean is unknown or not above 0, and UnsupportedFeatureError if sums over
    responses have lanes that are no CP group of their own."""
    if loss.mean not in ("tokens", "samples") and not isinstance(loss.mean, Real):
        raise InvalidInputError(f"the mean is {loss.mean!r}: give 'tokens', 'samples', or a number to divide by")
    if isinstance(loss.mean, Real) and not loss.mean > 0:
        raise InvalidInputError(f"the mean divides by {loss.mean}: give a number greater than 0")
    there = [*outputs, *sorted(columns.names)]
    missing = [name for name in loss.needs if name not in there]
    if missing:
        raise DataError(
            f"the loss reads {len(loss.needs)} outputs and columns, {len(missing)} of them are not there: "
            f"{', '.join(map(repr, missing))}; there are {', '.join(map(repr, there))}: have an output computed, or "
            "give the column"
        )
    _try(loss, columns, outputs)
    if isinstance(loss, TokenLoss):
        return
    for sample, number in zip(order.samples, np.diff(order.first_responses).tolist(), strict=True):
        if loss.group_size not in (None, number):
            raise DataError(
                f"sample {sample.sample_id} has {number} response{'s' * (number > 1)}, the loss is of "
                f"{loss.group_size} together: give each sample as "
                "many (data.shared_question makes one of a prompt and its responses)",
                sample_id=sample.sample_id,
            )
    for bucket in plan.buckets:
        is_block = bucket.cp_size & (bucket.cp_size - 1) == 0 == bucket.first_lane % bucket.cp_size
        if is_placed(bucket.cp_comm_type) and not is_block:
            raise UnsupportedFeatureError(
                f"a loss of whole responses, and placed attention on {bucket.cp_size} lanes from {bucket.first_lane} "
                "on, which are no CP group of their own: plan with other exchanges than blocks"
            )


def _try(loss: Loss, columns: Columns, outputs: Sequence[str]) -> None:
    """Compute the loss of zeros, so that what it lacks shows before a pass."""
    zeros = torch.zeros(1 if isinstance(loss, TokenLoss) else loss.group_size or 1)
    tokens = _Named("token", dict.fromkeys(outputs, zeros), dict.fromkeys(columns.names, zeros))
    if isinstance(loss, TokenLoss):
        _of_shape(zeros, loss.of_tokens(tokens))
        return
    terms = {name: _of_shape(zeros, term) for name, term in loss.terms(tokens).items()}
    known = dict.fromkeys([*columns.of_responses, "num_tokens"], zeros)
    _of_shape(zeros, loss.of_responses(_Named("response", terms, known)))


class _Named(dict[str, Tensor]):
    """What a loss reads for each token or response, computed or given; DataError for a missing or a double name."""

    def __init__(self, of: str, computed: Values, known: Values) -> None:
        super().__init__({**computed, **known})
        self._of = of
        if twice := [name for name in computed if name in known]:
            raise DataError(
                f"{twice[0]!r} is computed of each {of}, and is the name of what is given, too: rename one of them"
            )

    def __missing__(self, name: str) -> Tensor:
        raise DataError(
            f"the loss reads {name!r} of each {self._of}, where {', '.join(map(repr, sorted(self)))} are: have an "
            f"output computed (`TorchPasses.names` says which are), or give a column of one value for each {self._of}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """A loss of a global batch, ready to be computed micro-batch by micro-batch.

    Attributes:
        counts: tokens with a loss of each response of the job, 1 where there are none, float32 [responses].
        divisor: what the sum over the job is divided by.
        num_tokens: tokens of the job that have a loss.
    """

    loss: Loss
    columns: Columns
    counts: Tensor
    divisor: float
    num_tokens: int

    @classmethod
    def of(cls, loss: Loss, columns: Columns, counts: Tensor) -> Objective:
        """Return the objective; `counts` are the tokens with a loss of each response, summed over the job. DataError if
        there are none, or none of a response that the loss cannot leave out."""
        num_tokens, num_responses = round(float(counts.sum())), int((counts > 0).sum())
        if num_tokens == 0:
            raise DataError(
                f"0 tokens of the {len(counts)} responses of the global batch have a loss: check their loss masks"
            )
        num_empty = len(counts) - num_responses
        if num_empty and isinstance(loss, ResponseLoss) and (loss.group_size or loss.needs_all):
            raise DataError(
                f"{num_empty} of {len(counts)} responses have 0 tokens with a loss, the first is number "
                f"{int(counts.argmin())}, and the loss is of all: mend the loss mask, or leave its sample or pair out"
            )
        divisors: dict[Any, float] = {"tokens": num_tokens, "samples": num_responses}
        return cls(
            loss=loss,
            columns=columns.to(counts.device),
            counts=torch.where(counts > 0, counts, 1).float(),
            divisor=divisors.get(loss.mean, loss.mean),
            num_tokens=num_tokens,
        )

    @property
    def scale(self) -> float:
        """Factor of a share where a runtime divides by `num_tokens`."""
        return self.num_tokens / self.divisor

    def share(self, outputs: Values, loss_mask: Tensor, local: LocalTokens, params: DynamicPackedSeqParams) -> Tensor:
        """Return a lane's part in the loss of a micro-batch; the sum over the job, / divisor, is the loss. A loss of
        responses is collective over the micro-batch's CP group, in backward, too. `outputs` and `loss_mask` (0 for
        padding) are [T] or [1, T]."""
        mask = local.masked(loss_mask)
        own = {name: output.reshape(-1)[local.tokens] for name, output in outputs.items()}
        given = self.columns.on_entries(local)
        own, given = ({name: torch.where(mask > 0, each, 0) for name, each in of.items()} for of in (own, given))
        tokens = _Named("token", own, given)
        shares = mask / self.counts[local.responses]
        if isinstance(self.loss, TokenLoss):
            losses = _of_shape(mask, self.loss.of_tokens(tokens))
            return (losses * (shares if self.loss.mean == "samples" else mask)).sum()
        terms = {name: _of_shape(mask, term) for name, term in self.loss.terms(tokens).items()}
        sums = local.sums(torch.stack([*terms.values()]) * mask, len(self.counts))
        sums = _SumOverLanes.apply(sums, params.cp_group)[:, local.present]
        known = self.columns.on_responses(local) | {"num_tokens": self.counts[local.present]}
        named = _Named("response", dict(zip(terms, sums, strict=True)), known)
        losses = _of_shape(local.present, self.loss.of_responses(named))
        return (losses * local.sums(shares[None], len(self.counts))[0, local.present]).sum()


def _of_shape(expected: Tensor, values: Tensor) -> Tensor:
    if values.shape != expected.shape:  # torch would stretch a single value over all
        raise InvalidInputError(
            f"a loss returned {list(values.shape)} values for {len(expected)}: return one for each token or response",
        )
    return values


class _SumOverLanes(torch.autograd.Function):
    """Sums over the lanes of a group. Each lane's loss depends on all lanes' terms, so gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(sums, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def agreed_columns(
    order: CallerOrder,
    columns: GivenColumns,
    loss: Loss,
    plan: LanePlan,
    device: torch.device,
    outputs: Sequence[str] = OUTPUTS,
) -> Columns:
    """Return the columns of a pass once all ranks found them good, equal and enough for the loss; otherwise all raise
    the same DynamicCPError. Collective. The pass computes `outputs`."""

    def prepare() -> Columns:
        checked = Columns.of(order, columns)
        check_loss(loss, order, checked, plan, outputs)
        return checked

    return agree(prepare, lambda checked: checked.digest(), what="the columns of a pass", device=device)


def count_tokens(
    order: CallerOrder, of_lane: Sequence[LocalTokens], masks: Sequence[Tensor], device: torch.device
) -> Tensor:
    """Return the tokens with a loss of each response of the job, float64 [responses]. Collective. Ranks that repeat
    what others have give no micro-batches. All raise DataError if a mask is no whole number."""
    # The last entry counts tokens with a bad mask.
    counts = torch.zeros(order.num_responses + 1, dtype=torch.float64, device=device)
    for micro_batch, given in zip(of_lane, masks, strict=True):
        mask = given.to(device, non_blocking=True)
        counts[:-1] += micro_batch.sums(micro_batch.masked(mask)[None].double(), order.num_responses)[0]
        counts[-1] += ((mask != mask.round()) | (mask < 0)).sum()
    dist.all_reduce(counts)
    if num_bad := int(counts[-1]):
        raise DataError(
            f"{num_bad} tokens have a loss mask that is no whole number from 0 on, which runtimes cannot count: give 0 "
            "and 1, and weights as a column that your loss reads"
        )
    return counts[:-1]
