"""One pass of a global batch through megatron-core's schedule: a forward step, its loss, and the sums that follow.

With the mandatory `calculate_per_token_loss=True` each rank returns the sum of its tokens' losses and their count, and
the schedules and `finalize_model_grads` divide by the count over the whole job. Shards are disjoint, so this is exact
for any mixture of CP sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.agreement import phase
from megatron.dynamic_cp.data.data_iterator_wrapper import StepData
from megatron.dynamic_cp.flags.experts import aux_loss_coeff
from megatron.dynamic_cp.flags.features import FUTURE_LOSS
from megatron.dynamic_cp.measuring import bucket_span, span
from megatron.dynamic_cp.model.experts import routers
from megatron.dynamic_cp.packed_seq_params import FutureColumns
from megatron.dynamic_cp.step.pipeline_p2p import PlannedP2PCommunicator, schedule_groups

LossOutput = tuple[Tensor, Tensor, dict[str, Tensor]]


def sum_of_losses(loss_mask: Tensor, token_losses: Tensor, future: FutureColumns | None = None) -> LossOutput:
    """Return (sum of the losses of unmasked tokens, their number as int, {"lm loss": [sum, number]}). Losses of
    multi-token prediction (`future`), whose gradients the model has attached already, are logged beside it.
    `loss_mask` is float32 [1, T], 0 for padding; `token_losses` [1, T]."""
    mask = loss_mask.reshape(-1)
    total = torch.sum(token_losses.reshape(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    logged = {"lm loss": torch.stack([total.detach(), num_tokens.to(total.dtype)])}
    if future is not None:
        logged |= {FUTURE_LOSS.format(depth): found for depth, found in enumerate(future.found, 1)}
    return total, num_tokens, logged


def forward_step(
    data_iterator: Iterator[dict[str, Any]], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], LossOutput]]:
    """Run the next micro-batch through `model`; megatron-core calls the returned function on the last stage."""
    batch = next(data_iterator)
    output = run_forward(batch, model)
    return output, partial(sum_of_losses, batch["loss_mask"], future=batch["packed_seq_params"].future)


def run_forward(batch: dict[str, Any], model: torch.nn.Module) -> Tensor:
    """Return a model chunk's output for a micro-batch: hidden states, on the last stage losses or `token_outputs`."""
    params = batch["packed_seq_params"]
    phase.enter_micro_batch(params.label, len(params.positions))
    with span("%s", params.label), bucket_span("forward", params):
        output: Tensor = model(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params
        )
    return output


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouting:
    """The router of one layer; losses are means over the tokens of all sequences, without their coefficients.
    `aux_loss` is 1.0 if even, where scores are a softmax. `imbalance`: tokens of the expert that got most, over the
    mean."""

    aux_loss: float
    z_loss: float
    imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """All routers of a step, by the number of their layer, from 1, with those of multi-token prediction behind the
    last. Losses that are not trained with (`has_aux_loss`, `has_z_loss`) are 0."""

    layers: Mapping[int, LayerRouting]
    has_aux_loss: bool
    has_z_loss: bool

    def mean(self, name: str) -> float:
        """Return the mean over the layers of a field of LayerRouting."""
        return sum(getattr(layer, name) for layer in self.layers.values()) / max(1, len(self.layers))


def sum_over_routers(chunks: Sequence[torch.nn.Module], device: torch.device) -> Routing | None:
    """Return the sums of all routers since the last call, None for a dense model. One all-reduce over the job."""
    config = chunks[0].config
    if config.num_moe_experts is None:
        return None
    num_layers = config.num_layers + (config.mtp_num_layers or 0)
    sums = torch.zeros(num_layers, config.num_moe_experts + 3, dtype=torch.float64, device=device)
    for router in routers(chunks):
        counted = router.take_sums()
        if counted is not None:
            sums[router.number_in_model - 1] += counted
    dist.all_reduce(sums)
    layers = {}
    for number, (*tokens, aux, z, num_tokens) in enumerate(sums.tolist(), start=1):
        routed = sum(tokens)
        if routed:
            layers[number] = LayerRouting(
                aux_loss=aux / num_tokens,
                z_loss=z / num_tokens,
                imbalance=max(tokens) * config.num_moe_experts / routed,
            )
    return Routing(layers=layers, has_aux_loss=aux_loss_coeff(config) > 0, has_z_loss=bool(config.moe_z_loss_coeff))


