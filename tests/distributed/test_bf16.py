"""A step in bf16 as the trainer runs it: Float16Module, bf16 pipeline and ring messages, fp32 main gradients."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import TransformerLayer

from dynamic_cp.types import Plan, Sample
from megatron.dynamic_cp.attention.mechanisms import ring
from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.model import norm
from megatron.dynamic_cp.step import loss
from tests.distributed import parity, reference
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.parity import BATCHES, Layout, fixed_plan, mixed_plan

BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
LAYOUTS = {
    "dp4": Layout(4, config=BF16),
    "tp2_sp_pp2": Layout(2, tp=2, sp=True, pp=2, config=BF16),
    "latent_attention_and_later_tokens": Layout(2, variant="latent_8_heads", config=BF16),
}
PP2 = Layout(2, pp=2, config=BF16)
FP32_RESIDUAL = Layout(2, pp=2, config={**BF16, "fp32_residual_connection": True})


@dataclass(frozen=True)
class Step:
    """What a rank saw: sum and count of losses, dtypes of parameters and KV, parameter -> (cosine, norm ratio)."""

    loss_sum: float
    num_tokens: float
    parameter_dtypes: set[torch.dtype]
    kv_dtypes: set[torch.dtype]
    gradients: dict[str, tuple[float, float]]


def run_bf16_step(
    layout: Layout, samples: tuple[Sample, ...], plan: Plan, expected: dict[str, Any], in_fp32: bool = True
) -> Step:
    """Run one step from the weights of `expected`, rounded to bf16, and compare gradients with its fp32 ones.

    Args:
        in_fp32: gradients are added up and reduced in it.
    """
    initialize_model_parallel(layout.tp, layout.pp)
    groups = DynamicCPGroups.build(layout.topology, timeout_s=60, exchanges=("p2p",))
    config, (chunk,) = parity.build_chunks(layout, reference.VARIANTS[layout.variant])
    config.pipeline_dtype = torch.float32 if config.fp32_residual_connection else torch.bfloat16
    check_supported(config)
    config.finalize_model_grads_func = finalize_model_grads

    def counterpart(name: str, parameter: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        full = tensors[parity.reference_name(chunk, name)]
        return parity.tensor_parallel_part(parameter, full, parity.sections_of(name, full, config))

    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            parameter.copy_(counterpart(name, parameter, expected["initial"]))
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=in_fp32)
    model = DistributedDataParallel(config, ddp_config, Float16Module(config, chunk))
    model.zero_grad_buffer()

    kv_dtypes = set()
    shift = ring.RingShift

    def recording_shift(tensor, *args, **kwargs):
        kv_dtypes.add(tensor.dtype)
        return shift(tensor, *args, **kwargs)

    ring.RingShift = recording_shift
    by_id = {sample.sample_id: sample for sample in samples}
    wrapper = DataIteratorWrapper(
        plan_source=fixed_plan(plan, groups),
        read_sample=lambda sample_id: reference.read_sample(by_id[sample_id]),
        groups=groups,
        chunks=[ChunkNeeds.of(chunk)],
    )
    data = wrapper.wrap(0, samples)
    logs = get_forward_backward_func()(
        forward_step_func=loss.forward_step,
        data_iterator=data.data_iterators[0],
        model=model,
        num_microbatches=data.num_microbatches,
        seq_length=64,
        micro_batch_size=1,
        forward_only=False,
    )
    total = sum((entry["lm loss"] for entry in logs), torch.zeros(2))
    dist.all_reduce(total)

    gradients = {}
    for name, parameter in chunk.named_parameters():
        assert parameter.main_grad.dtype == (torch.float32 if in_fp32 else torch.bfloat16)
        got, wanted = (
            parameter.main_grad.float().flatten(),
            counterpart(name, parameter, expected["gradients"]).flatten(),
        )
        assert torch.isfinite(got).all()
        cosine = torch.nn.functional.cosine_similarity(got, wanted, dim=0).item()
        gradients[parity.reference_name(chunk, name)] = cosine, (got.norm() / wanted.norm()).item()
    return Step(*total.tolist(), {p.dtype for p in chunk.parameters()}, kv_dtypes, gradients)


def median_error(steps: list[Step]) -> float:
    return median(1 - cosine for step in steps for cosine, _ in step.gradients.values())


@pytest.mark.by_day("tp2_sp_pp2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_bf16_step_is_close_to_fp32(name: str, reference_of) -> None:
    layout, samples = LAYOUTS[name], BATCHES["long_tail"]
    expected = reference_of(layout, "long_tail")
    steps = run_ranks(layout.topology.world_size, run_bf16_step, layout, samples, mixed_plan(samples, layout), expected)
    assert {g for step in steps for g in step.gradients} == set(expected["gradients"])
    fp32_loss = sum(losses.sum().item() for losses in expected["losses"].values()) / expected["num_tokens"]
    for step in steps:
        assert step.parameter_dtypes == step.kv_dtypes == {torch.bfloat16}, "the step did not run in bf16"
        assert step.num_tokens == layout.tp * expected["num_tokens"], "each TP rank counts every token once"
        assert step.loss_sum / step.num_tokens == pytest.approx(fp32_loss, rel=1e-3)
        for parameter, (cosine, ratio) in step.gradients.items():
            assert cosine > 0.998, parameter
            assert ratio == pytest.approx(1, abs=0.02), parameter


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dp4", "tp2_sp_pp2"])
def test_gradients_in_bf16_are_close_to_fp32(name: str, reference_of) -> None:
    """What adding up and reducing in bf16 costs is of the size of what computing in it does."""
    layout, samples = LAYOUTS[name], BATCHES["long_tail"]
    expected = reference_of(layout, "long_tail")
    plan = mixed_plan(samples, layout)
    in_fp32, in_bf16 = (
        run_ranks(layout.topology.world_size, run_bf16_step, layout, samples, plan, expected, one)
        for one in (True, False)
    )
    assert [step.loss_sum for step in in_bf16] == [step.loss_sum for step in in_fp32]
    for step in in_bf16:
        for parameter, (cosine, ratio) in step.gradients.items():
            assert cosine > 0.998, parameter
            assert ratio == pytest.approx(1, abs=0.02), parameter
    assert median_error(in_fp32) < median_error(in_bf16) < 2 * median_error(in_fp32)


def stream_dtypes(layout: Layout, samples: tuple[Sample, ...], plan: Plan, expected: dict[str, Any]) -> Any:
    """Return the step, and the dtypes of (residual, output of norms, message between stages)."""
    found: tuple[set[torch.dtype], ...] = (set(), set(), set())
    forward = TransformerLayer.forward

    def watched(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, hidden_states, *args, **kwargs)
        found[0].update((hidden_states.dtype, output[0].dtype))
        return output

    TransformerLayer.forward = watched
    original = norm._RMSNormOfFloat32.forward

    def watched_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        output = original(self, x)
        found[1].add(output.dtype)
        return output

    norm._RMSNormOfFloat32.forward = watched_norm
    isend = dist.P2POp.__init__

    def watched_send(self: Any, op: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        isend(self, op, tensor, *args, **kwargs)
        found[2].add(tensor.dtype)

    dist.P2POp.__init__ = watched_send  # type: ignore[method-assign]
    return run_bf16_step(layout, samples, plan, expected), found


@pytest.mark.nightly
def test_a_residual_in_float32_is_nowhere_rounded_and_closer_to_float32(reference_of) -> None:
    samples = BATCHES["long_tail"]
    expected = reference_of(FP32_RESIDUAL, "long_tail")
    plan = mixed_plan(samples, FP32_RESIDUAL)
    results = run_ranks(4, stream_dtypes, FP32_RESIDUAL, samples, plan, expected)
    for step, (residual, of_norms, messages) in results:
        assert residual == {torch.float32}
        assert of_norms == step.parameter_dtypes == step.kv_dtypes == {torch.bfloat16}
        assert torch.float32 in messages
    plain = run_ranks(4, run_bf16_step, PP2, samples, plan, expected)
    assert median_error([step for step, _ in results]) < 0.95 * median_error(plain)
