"""A model on this rank that runs passes of given plans, through the trainer's own schedule call."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.module import Float16Module

from dynamic_cp.plans.lane_plan import PlanFacts, lane_plan
from dynamic_cp.types import Plan, PlannedBatch, Sample
from megatron.dynamic_cp.data.data_iterator_wrapper import StepData
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds, PackedStep, for_chunk, micro_batches, pack_step
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import ExchangeStats
from megatron.dynamic_cp.step.schedule import run_schedule
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel
from tests.distributed.parity import Layout, build_chunks


class Trainee:
    """A model on this rank, ready to run passes."""

    def __init__(self, layout: Layout, **settings: Any) -> None:
        initialize_model_parallel(layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None)
        self.groups = DynamicCPGroups.build(layout.topology, timeout_s=60, exchanges=("p2p",))
        variant = reference.VARIANTS[layout.variant]
        self.config, chunks = build_chunks(layout, variant)
        for name, value in settings.items():
            setattr(self.config, name, value)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.needs = [ChunkNeeds(tokens=chunk.pre_process, labels=chunk.post_process) for chunk in chunks]
        if self.config.bf16:
            self.config.pipeline_dtype = torch.bfloat16
            chunks = [Float16Module(self.config, chunk) for chunk in chunks]
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = [DistributedDataParallel(self.config, ddp_config, chunk) for chunk in chunks]

    def pack(self, plan: Plan, samples: Sequence[Sample]) -> PackedStep:
        by_id = {sample.sample_id: sample for sample in samples}
        planned = PlannedBatch(
            plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,) * plan.topology.num_lanes, reason="test"
        )
        return pack_step(
            lane_plan(plan, self.groups.lane, PlanFacts.of(planned)),
            lambda sample_id: reference.read_sample(by_id[sample_id]),
        )

    def step_data(self, packed: PackedStep) -> StepData:
        batches = list(micro_batches(packed, self.groups, torch.device("cpu"), "test", ExchangeStats()))
        return StepData([for_chunk(batches, needs) for needs in self.needs], len(batches), 0, 0)

    def run(self, packed: PackedStep, *, forward_only: bool = False, **options: Any) -> list[torch.Tensor]:
        """Run a pass with gradients from 0; return what the loss function logged."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        with torch.set_grad_enabled(not forward_only):
            logged = run_schedule(self.model, self.step_data(packed), 64, forward_only=forward_only, **options)
        return [entry["lm loss"] for entry in logged]

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            f"{index}.{name}": parameter.main_grad.clone()
            for index, chunk in enumerate(self.model)
            for name, parameter in chunk.named_parameters()
        }
