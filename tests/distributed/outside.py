"""Steps of models outside Megatron: alone, one sample at a time, from plans, and how both compare."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from dynamic_cp import plan_lengths
from megatron.dynamic_cp.repairs import cpu_backend
from megatron.integrations.outside import train_step
from tests.distributed.harness import run_ranks

TOLERANCE = 5e-6
LEARNING_RATE = 0.5


class Step(NamedTuple):
    """What a step of an optimizer came from."""

    loss: float
    num_tokens: int
    gradients: dict[str, torch.Tensor]


@functools.cache
def load_planner() -> None:
    """Load what the planner compiled, by planning something: once, not in each of the ranks that are forked then."""
    options = {"model": "qwen2.5-7b", "hardware": "cpu", "cp_comm_types": "p2p"}
    assert plan_lengths([1000, 50, 3], num_lanes=4, max_tokens_per_rank=512, **options).num_microbatches


def run_without_shims(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """As `run_ranks`, without the shims that Megatron needs on CPU."""
    load_planner()
    shims = tuple(shim.name for shim in cpu_backend.SHIMS)
    return run_ranks(world_size, function, *args, shims_without=shims, timeout_s=120)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all gradients, whole ones of what is sharded."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).clone() for name, one in found.items()}


def steps_alone(
    model: torch.nn.Module, batches: Iterable[Sequence[Any]], count: Callable[[Any], int],
    share: Callable[[torch.nn.Module, Any, int], torch.Tensor],
) -> list[Step]:  # fmt: skip
    """Return the steps of a model that gets one unpacked sample at a time; `count`, `share` weigh a sample's loss."""
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), []
    for batch in batches:
        num_tokens, loss = sum(map(count, batch)), 0.0
        for sample in batch:
            part = share(model, sample, num_tokens)
            part.backward()
            loss += part.item()
        steps.append(Step(loss, num_tokens, gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def planned_steps(
    lanes: Any, model: torch.nn.Module, wrapped: torch.nn.Module, steps: Iterable[Any],
    losses: Callable[..., torch.Tensor], optimizer: Any = None, **options: Any,
) -> tuple[list[Step], list[Any], int]:  # fmt: skip
    """Return the steps of a wrapped model on this lane, their plans, and the bytes that it sent."""
    optimizer = optimizer or torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    found, plans, sent_bytes = [], [], 0
    for step in steps:
        result = train_step(lanes, wrapped, step, losses, **options)
        found.append(Step(result.loss, result.num_tokens, gradients_of(model)))
        plans.append(step.plan)
        sent_bytes += result.bytes_sent
        optimizer.step()
        optimizer.zero_grad()
    return found, plans, sent_bytes


def assert_steps_equal(
    found: Sequence[Step], expected: Sequence[Step], tolerance_of: Callable[[str], float] = lambda name: TOLERANCE
) -> None:
    """Losses and every gradient are the same in all steps."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.num_tokens == theirs.num_tokens > 0
        assert abs(ours.loss - theirs.loss) <= TOLERANCE * theirs.loss
        assert ours.gradients.keys() == theirs.gradients.keys() != set()
        for name, gradient in ours.gradients.items():
            # A bias of all keys changes no softmax: its terms, which are the weight's, cancel out.
            terms = theirs.gradients[name.replace("key.bias", "key.weight")]
            error = (gradient - theirs.gradients[name]).abs().max() / terms.abs().max()
            assert error <= tolerance_of(name), f"{name}: {error:.1e}"
