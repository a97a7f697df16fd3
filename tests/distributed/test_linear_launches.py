"""What a layer of linear attention starts on a GPU besides its kernels, and what that moves through memory; its price.

Nothing is computed: tensors have shapes and no memory, kernels give empty outputs, and nothing travels.
"""

from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.pricing.linear_prices import BACKWARD_OVER_FORWARD, StageLinearAttention, core_flops_per_s
from dynamic_cp.types import IN_NODE, LinearAttention, PlanOptions, Problem, StateExchange, Topology
from dynamic_cp.types.linear_attention import CHUNK_TOKENS, CHUNKS_PER_LANE
from megatron.dynamic_cp.attention.linear import layer as layer_of_heads
from megatron.dynamic_cp.attention.linear import thd
from megatron.dynamic_cp.attention.linear.recurrence import LinearKernel, Runs, Steps
from megatron.dynamic_cp.attention.linear.thd import gated_delta_net_thd, mamba2_thd
from tests.distributed.emulated_lanes import Board, EmulatedGroup
from tests.distributed.harness import params_of
from tests.distributed.linear_reference import hybrid_of
from tests.launches import Launches, count

LAYERS = {
    "gated_delta_net": LinearAttention(
        kind="gated_delta_net", num_heads=32, num_groups=16, key_size=128, value_size=128
    ),
    "mamba2": LinearAttention(kind="mamba2", num_heads=128, num_groups=8, key_size=128, value_size=64),
}
TOKENS, SAMPLES = 8192, 8
"""Of a lane; of a pack."""
NO_LINKS = {"bandwidth_in_node_bytes_per_s": 1e18, "bandwidth_across_nodes_bytes_per_s": 1e18}
FREE_LINKS = replace(load_hardware("h100"), **NO_LINKS, exchange_latency_s_per_layer=0.0)


class _Kernel(torch.autograd.Function):
    """Empty outputs of some shapes and dtypes, and empty gradients."""

    @staticmethod
    def forward(ctx: Any, shapes: Any, *given: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*given)
        (like,) = (one for one in given[:1] if one is not None)
        return tuple(like.new_empty(shape, dtype=dtype) for shape, dtype in shapes)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if one is None else one.new_empty(one.shape) for one in ctx.saved_tensors)


def scan(steps: Steps, runs: Runs, state: Tensor | None, *, only_state: bool = False) -> tuple[Tensor, Tensor]:
    tensors = [tensor.contiguous() for tensor in steps.tensors]  # as the kernel wants them
    k, v = tensors[1:3]
    assert steps.beta_TH is not None or k.shape[1] == v.shape[1], "only a delta rule takes groups"
    behind = (len(runs.lengths), v.shape[1], k.shape[2], v.shape[2])
    found: tuple[Tensor, Tensor] = _Kernel.apply(
        ((v.shape, v.dtype), (behind, torch.float32)), *tensors, None if state is None else state.contiguous()
    )
    return found