def run_schedule(
    model: Sequence[torch.nn.Module],
    data: StepData,
    seq_length: int,
    *,
    forward_only: bool,
    rank_tokens: Sequence[int] | None = None,
    verify_messages: bool = False,
    forward_step_func: Callable[..., Any] = forward_step,
) -> list[dict[str, Any]]:
    """Run all micro-batches forward (and backward); return what the loss function logged, [] before the last stage.

    A step whose plan has a pool runs by `StepData.run`, all others on megatron-core's schedules.

    Args:
        seq_length: an upper bound; pipeline stages exchange the real lengths.
        rank_tokens: padded tokens of this lane in each micro-batch, from the plan; None: megatron-core's handshake.
        verify_messages: first compare the messages of the step between stages; collective over the job.
    """
    single = len(model) == 1
    planned: dict[str, Any] = {}
    if rank_tokens is not None and parallel_state.get_pipeline_model_parallel_world_size() > 1:
        pp_group, config = parallel_state.get_pipeline_model_parallel_group(), get_model_config(model[0])
        communicator = PlannedP2PCommunicator(pp_group, config, rank_tokens, forward_only=forward_only)
        if verify_messages:
            communicator.check_neighbours()
        planned = {"p2p_communicator": communicator, "pg_collection": schedule_groups()}
    if data.run is not None:
        if not planned:
            raise UnsupportedFeatureError(
                f"the plan has servers of all stages, which {parallel_state.get_pipeline_model_parallel_world_size()} "
                "stages cannot run: at least 2 are needed, and the tokens of the plan (`rank_tokens`)"
            )
        return data.run(
            model,
            data.data_iterators,
            communicator,
            planned["pg_collection"],
            num_microbatches=data.num_microbatches,
            forward_step_func=forward_step_func,
            forward_only=forward_only,
        )
    logged = get_forward_backward_func()(
        forward_step_func=forward_step_func,
        data_iterator=data.data_iterators[0] if single else data.data_iterators,
        model=model[0] if single else list(model),
        num_microbatches=data.num_microbatches,
        seq_length=seq_length,
        micro_batch_size=1,
        forward_only=forward_only,
        **planned,
    )
    if planned:
        communicator.finish()
    return logged


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSums:
    """What a pass gave, summed over all ranks.

    Attributes:
        loss_sum, num_tokens: over the unmasked tokens of the global batch.
        stop, is_writing: some rank wants to leave, or still writes files of a checkpoint.
        process_s: CPU time of the ranks.
        future_losses: mean loss per token of each depth of multi-token prediction.
    """

    loss_sum: float
    num_tokens: int
    exchanged_bytes: int
    stop: bool
    is_writing: bool
    process_s: float
    future_losses: tuple[float, ...] = ()

    @property
    def loss(self) -> float:
        """Mean loss per token."""
        return self.loss_sum / max(1, self.num_tokens)


def sum_over_job(
    logged: Sequence[dict[str, Any]],
    *,
    exchanged_bytes: int,
    stop: bool,
    device: torch.device,
    is_writing: bool = False,
    process_s: float = 0.0,
    num_depths: int = 0,
) -> JobSums:
    """Return the sums of all ranks, alike on each, by one all-reduce of six numbers, and two more per depth."""
    # One copy: writing the host's numbers into a GPU's tensor one by one waits each time.
    of_rank = [0.0, 0.0, exchanged_bytes, stop, is_writing, process_s]
    names = ["lm loss", *(FUTURE_LOSS.format(depth) for depth in range(1, num_depths + 1))]
    sums = torch.tensor([*of_rank, *[0.0] * (2 * num_depths)], dtype=torch.float64, device=device)
    # Tensor-parallel ranks hold the same losses, pipeline stages before the last none.
    if logged and parallel_state.get_tensor_model_parallel_rank() == 0:
        losses = torch.stack([torch.stack([entry[name] for name in names]) for entry in logged])
        total = losses.double().sum(dim=0)
        sums[:2] = total[0]
        sums[len(of_rank) :] = total[1:].reshape(-1)
    with span("sums over the job"):
        dist.all_reduce(sums)
        loss_sum, num_tokens, total_bytes, num_stops, num_writing, total_process_s, *of_depths = sums.tolist()
    return JobSums(
        loss_sum=loss_sum,
        num_tokens=int(num_tokens),
        exchanged_bytes=int(total_bytes),
        stop=num_stops > 0,
        is_writing=num_writing > 0,
        process_s=total_process_s,
        future_losses=tuple(of_depths[k] / max(1, of_depths[k + 1]) for k in range(0, len(of_depths), 2)),
    )
