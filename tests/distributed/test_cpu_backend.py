"""Shims of random states and types on a CPU: operations of megatron-core are right with them and not without."""

import logging

import pytest
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from torch.overrides import _get_current_function_mode_stack

from dynamic_cp.errors import InvalidInputError
from megatron.dynamic_cp.repairs import cpu_backend
from tests.distributed import reference
from tests.distributed.harness import RankError, initialize_model_parallel, run_ranks

SEED = 7
MODEL_PARALLEL_SEED = SEED + 2718  # as model_parallel_cuda_manual_seed derives it on TP rank 0
NO_CUDA = "Torch not compiled with CUDA enabled|Found no NVIDIA driver|Cannot re-initialize CUDA in forked subprocess"
"""What torch says where it has no CUDA, no device, or is forked."""


def draws_of_seed(seed: int) -> torch.Tensor:
    return torch.rand(4, generator=torch.Generator().manual_seed(seed))


def build_bf16_optimizer(use_distributed_optimizer: bool) -> None:
    """Both optimizers find bf16 parameters by type name and keep fp32 copies of them."""
    initialize_model_parallel()
    config = reference.transformer_config(reference.LLAMA, bf16=True)
    module = torch.nn.Linear(4, 4)
    module.config = config
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=use_distributed_optimizer)
    model = DistributedDataParallel(config, ddp_config, Float16Module(config, module))
    optimizer_config = OptimizerConfig(
        lr=0.5, bf16=True, weight_decay=0.0, use_distributed_optimizer=use_distributed_optimizer
    )
    optimizer = get_megatron_optimizer(optimizer_config, [model])
    before = module.weight.detach().clone()
    assert before.dtype == torch.bfloat16
    module.weight.main_grad.fill_(1.0)
    optimizer.step()
    torch.testing.assert_close(module.weight.detach(), before - 0.5, rtol=0.02, atol=0.02)


def seed_a_region() -> None:
    """A region of the tracker draws the sequence of its own seed."""
    initialize_model_parallel(seed=SEED)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        drawn = torch.rand(4)
    assert torch.equal(drawn, draws_of_seed(MODEL_PARALLEL_SEED)), "the region's sequence is not that of its seed"


def keep_the_default_sequence() -> None:
    """Drawing inside a region does not move the sequence outside, and the region goes on where it stopped."""
    initialize_model_parallel(seed=SEED)
    torch.manual_seed(SEED)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    inside, outside = [], []
    for _ in range(2):
        outside.append(torch.rand(2))
        with tracker.fork():
            inside.append(torch.rand(2))
    assert torch.equal(torch.cat(outside), draws_of_seed(SEED)), "regions share one random sequence"
    generator = torch.Generator().manual_seed(MODEL_PARALLEL_SEED)
    expected = torch.cat([torch.rand(2, generator=generator) for _ in range(2)])
    assert torch.equal(torch.cat(inside), expected)


def recompute_dropout() -> None:
    """Recomputation draws the same dropout mask again, in a region and outside."""
    initialize_model_parallel(seed=SEED)

    def layer(x):
        with tensor_parallel.get_cuda_rng_tracker().fork():
            x = F.dropout(x, 0.5)
        return F.dropout(x, 0.5) * x.detach().new_tensor(3.0)

    x = torch.ones(64, requires_grad=True)
    y = tensor_parallel.checkpoint(layer, False, x)
    torch.rand(5)  # the sequences move on before backward
    with tensor_parallel.get_cuda_rng_tracker().fork():
        torch.rand(5)
    y.sum().backward()
    assert 0 < (y == 0).sum() < 64
    assert torch.equal(x.grad, y.detach()), "the recomputed dropout mask differs"


# Shim -> operation, and its symptom without it. Without any of the others test_parity, or the stock handshake of
# test_pipeline_p2p, does not run.
ABLATIONS = {
    "manual_seed": (seed_a_region, "the region's sequence is not that of its seed"),
    "tracker_get_rng_state": (recompute_dropout, NO_CUDA),
    "tracker_set_rng_state": (keep_the_default_sequence, "regions share one random sequence"),
}


@pytest.mark.by_day("tracker_get_rng_state")
@pytest.mark.parametrize("name", ABLATIONS)
def test_shim_is_needed(name: str) -> None:
    operation, symptom = ABLATIONS[name]
    run_ranks(1, operation, timeout_s=60)
    with pytest.raises(RankError, match=symptom):
        run_ranks(1, operation, timeout_s=60, shims_without=(name,))


@pytest.mark.parametrize("use_distributed_optimizer", [False, True])
def test_bf16_type_name_is_needed(use_distributed_optimizer: bool) -> None:
    run_ranks(1, build_bf16_optimizer, use_distributed_optimizer, timeout_s=60)
    with pytest.raises(RankError, match="TypeError: Wrapped parameters must be one of"):
        run_ranks(1, build_bf16_optimizer, use_distributed_optimizer, shims_without=("tensor_type_name",), timeout_s=60)


class _Recorder(torch.autograd.Function):
    """Asks for the device in forward and in backward, as megatron-core's tensor-parallel mappings do."""

    @staticmethod
    def forward(ctx, x, devices):
        ctx.devices = devices
        devices.append(("forward", torch.cuda.current_device()))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.devices.append(("backward", torch.cuda.current_device()))
        return grad * 2, None


def ask_for_the_device_everywhere() -> list[tuple[str, torch.device]]:
    initialize_model_parallel()
    devices: list[tuple[str, torch.device]] = []
    x = torch.ones(1, requires_grad=True)
    # Its backward recomputes forward. (Rules of the function mode would not hold there: torch suspends it.)
    tensor_parallel.checkpoint(lambda x: _Recorder.apply(x, devices), False, x).sum().backward()
    assert x.grad.item() == 2.0
    return devices


def test_backward_and_recomputation_find_the_device() -> None:
    cpu = torch.device("cpu")
    (devices,) = run_ranks(1, ask_for_the_device_everywhere, timeout_s=60)
    assert devices == [("forward", cpu), ("forward", cpu), ("backward", cpu)]


def draw_in_a_region() -> list[str]:
    """Return what megatron-core logs about it."""
    initialize_model_parallel()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        torch.rand(1)
    logging.getLogger(tensor_parallel.random.__name__).warning("another warning")
    return messages


def test_only_the_rng_warning_is_silenced() -> None:
    assert run_ranks(1, draw_in_a_region, timeout_s=60) == [["another warning"]]


def enable_again() -> tuple[int, int]:
    """Return the number of function modes before and after."""
    before = len(_get_current_function_mode_stack())
    cpu_backend.enable()
    cpu_backend.enable(without=[shim.name for shim in cpu_backend.SHIMS])
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(1, device="cuda:0").device.type == "cpu"
    assert torch.zeros(1, device=torch.device("cuda", 1)).device.type == "cpu"
    return before, len(_get_current_function_mode_stack())


def test_second_call_changes_nothing() -> None:
    assert run_ranks(1, enable_again, timeout_s=60) == [(1, 1)]


def test_refuses_when_cuda_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "_enabled_mode", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    current_device, modes = torch.cuda.current_device, len(_get_current_function_mode_stack())
    with pytest.raises(InvalidInputError, match=r"3 CUDA device.*CUDA_VISIBLE_DEVICES"):
        cpu_backend.enable()
    assert torch.cuda.current_device is current_device
    assert len(_get_current_function_mode_stack()) == modes
    assert cpu_backend._enabled_mode is None
