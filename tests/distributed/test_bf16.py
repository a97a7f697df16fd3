"""A step in bf16 as the trainer runs it: Float16Module, bf16 pipeline and ring messages, fp32 main gradients."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.dynamic_cp.attention.mechanisms import ring
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.model import layer_parts
from megatron.dynamic_cp.step import schedule
from tests.distributed.faults import around
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import layout_of
from tests.distributed.parity import Case, build_runtime, case_of, reference_name, run_stock_schedule

LINES = ("four bf16", "two tp2 sp pp2 bf16", "two pp2 layers=2 bf16", "two latent_8_heads bf16")


@dataclass(frozen=True)
class Step:
    """What a rank saw: sum and count of losses, dtypes of parameters and KV, parameter -> (cosine, norm ratio)."""

    loss_sum: float
    num_tokens: float
    parameter_dtypes: set[torch.dtype]
    kv_dtypes: set[torch.dtype]
    gradients: dict[str, tuple[float, float]]


def run_bf16_step(case: Case, in_fp32: bool = True) -> Step:
    """Run one step from the case's weights, rounded to bf16, and compare gradients with its fp32 ones."""
    config, (chunk,), model, _, wrapper, counterpart = build_runtime(*case, in_fp32=in_fp32)
    check_supported(config)
    model[0].zero_grad_buffer()
    kv_dtypes = set()

    @around(ring, "RingShift")
    def recording(shift: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kv_dtypes.add(tensor.dtype)
        return shift(tensor, *args, **kwargs)

    with recording():
        logs = run_stock_schedule(model, wrapper.wrap(0, case.samples), schedule.forward_step)
    total = sum((entry["lm loss"] for entry in logs), torch.zeros(2))
    dist.all_reduce(total)

    gradients = {}
    for name, parameter in chunk.named_parameters():
        assert parameter.main_grad.dtype == (torch.float32 if in_fp32 else torch.bfloat16)
        got = parameter.main_grad.float().flatten()
        wanted = counterpart(chunk, name, parameter, case.expected["gradients"]).flatten()
        assert torch.isfinite(got).all()
        cosine = torch.nn.functional.cosine_similarity(got, wanted, dim=0).item()
        gradients[reference_name(chunk, name)] = cosine, (got.norm() / wanted.norm()).item()
    return Step(*total.tolist(), {p.dtype for p in chunk.parameters()}, kv_dtypes, gradients)


def median_error(steps: list[Step]) -> float:
    return median(1 - cosine for step in steps for cosine, _ in step.gradients.values())


def assert_gradients_are_close(steps: list[Step]) -> None:
    for step in steps:
        for parameter, (cosine, ratio) in step.gradients.items():
            assert cosine > 0.998, parameter
            assert ratio == pytest.approx(1, abs=0.02), parameter


@pytest.mark.by_day("two pp2 layers=2 bf16")
@pytest.mark.parametrize("line", LINES)
def test_bf16_step_is_close_to_fp32(line: str, reference_of: Any) -> None:
    case = case_of(reference_of, layout_of(line))
    expected = case.expected
    steps = run_ranks(case.layout.topology.world_size, run_bf16_step, case)
    assert {g for step in steps for g in step.gradients} == set(expected["gradients"])
    fp32_loss = sum(losses.sum().item() for losses in expected["losses"].values()) / expected["num_tokens"]
    for step in steps:
        assert step.parameter_dtypes == step.kv_dtypes == {torch.bfloat16}, "the step did not run in bf16"
        assert step.num_tokens == case.layout.tp * expected["num_tokens"], "each TP rank counts every token once"
        assert step.loss_sum / step.num_tokens == pytest.approx(fp32_loss, rel=1e-3)
    assert_gradients_are_close(steps)


Dtypes = set[torch.dtype]


def stream_dtypes(case: Case) -> tuple[Step, tuple[Dtypes, Dtypes, Dtypes]]:
    """Return the step, and the dtypes of (residual, output of norms, message between stages)."""
    residual, of_norms, messages = set(), set(), set()

    @around(TransformerLayer, "forward")
    def watched_layer(forward: Any, self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, hidden_states, *args, **kwargs)
        residual.update((hidden_states.dtype, output[0].dtype))
        return output

    @around(layer_parts._RMSNormOfFloat32, "forward")
    def watched_norm(forward: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
        output = forward(self, x)
        of_norms.add(output.dtype)
        return output

    @around(dist.P2POp, "__init__")
    def watched_send(init: Any, self: Any, op: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        init(self, op, tensor, *args, **kwargs)
        messages.add(tensor.dtype)

    with watched_layer(), watched_norm(), watched_send():
        return run_bf16_step(case), (residual, of_norms, messages)


@pytest.mark.nightly
def test_a_residual_in_float32_is_nowhere_rounded_and_closer_to_float32(reference_of: Any) -> None:
    case = case_of(reference_of, layout_of("two pp2 bf16 fp32_stream"))
    results = run_ranks(4, stream_dtypes, case)
    for step, (residual, of_norms, messages) in results:
        assert residual == {torch.float32}
        assert of_norms == step.parameter_dtypes == step.kv_dtypes == {torch.bfloat16}
        assert torch.float32 in messages
    plain = run_ranks(4, run_bf16_step, case._replace(layout=layout_of("two pp2 bf16")))
    assert median_error([step for step, _ in results]) < 0.95 * median_error(plain)
