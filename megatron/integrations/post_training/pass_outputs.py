"""What a forward pass gives back, in the order of the caller's samples; the same on every rank of the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dynamic_cp.errors import DisagreementError
from megatron.integrations.post_training.losses import Values
from megatron.integrations.post_training.rows import MicroBatchRows, Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassOutputs:
    """Outputs of a forward pass.

    Attributes:
        tokens: name -> for each sample float32 [S]; the value at place i belongs to the label that follows token i.
        sums: name -> for each response the sum over its tokens with a loss, float64 [responses].
        num_tokens: with a loss, of each response, int64 [responses].
    """

    tokens: Mapping[str, list[NDArray[np.float32]]]
    sums: Mapping[str, NDArray[np.float64]]
    num_tokens: NDArray[np.int64]


class Gatherer:
    """Puts the outputs of micro-batches to their places.

    Args:
        names: of the outputs, the same on all ranks.
        is_speaker: whether this rank's outputs count; false where it has none, or repeats those of another.
    """

    def __init__(self, rows: Rows, names: tuple[str, ...], device: torch.device, *, is_speaker: bool = True) -> None:
        self._rows, self._names, self._is_speaker = rows, names, is_speaker
        # Behind the outputs: how often a token came; how many of a response have a loss.
        self._tokens = torch.zeros(len(names) + 1, rows.num_tokens + 1, device=device)
        self._sums = torch.zeros(len(names) + 1, rows.num_responses, dtype=torch.float64, device=device)

    def add(self, outputs: Values, loss_mask: Tensor, rows: MicroBatchRows) -> None:
        """Take the outputs of a micro-batch, each [T] or [1, T]."""
        if not self._is_speaker:
            return
        values = [outputs[name].detach().reshape(-1).float() for name in self._names]
        every = torch.stack([*values, torch.ones_like(loss_mask.reshape(-1))])
        self._tokens.index_add_(1, rows.places, every)
        self._sums += rows.sums((every[:, rows.tokens] * rows.masked(loss_mask)).double(), self._sums.shape[1])

    def gathered(self) -> PassOutputs:
        """Return the results. Collective over the job, two all-reduces: of all tokens, and of all responses.

        Raises:
            DisagreementError: a token was computed not at all, or twice.
        """
        dist.all_reduce(self._tokens)
        dist.all_reduce(self._sums)
        tokens, sums = self._tokens[:, :-1].cpu().numpy(), self._sums.cpu().numpy()
        num_wrong = int((tokens[-1] != 1).sum())
        if num_wrong:
            raise DisagreementError(
                f"{num_wrong} of {self._rows.num_tokens} tokens were not computed exactly once: run the plan of these "
                f"{len(self._rows.samples)} samples, and no other",
                num_wrong=num_wrong,
            )
        ends = self._rows.starts[1:-1]
        return PassOutputs(
            tokens={name: np.split(values, ends) for name, values in zip(self._names, tokens, strict=False)},
            sums=dict(zip(self._names, sums, strict=False)),
            num_tokens=sums[-1].round().astype(np.int64),
        )


@contextmanager
def evaluating(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Run models without gradients, and as in evaluation."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
