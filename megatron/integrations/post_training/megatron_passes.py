"""Passes of post-training on Megatron's runtime: lanes, TP, PP and experts, on megatron-core's schedules. In the place
of losses the last stage computes `TokenOutputs` of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.plans.lane_plan import LanePlan
from dynamic_cp.types import Sample
from megatron.dynamic_cp.agreement.verify import collective_device
from megatron.dynamic_cp.data.data_iterator_wrapper import StepData
from megatron.dynamic_cp.data.micro_batches import handed_out
from megatron.dynamic_cp.model.chunked_head import ChunkedHead, ChunkedHeadModel, loss_chunk_of
from megatron.dynamic_cp.step.schedule import LossOutput, run_forward, run_schedule
from megatron.integrations.post_training.caller_order import (
    Gatherer,
    GivenColumns,
    LocalTokens,
    PassOutputs,
    agreed_order,
    evaluating,
)
from megatron.integrations.post_training.losses import Loss, Objective, agreed_columns, count_tokens

_OF_LM_HEAD = ("log_probs", "entropies")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """Which outputs are computed of hidden states, as rows of one tensor.

    Attributes:
        log_probs: the LM head's "log_probs" of the labels, and "entropies".
        values: the value head's "values".
        temperature: what logits are divided by, above 0.
        chunk_tokens: most tokens whose logits exist at once; None: as the model's configuration says for losses.
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
        """Raise InvalidInputError if nothing is asked for or a head is missing, and UnsupportedFeatureError for a model
        with multi-token prediction or of another package."""
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
        """Return [names, 1, T] in float32. Idle heads get gradients of 0: buckets of gradients wait for all weights."""
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
        """Make the model's chunks return these outputs while the context lasts."""
        for chunk in chunks:
            chunk.token_outputs = self
        try:
            yield
        finally:
            for chunk in chunks:
                del chunk.token_outputs


