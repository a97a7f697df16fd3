"""What Megatron's last stage computes of each token in a pass of post-training, in the place of losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from megatron.dynamic_cp.model.chunked_head import ChunkedHeadModel, loss_chunk_of, token_log_probs

_OF_LM_HEAD = ("log_probs", "entropies")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """What is computed of hidden states: rows of one tensor.

    Attributes:
        log_probs: the LM head's "log_probs" of the labels, and "entropies".
        values: the value head's "values".
        temperature: that logits are divided by, above 0.
        chunk_tokens: most tokens whose logits exist at once; None: as of the losses of the model's configuration.
    """

    log_probs: bool = True
    values: bool = False
    temperature: float = 1.0
    chunk_tokens: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The rows, in their order."""
        return _OF_LM_HEAD * self.log_probs + ("values",) * self.values

    def check(self, chunks: Sequence[GPTModel]) -> None:
        """Refuse models that cannot compute it.

        Raises:
            InvalidInputError: nothing is asked for, or a head is missing.
            UnsupportedFeatureError: a model with multi-token prediction, or one that is not of this package.
        """
        if not self.names:
            raise InvalidInputError("0 outputs are asked for: have log_probs, values or both computed")
        for chunk in chunks:
            if not isinstance(chunk, ChunkedHeadModel):
                raise UnsupportedFeatureError(
                    f"the model is a {type(chunk).__name__}, passes of post-training run DynamicCPGPTModel: build it "
                    "with that class"
                )
            if chunk.config.mtp_num_layers:
                raise UnsupportedFeatureError(
                    f"the model has {chunk.config.mtp_num_layers} modules of multi-token prediction, passes of "
                    "post-training run models with 0: build it with mtp_num_layers=None"
                )
            if chunk.post_process and self.values and not hasattr(chunk, _NAME):
                raise InvalidInputError(
                    "values are asked for, and the model has 0 value heads: call add_value_head before it is wrapped"
                )
            if chunk.post_process and self.log_probs and chunk.output_layer is None:
                raise InvalidInputError("log_probs are asked for, and a value head took the place of the LM head")

    def __call__(self, gpt: GPTModel, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return [names, 1, T] in float32.

        Heads that are there and not asked for get gradients of 0: buckets of gradients wait for all their weights.
        """
        outputs: list[Tensor] = []
        if self.log_probs:
            weight = gpt.shared_embedding_or_output_weight() if gpt.share_embeddings_and_output_weights else None
            chunk_tokens = self.chunk_tokens or loss_chunk_of(gpt.config) or labels.numel()
            outputs += token_log_probs(
                gpt.output_layer, hidden, labels, chunk_tokens, weight=weight, temperature=self.temperature
            )
        if self.values:
            outputs.append(getattr(gpt, _NAME)(hidden))
        idle = [gpt.output_layer] * (not self.log_probs) + [getattr(gpt, _NAME, None)] * (not self.values)
        weights = [weight for head in idle if head is not None for weight in head.parameters() if weight.requires_grad]
        return sum((0 * weight.flatten()[0].float() for weight in weights), start=torch.stack(outputs))

    @contextmanager
    def installed(self, chunks: Sequence[GPTModel]) -> Iterator[None]:
        """Have chunks of a model return this while the context lasts."""
        for chunk in chunks:
            chunk.token_outputs = self
        try:
            yield
        finally:
            for chunk in chunks:
                del chunk.token_outputs


_NAME = "value_head"


class ValueHead(torch.nn.Module):
    """A linear layer of width 1: the value of each token, or what its end says of a sample.

    Every TP rank has all of it. With sequence parallelism each computes the values of its part of the tokens.

    Args:
        seed: of the weights, which are the same on all ranks.
    """

    def __init__(self, config: Any, seed: int = 0) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        weight = torch.randn(config.hidden_size, generator=made) / (config.hidden_size + 1) ** 0.5
        device = "cpu" if config.use_cpu_initialization or not torch.cuda.is_available() else "cuda"
        self.weight = torch.nn.Parameter(weight.to(device, config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))
        self._is_sequence_parallel = config.sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # sum over TP ranks

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values [1, T] in float32 of hidden states [T, 1, H], of this rank's part of T."""
        values = (hidden @ self.weight[:, None] + self.bias).float()
        if self._is_sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values[..., 0].t()


def add_value_head(model: Sequence[GPTModel], *, replaces_lm_head: bool = False, seed: int = 0) -> None:
    """Give the last stage a value head; on all ranks, before the model is wrapped.

    Args:
        model: the bare chunks of this rank.
        replaces_lm_head: the LM head goes, where its weights are not the embedding's.
        seed: of the head's weights.
    """
    for chunk in model:
        if chunk.post_process:
            setattr(chunk, _NAME, ValueHead(chunk.config, seed))
            if replaces_lm_head and not chunk.share_embeddings_and_output_weights:
                chunk.output_layer = None


def bare(model: Sequence[torch.nn.Module]) -> list[GPTModel]:
    """Return the chunks of a model without their wrappers."""
    return [unwrap_model(chunk) for chunk in model]