class _Norm(torch.autograd.Function):
    """Moves what the kernel moves, which no price has beside it: x there; the output and its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(found := x.contiguous().neg())
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0] + grad


EMPTY = LinearKernel(
    name="empty",
    convolve=lambda x, weight, bias, runs: _Kernel.apply(((x.shape, x.dtype),), x, weight, bias)[0],
    normalize=_Norm.apply,
    gated_norm=lambda x, z, weight, *_: _Kernel.apply(((x.shape, x.dtype),), x, z, weight)[0],
    scan=scan,
)


class Counted(NamedTuple):
    forward: Launches
    backward: Launches


def counted(kind: str, way: StateExchange, cp_size: int, tokens: int = TOKENS, samples: int = SAMPLES) -> Counted:
    """Return what a second layer starts: the first one makes what a micro-batch keeps."""
    sizes, unit = LAYERS[kind], 2 * cp_size
    padded = [tokens * cp_size // samples // unit * unit] * samples
    padded[-1] += tokens * cp_size - sum(padded)

    def random(*shape: int, of: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=of, requires_grad=True)

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(thd, "choose_linear_kernel", return_value=EMPTY),
        mock.patch.object(dist, "all_to_all_single"),
        mock.patch.object(layer_of_heads, "exact_dtype", return_value=torch.float32),  # as on a GPU
    ):
        group, held = EmulatedGroup(0, Board(cp_size)), torch.zeros(tokens, dtype=torch.int64)
        params = params_of(padded, held, group, state_exchange=way)
        channels, heads, exact = sizes.convolved_channels, sizes.num_heads, torch.float32
        x, gate = random(tokens, channels), random(tokens, heads, of=exact)
        weight = random(channels, 1, sizes.kernel_size)

        def layer() -> Tensor:
            if kind == "gated_delta_net":
                return gated_delta_net_thd(x, random(tokens, heads), gate, weight, params, sizes)
            parameters = random(heads, of=exact), random(heads), weight, random(channels)
            return mamba2_thd(x, gate, *parameters, params, sizes)

        layer()
        out, forward = count(layer)
        _, backward = count(lambda: out.backward(torch.empty_like(out)))
    return Counted(forward, backward)


CASES: list[tuple[str, StateExchange, int]] = [
    (kind, way, cp_size)
    for kind in LAYERS
    for way, sizes in {"heads": (1, 2, 4, 8), "states": (2, 4, 8)}.items()
    for cp_size in sizes
]
MOST = {
    ("gated_delta_net", "heads", 1): ((4, 0.41), (5, 0.63)), ("gated_delta_net", "heads", 4): ((27, 1.91), (23, 1.97)),
    ("gated_delta_net", "heads", 8): ((39, 1.91), (27, 1.97)),
    ("gated_delta_net", "states", 4): ((39, 3.44), (44, 3.09)),
    ("gated_delta_net", "states", 8): ((44, 4.08), (52, 3.73)), ("mamba2", "heads", 1): ((10, 1.60), (22, 4.70)),
    ("mamba2", "heads", 4): ((28, 3.78), (44, 6.77)), ("mamba2", "heads", 8): ((36, 3.78), (48, 6.77)),
    ("mamba2", "states", 4): ((49, 5.00), (61, 7.74)), ("mamba2", "states", 8): ((54, 5.71), (69, 8.20)),
}  # fmt: skip
"""Launches and GB, forward and backward, which a layer may not exceed."""


def test_layers_start_no_more_and_move_no_more_than_they_did() -> None:
    for (kind, way, cp_size), most in MOST.items():
        found = [(one.number, one.bytes_moved / 1e9) for one in counted(kind, way, cp_size)]
        for (number, gigabytes), (most_launches, most_gigabytes) in zip(found, most, strict=True):
            assert number <= most_launches, (kind, way, cp_size, found)
            assert 0.95 * most_gigabytes < gigabytes <= most_gigabytes, (kind, way, cp_size, found)


def priced(kind: str, way: StateExchange, cp_size: int, samples: int) -> list[float]:
    """Return seconds of a layer without its exchange, forward and backward, on an H100."""
    sizes, options = LAYERS[kind], PlanOptions(max_tokens_per_rank=TOKENS, cp_comm_types=("p2p",))
    model = hybrid_of(sizes)
    problem = Problem(topology=Topology(num_lanes=8), model=model, hardware=FREE_LINKS, options=options)
    stage = StageLinearAttention(model.stages(1)[0], sizes, problem)
    found = (
        {"states": stage.by_states, "heads": stage.by_heads}[way](cp_size, IN_NODE) if cp_size > 1 else stage.alone()
    )
    return [one.linear.per_token * TOKENS * cp_size + one.per_sample * samples for one in found]


def kernels(kind: str, way: StateExchange, cp_size: int, samples: int) -> tuple[float, float]:
    """Return seconds of a layer's kernels at the rates of an H100, as prices have them."""
    sizes, rate = LAYERS[kind], core_flops_per_s(FREE_LINKS)
    convolved = TOKENS * sizes.convolved_channels * 2 / FREE_LINKS.memory_bandwidth_bytes_per_s
    core, again = (TOKENS * flops / rate for flops in (sizes.core_flops, sizes.summary_flops))
    half_chunks = CHUNKS_PER_LANE * CHUNK_TOKENS / 2 * samples / TOKENS * (way == "states" and cp_size > 1)
    if cp_size == 1 or way == "heads":
        return core + 2 * convolved, BACKWARD_OVER_FORWARD * core + 4 * convolved
    composing = samples * CHUNKS_PER_LANE * sizes.carrying_flops(CHUNKS_PER_LANE * cp_size) / rate
    forward, backward = core + again, 2 * BACKWARD_OVER_FORWARD * core
    return (
        forward * (1 + half_chunks) + 2 * convolved + composing,
        backward * (1 + half_chunks) + 4 * convolved + composing,
    )


@pytest.mark.parametrize("samples", [1, 8, 32])
def test_layers_are_priced_as_they_are_counted(samples: int) -> None:
    """Seconds of kernels and of all that is started around them, which is most of a layer."""
    for kind, way, cp_size in CASES:
        of_kernels = kernels(kind, way, cp_size, samples)
        around = [
            one.bytes_moved / FREE_LINKS.memory_bandwidth_bytes_per_s
            for one in counted(kind, way, cp_size, samples=samples)
        ]
        for own, more, price in zip(of_kernels, around, priced(kind, way, cp_size, samples), strict=True):
            assert 0.9 < price / (own + more) < 1.1, (kind, way, cp_size, own, more, price)
            assert more > 1e-4, "there is something to price"