def token_log_probs(
    layer: ColumnParallelLinear,
    hidden: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    *,
    weight: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the labels and entropies, both [1, T] in float32 and with gradients, over chunks of tokens.
    `layer` is the LM head, whose TP ranks have a share of the vocabulary each; `hidden`, `labels` and `weight` are
    as of `ChunkedHeadModel.token_losses`. At most `chunk_tokens` tokens have logits at once, divided by
    `temperature` (> 0)."""
    if not temperature > 0:
        raise InvalidInputError(f"temperature is {temperature}, it must be greater than 0")

    def of_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor] = _LogProbs.apply(logits.squeeze(1), labels[0], temperature, layer.tp_group)
        return outputs[0][None], outputs[1][None]

    log_probs, entropies = ChunkedHead(layer, of_logits, chunk_tokens, gathers=False)(hidden, labels, weight)
    return log_probs, entropies


class _LogProbs(torch.autograd.Function):
    """Of shares of the vocabulary: log p = x_label - lse, entropy = lse - sum of p x; x are logits / temperature."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        x = logits.float() / temperature
        most = x.amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        x -= most[:, None]
        own = labels - group.rank() * x.shape[-1]
        is_own = (own >= 0) & (own < x.shape[-1])
        own = own.where(is_own, 0)[:, None]
        chosen = x.gather(-1, own)[:, 0] * is_own
        exponentials = x.exp()
        sums = torch.stack([exponentials.sum(-1), exponentials.mul_(x).sum(-1), chosen])
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(x, log_sum, entropy, own, is_own)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return sums[2] - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, of_log_prob: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        x, log_sum, entropy, own, is_own = ctx.saved_tensors
        log_probs = x - log_sum[:, None]
        factors = (log_probs + entropy[:, None]).mul_(-of_entropy[:, None]).sub_(of_log_prob[:, None])
        gradient = log_probs.exp_().mul_(factors)
        gradient.scatter_add_(-1, own, (of_log_prob * is_own)[:, None])
        return gradient.div_(ctx.temperature).to(ctx.dtype), None, None, None


_NAME = "value_head"


class ValueHead(torch.nn.Module):
    """A linear layer of width 1: the value of each token, or at its end that of a sample. Every TP rank has all its
    weights, which `seed` decides. With sequence parallelism each computes its part of the tokens."""

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
        """Return values [1, T] in float32 of this rank's part of the hidden states [T, 1, H]."""
        values = (hidden @ self.weight[:, None] + self.bias).float()
        if self._is_sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values[..., 0].t()


def add_value_head(model: Sequence[GPTModel], *, replaces_lm_head: bool = False, seed: int = 0) -> None:
    """Give the last stage's bare chunks a value head, on all ranks, before the model is wrapped. With
    `replaces_lm_head` the LM head is removed, unless its weights are the embedding's."""
    for chunk in model:
        if chunk.post_process:
            setattr(chunk, _NAME, ValueHead(chunk.config, seed))
            if replaces_lm_head and not chunk.share_embeddings_and_output_weights:
                chunk.output_layer = None


def bare(model: Sequence[torch.nn.Module]) -> list[GPTModel]:
    """Return the chunks of a model without their wrappers."""
    return [unwrap_model(chunk) for chunk in model]


_Batch = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The loss of a global batch and its number of tokens with a loss, the same on all ranks."""

    loss: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPasses:
    """Passes of a model.

    Attributes:
        model: chunks of this rank, as the schedule runs them; its configuration has calculate_per_token_loss, and
            finalize_model_grads_func for training.
        seq_length: an upper bound of tokens; pipeline stages exchange the real lengths.
    """

    model: Sequence[torch.nn.Module]
    seq_length: int
    outputs: TokenOutputs = field(default_factory=TokenOutputs)

    def forward(self, data: StepData, plan: LanePlan, samples: Sequence[Sample]) -> PassOutputs:
        """Return the outputs of all tokens in the order of `samples`, on all ranks. Collective over the job. The model
        runs in evaluation mode. For these samples `DataIteratorWrapper.wrap` returned `data`, and its `plan` is `plan`.
        """
        device = collective_device()
        order, of_lane = agreed_order(samples, plan, device, partial(self._check, data))
        gatherer = Gatherer(order, self.outputs.names, device, is_speaker=_is_speaker())

        def take(batch: _Batch, micro_batch: LocalTokens, outputs: Tensor) -> LossOutput:
            gatherer.add(dict(zip(self.outputs.names, outputs, strict=True)), batch["loss_mask"], micro_batch)
            return outputs.sum(), torch.zeros((), dtype=torch.int, device=outputs.device), {}

        with evaluating(self.model):
            self._run(data, of_lane, take, forward_only=True)
        return gatherer.gathered()

    def train(
        self, data: StepData, plan: LanePlan, samples: Sequence[Sample], columns: GivenColumns, loss: Loss
    ) -> PassResult:
        """Add the gradients of the loss of a global batch to the buffers. Collective over the job. `data` and `plan`
        are as for `forward`; `columns` are those of `samples`, in their order. Raises DynamicCPError: bad columns, no
        token with a loss, or outputs that the model cannot compute; on all ranks."""
        device = collective_device()
        order, of_lane = agreed_order(samples, plan, device, partial(self._check, data, trains=True))
        checked = agreed_columns(order, columns, loss, plan, device, self.outputs.names)
        held = [list(iterator) for iterator in data.data_iterators]
        masks = [batch["loss_mask"] for batch in held[-1]] if _is_speaker() else []
        counts = count_tokens(order, of_lane if masks else [], masks, device)
        objective = Objective.of(loss, checked, counts)
        total = torch.zeros((), dtype=torch.float64, device=device)

        def share(batch: _Batch, micro_batch: LocalTokens, outputs: Tensor) -> LossOutput:
            named = dict(zip(self.outputs.names, outputs, strict=True))
            own = objective.share(named, batch["loss_mask"], micro_batch, batch["packed_seq_params"])
            if _is_speaker():
                total.add_(own.detach())
            return objective.scale * own, batch["loss_mask"].sum().to(torch.int), {}

        waiting = [handed_out(batches) for batches in held]
        del held
        self._run(StepData(waiting, *data[1:]), of_lane, share, forward_only=False)
        dist.all_reduce(total)
        return PassResult(loss=float(total) / objective.divisor, num_tokens=objective.num_tokens)

    def _check(self, data: StepData, *, trains: bool = False) -> None:
        if data.run is not None:
            raise UnsupportedFeatureError(
                "the plan has servers of all stages, which passes of post-training cannot run: plan without them"
            )
        self.outputs.check(bare(self.model))
        if trains and bare(self.model)[0].config.finalize_model_grads_func is None:
            raise UnsupportedFeatureError(
                "finalize_model_grads_func of the model's configuration is None, so gradients of lanes would stay "
                "apart: set it to megatron.core.distributed.finalize_model_grads"
            )

    def _run(
        self,
        data: StepData,
        of_lane: Sequence[LocalTokens],
        take: Callable[[_Batch, LocalTokens, Tensor], LossOutput],
        *,
        forward_only: bool,
    ) -> None:
        """Run all micro-batches; on the last stage `take` gets the outputs of each, and returns its loss."""

        def forward_step(iterator: Iterator[Any], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., LossOutput]]:
            batch, micro_batch = next(iterator)
            return run_forward(batch, chunk), partial(take, batch, micro_batch)

        paired = StepData([zip(iterator, of_lane, strict=True) for iterator in data.data_iterators], *data[1:])
        with self.outputs.installed(bare(self.model)):
            run_schedule(
                self.model,
                paired,
                self.seq_length,
                forward_only=forward_only,
                rank_tokens=[len(micro_batch.places) for micro_batch in of_lane],
                forward_step_func=forward_step,
            )


def _is_speaker() -> bool:
    """Return whether results of this rank count: it is TP rank 0 of the last stage."""
    stage, num_stages = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    return stage == num_stages - 1 and parallel_state.get_tensor_model_parallel_rank() == 0
