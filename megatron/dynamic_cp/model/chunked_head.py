"""The LM head over chunks of tokens: logits of a whole micro-batch never exist.

    hidden states [T, 1, H] -> for each chunk: logits [t, 1, V / TP] -> losses [1, t] -> losses [1, T]

Forward keeps only the hidden states, backward computes the logits of each chunk again. With sequence parallelism a
chunk has the same rows of every TP rank's part, so ranks gather and scatter only a chunk. What is computed of logits is
an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from dynamic_cp.errors import InvalidInputError

OfLogits = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""(logits [t, 1, this rank's share of V], labels [1, t]) -> outputs, each [1, t]."""

OfHidden = Callable[[GPTModel, Tensor, Tensor], Tensor]
"""(model of the last stage, hidden states behind the last norm [T, 1, H], labels [1, T]) -> its output."""


class ChunkedHeadModel(GPTModel):
    """megatron-core's GPTModel, with losses over chunks where `set_loss_chunk` has set `config.loss_chunk_tokens`.
    `token_outputs` computes what the last stage returns in place of losses; None: losses."""

    token_outputs: OfHidden | None = None

    def _postprocess(self, hidden_states: Tensor, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        if self.token_outputs is not None and self.post_process and labels is not None:
            return self.token_outputs(self, hidden_states, labels)
        if loss_chunk_of(self.config) and self.post_process and not self.mtp_process and labels is not None:
            shared = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
            return self.token_losses(hidden_states, labels, shared, kwargs.get("runtime_gather_output"))
        output: Tensor = super()._postprocess(hidden_states, *args, labels=labels, **kwargs)
        return output

    def token_losses(
        self, hidden_states: Tensor, labels: Tensor, weight: Tensor | None = None, gathers: bool | None = None
    ) -> Tensor:
        """Return the cross entropy of each token, [1, T].

        Args:
            hidden_states: behind the last norm, [T, 1, H], with sequence parallelism this rank's part of T.
            labels: [1, T].
            weight: of the head, where it is the embedding's.
            gathers: whether TP ranks gather their logits; None: as the head was built.
        """

        def losses_of(logits: Tensor, labels: Tensor) -> tuple[Tensor]:
            return (self.compute_language_model_loss(labels, logits),)

        chunk_tokens = loss_chunk_of(self.config)
        if not chunk_tokens:
            logits, _ = self.output_layer(hidden_states, weight=weight, runtime_gather_output=gathers)
            return losses_of(logits, labels)[0]
        head = ChunkedHead(self.output_layer, losses_of, chunk_tokens, gathers)
        (losses,) = head(hidden_states, labels, weight)
        return losses


def set_loss_chunk(config: Any, chunk_tokens: int) -> None:
    """Make models of a configuration compute their losses over chunks of so many tokens; 0: of all at once."""
    config.loss_chunk_tokens = chunk_tokens  # megatron-core has no field for it


def loss_chunk_of(config: Any) -> int:
    """Return the tokens of a chunk; 0: losses are of all tokens at once."""
    return getattr(config, "loss_chunk_tokens", 0)


class ChunkedHead(NamedTuple):
    """A head and what is computed of its logits, chunk by chunk, and differentiated by autograd. At most `chunk_tokens`
    tokens, of all TP ranks with sequence parallelism, have logits at once. `gathers`: whether TP ranks gather their
    logits; None: as the layer was built."""

    layer: ColumnParallelLinear
    of_logits: OfLogits
    chunk_tokens: int
    gathers: bool | None = None

    def __call__(self, hidden: Tensor, labels: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the outputs of all tokens, each [1, T]; arguments as of `ChunkedHeadModel.token_losses`."""
        if self.chunk_tokens < 1:
            raise InvalidInputError(f"a chunk of {self.chunk_tokens} tokens is not possible: give at least 1")
        weight = self.layer.weight if weight is None else weight
        outputs: tuple[Tensor, ...] = _Chunked.apply(hidden, weight, labels, self)
        return outputs

    @property
    def num_parts(self) -> int:
        """The number of parts in which TP ranks hold the tokens."""
        return self.layer.tp_group.size() if self.layer.sequence_parallel else 1

    def rows(self, hidden: Tensor) -> Iterator[slice]:
        """Yield the rows of `hidden` that form a chunk together with those of the other parts."""
        step = max(1, self.chunk_tokens // self.num_parts)
        for first in range(0, max(1, len(hidden)), step):
            yield slice(first, first + step)

    def of_chunk(self, values: Tensor, rows: slice) -> Tensor:
        """Return the values, of all [1, T], for some rows of all parts, in the order of the chunk's logits."""
        return values.view(self.num_parts, -1)[:, rows].reshape(1, -1)

    def joined(self, chunks: Sequence[Tensor]) -> Tensor:
        """Return values [1, T] in the order of tokens: undoes `of_chunk`."""
        return torch.cat([chunk.view(self.num_parts, -1) for chunk in chunks], dim=1).view(1, -1)

    def outputs(self, hidden: Tensor, labels: Tensor, weight: Tensor) -> Sequence[Tensor]:
        logits, _ = self.layer(hidden, weight=weight, runtime_gather_output=self.gathers)
        return self.of_logits(logits, labels)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: ChunkedHead) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.head, ctx.weight = head, weight  # the parameter itself: what is saved may come back as another tensor
        chunks = [head.outputs(hidden[rows], head.of_chunk(labels, rows), weight) for rows in head.rows(hidden)]
        return tuple(head.joined(output) for output in zip(*chunks, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, _, labels = ctx.saved_tensors
        head: ChunkedHead = ctx.head
        of_weight = _WeightGradient(ctx.weight, is_needed=ctx.needs_input_grad[1])
        of_hidden = torch.empty_like(hidden)
        for rows in head.rows(hidden):
            part = hidden[rows].detach().requires_grad_()
            with torch.enable_grad():
                outputs = head.outputs(part, head.of_chunk(labels, rows), of_weight.alias)
            wanted = (part, of_weight.alias)[: 1 + of_weight.alias.requires_grad]
            incoming = [head.of_chunk(gradient, rows) for gradient in gradients]
            of_hidden[rows], *more = torch.autograd.grad(outputs, wanted, incoming, allow_unused=True)
            of_weight.add(*more)
        return of_hidden if ctx.needs_input_grad[0] else None, of_weight.total(), None, None


class _WeightGradient:
    """The sum of the chunks' gradients: in DDP's buffer and precision, where the weight has one. `alias` is the weight
    as a leaf of its own, so that hooks on the weight see the sum alone."""

    def __init__(self, weight: Tensor, *, is_needed: bool) -> None:
        self.alias, self._weight = weight.detach().requires_grad_(is_needed), weight
        self._main_grad, self._sum = getattr(weight, "main_grad", None), None
        if self._main_grad is not None:
            self.alias.main_grad = self._main_grad  # type: ignore[attr-defined]  # where fused kernels add themselves

    def add(self, gradient: Tensor | None = None) -> None:
        """Add the gradient of a chunk; None: a fused kernel has done so."""
        if gradient is None:
            return
        if self._main_grad is not None:
            self._main_grad.add_(gradient)
        elif self._sum is None:
            self._sum = gradient
        else:
            self._sum += gradient

    def total(self) -> Tensor | None:
        """Return the part of the weight's gradient that autograd still has to add. Hooks that wait for one have to see
        a tensor: zeros, or memory as it is where DDP is told not to add it."""
        if self._main_grad is None or not self.alias.requires_grad:
            return self._sum
        if getattr(self._weight, "zero_out_wgrad", False) or not hasattr(self._weight, "grad_added_to_main_grad"):
            return self.alias.new_zeros(()).expand_as(self.alias)  # the embedding's gradient is added to it
        self._weight.grad_added_to_main_grad = True
        return torch.empty_like(self.alias)
