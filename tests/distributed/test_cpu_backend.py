"""Each CPU shim is needed: an operation of megatron-core works with all of them and breaks without that one.

A shim that nothing here needs is to be removed from `cpu_backend.SHIMS`, not left untested.
"""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
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


def count_tokens_of_a_step() -> None:
    """A schedule without pipelining; its token counter is created with device="cuda"."""
    initialize_model_parallel()
    config = reference.transformer_config(reference.LLAMA)
    model = torch.nn.Linear(3, 1, bias=False)
    model.config, model.model_type, model.set_input_tensor = config, ModelType.encoder_or_decoder, lambda _: None

    def forward_step(data_iterator, model):
        num_tokens = torch.tensor(next(data_iterator), dtype=torch.int)
        return model(torch.full((3,), 2.0)), lambda output: (output, num_tokens, {})

    counted = []
    config.finalize_model_grads_func = lambda model, num_tokens, **_: counted.append(num_tokens.item())
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([5, 6]),
        model=model,
        num_microbatches=2,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    assert counted == [11]
    assert model.weight.grad.tolist() == [[4.0, 4.0, 4.0]]


def clip_gradients() -> None:
    """Clipping asserts the type name of fp32 gradients."""
    initialize_model_parallel()
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    norm = get_grad_norm_fp32([parameter.grad], grad_stats_parallel_group=parallel_state.get_model_parallel_group())
    assert norm == 5.0
    clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=norm)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


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


def tie_embeddings_across_stages() -> None:
    """The last stage of a tied model takes the first stage's embedding by way of Tensor.cuda()."""
    initialize_model_parallel(pp=2)
    variant = reference.LLAMA_TIED
    config = reference.transformer_config(variant, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = reference.gpt_model(config, variant, spec, pre_process=first, post_process=last)
    weight = model.shared_embedding_or_output_weight().detach()
    weights = [torch.empty_like(weight) for _ in range(2)]
    torch.distributed.all_gather(weights, weight)
    assert weights[0].abs().sum() > 0
    assert torch.equal(*weights)


def build_gradient_buffers() -> None:
    initialize_model_parallel()
    config = reference.transformer_config(reference.LLAMA)
    module = torch.nn.Linear(4, 4)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), module)
    model(torch.ones(1, 4)).sum().backward()
    assert module.weight.main_grad.tolist() == [[1.0] * 4] * 4


def share_out_experts() -> None:
    """Each token reaches the experts of its choice on both ranks, and comes back."""
    initialize_model_parallel(ep=2)
    config = reference.transformer_config(
        reference.MOE, num_moe_experts=4, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    groups = moe_utils.get_default_pg_collection()
    first = 2 * groups.ep.rank()
    dispatcher = MoEAlltoAllTokenDispatcher(2, [first, first + 1], config=config, pg_collection=groups)
    routing_map = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0]], dtype=torch.bool)
    tokens = torch.arange(6.0).view(3, 1, 2) + 10 * groups.ep.rank()
    sent, probs = dispatcher.dispatch_preprocess(tokens, routing_map, routing_map * 0.5)
    received, counts, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(sent, probs))
    assert counts.tolist() == [[4, 2], [4, 2]][groups.ep.rank()]
    computed = dispatcher.combine_preprocess(2 * received * weights[:, None])
    found = dispatcher.combine_postprocess(dispatcher.token_combine(computed))
    torch.testing.assert_close(found, 2 * tokens)


def send_a_shape_and_a_tensor() -> None:
    """P2P between stages with shapes unknown to the receiver."""
    initialize_model_parallel(pp=2)
    config = reference.transformer_config(
        reference.LLAMA,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
    )
    communicator = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)
    if parallel_state.is_pipeline_first_stage():
        communicator.send_forward(torch.arange(6.0).view(3, 1, 2), is_last_stage=False)
    else:
        received = communicator.recv_forward((8, 1, 2), is_first_stage=False)
        assert received.flatten().tolist() == list(range(6))


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


# shim -> (ranks, operation, symptom without the shim)
ABLATIONS = {
    "device_keyword": (1, count_tokens_of_a_step, NO_CUDA),
    "tensor_type_name": (1, clip_gradients, r"assert param.grad.type\(\) == 'torch.cuda.FloatTensor'"),
    "tensor_cuda_method": (2, tie_embeddings_across_stages, NO_CUDA),
    "current_device": (1, build_gradient_buffers, NO_CUDA),
    "synchronize": (2, send_a_shape_and_a_tensor, NO_CUDA),
    "current_stream": (2, share_out_experts, NO_CUDA),
    "new_stream": (2, share_out_experts, f"requires CUDA support|{NO_CUDA}"),
    "split_sizes": (2, share_out_experts, "TypeError"),
    "get_rng_state": (1, initialize_model_parallel, NO_CUDA),
    "manual_seed": (1, seed_a_region, "the region's sequence is not that of its seed"),
    "tracker_get_rng_state": (1, recompute_dropout, NO_CUDA),
    "tracker_set_rng_state": (1, keep_the_default_sequence, "regions share one random sequence"),
}


def test_every_shim_has_its_ablation() -> None:
    assert set(ABLATIONS) == {shim.name for shim in cpu_backend.SHIMS}


@pytest.mark.by_day("tensor_cuda_method", "current_stream", "tracker_get_rng_state")
@pytest.mark.parametrize("name", ABLATIONS)
def test_shim_is_needed(name: str) -> None:
    world_size, operation, symptom = ABLATIONS[name]
    run_ranks(world_size, operation, timeout_s=60)
    with pytest.raises(RankError, match=symptom):
        run_ranks(world_size, operation, timeout_s=60, shims_without=(name,))


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
