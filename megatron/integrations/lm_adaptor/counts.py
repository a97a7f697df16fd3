"""Figures of a checkout's step, for global batches of any size: samples, FLOPs, and what its log and writers show."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

from dynamic_cp.plans.serialize import format_cp_sizes
from megatron.dynamic_cp.model.experts import routers
from megatron.dynamic_cp.step.schedule import Routing
from megatron.integrations.lm_adaptor import checkout
from megatron.trainer.reporting.log import Interval, StepRecord, plan_scalars


class Samples(NumMicroBatchesCalculator):
    """Takes the place of Megatron-LM's calculator: the global batch has any size, and the plan sets the micro-batches.

    Megatron-LM counts samples as micro-batches times micro-batch size times data-parallel size. Inside `counted` that
    product is the global batch; elsewhere it is rounded up to a multiple of the lanes.
    """

    def __init__(self, global_batch_size: int, num_lanes: int) -> None:
        super().__init__()
        self.num_micro_batches = -(-global_batch_size // num_lanes)
        self.current_global_batch_size = self.current_running_global_batch_size = global_batch_size
        self.micro_batch_size = 1
        self._num_lanes = num_lanes

    @property
    def overcounted(self) -> int:
        """Samples by which the product exceeds the global batch."""
        return int(self.num_micro_batches * self._num_lanes - self.current_global_batch_size)

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Nothing changes during a run."""

    @contextlib.contextmanager
    def counted(self, args: argparse.Namespace) -> Iterator[None]:
        """Make Megatron-LM's product the samples of the global batch, as if one lane had a micro-batch for each."""
        num_micro_batches, data_parallel_size = self.num_micro_batches, args.data_parallel_size
        self.num_micro_batches, args.data_parallel_size = self.current_global_batch_size, 1
        try:
            yield
        finally:
            self.num_micro_batches, args.data_parallel_size = num_micro_batches, data_parallel_size


class StepFlops:
    """FLOPs of the latest steps, from the true lengths of their samples."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._is_over = False

    def add(self, flops: float) -> None:
        if self._is_over:
            self._steps.clear()
            self._is_over = False
        self._steps.append(flops)

    @property
    def latest(self) -> float:
        return self._steps[-1]

    @property
    def mean(self) -> float:
        """Mean FLOPs of the steps since `start_interval`, or of those before it until a new one is added."""
        return sum(self._steps) / len(self._steps)

    def start_interval(self) -> None:
        """Begin the next log interval with the next step."""
        self._is_over = True


def tell_tracker(routing: Routing, chunks: Iterable[torch.nn.Module], num_micro_batches: int) -> None:
    """Have Megatron-LM log the losses of our routers instead of those of megatron-core.

    It sums over stages, averages over lanes and divides by `num_micro_batches`; every rank knows the means of its
    layers.
    """
    for router in routers(chunks):
        layer = routing.layers.get(router.number_in_model)
        types = router.config.moe_router_load_balancing_type
        aux = (
            "load_balancing_loss"
            if "aux_loss" in ([types] if isinstance(types, str) else types)
            else "seq_load_balancing_loss"
        )
        losses = {aux: "aux_loss"} if routing.has_aux_loss else {}
        for name, field in (losses | ({"z_loss": "z_loss"} if routing.has_z_loss else {})).items():
            mean = 0.0 if layer is None else getattr(layer, field)
            value = torch.tensor(mean * num_micro_batches, device=router.weight.device)
            _tell(name, value, router.layer_number, router.config.num_layers)


def _tell(name: str, value: torch.Tensor, layer_number: int, num_layers: int) -> None:
    if checkout.TRACKER_OF_ROUTERS.here:
        logging_of_moe = importlib.import_module("megatron.core.transformer.moe.moe_logging")
        logging_of_moe.get_moe_metrics_tracker().record(name, value, layer_number, num_layers)
    else:
        save_to_aux_losses_tracker(name, value, layer_number, num_layers)


def plan_line(record: StepRecord) -> str:
    """Return one line about a step and its plan, in the form of Megatron-LM's log."""
    plan = record.plan
    fields = [
        " dynamic CP",
        f"micro-batches: {plan.num_microbatches}",
        f"samples: {plan.num_samples}",
        f"tokens: {plan.seqlen_sum}",
        f"buckets: {format_cp_sizes(plan.cp_histogram)}",
        f"padding: {100 * plan.padding_fraction:.1f}%",
        f"imbalance: {plan.imbalance:.3f}",
        *([] if record.routing is None else [f"imbalance of experts: {record.routing.mean('imbalance'):.3f}"]),
        f"exchanged (MB): {record.exchanged_bytes / 1e6:.2f}",
        f"predicted (ms): {1000 * plan.predicted_s:.1f}",
        f"measured/predicted: {record.elapsed_s / plan.predicted_s:.3f}",
        f"planner (ms): {1000 * plan.planner_s:.1f}",
        f"before the first micro-batch (ms): {1000 * record.wait_s:.1f}",
    ]
    if plan.fallback is not None:
        fields.append(f"static plan: {plan.fallback}")
    return " | ".join(fields) + " |"


def write_scalars(record: StepRecord, iteration: int) -> None:
    """Write the plan's figures to Megatron-LM's TensorBoard and Weights & Biases, on the rank that has them."""
    global_vars = importlib.import_module("megatron.training.global_vars")
    scalars = plan_scalars(Interval(records=(record,), world_size=dist.get_world_size()))
    writer, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if writer is not None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(scalars, iteration)
