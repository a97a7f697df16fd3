"""Linear attention of packs over lanes equals that of each sample alone, token after token; mistakes show."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dynamic_cp.types import LinearAttention, StateExchange
from megatron.dynamic_cp.attention.linear.thd import gated_delta_net_thd, mamba2_thd
from megatron.dynamic_cp.attention.mechanisms.row_order import gathered_order
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from tests.distributed.emulated_lanes import on_lanes
from tests.distributed.linear_reference import REFERENCES, random_inputs

LAYERS = {
    "gated_delta_net": LinearAttention(
        kind="gated_delta_net", num_heads=6, num_groups=3, key_size=3, value_size=5, kernel_size=4
    ),
    "mamba2": LinearAttention(kind="mamba2", num_heads=4, num_groups=2, key_size=5, value_size=3, kernel_size=4),
    "mamba2_of_one_group": LinearAttention(
        kind="mamba2", num_heads=3, num_groups=1, key_size=2, value_size=4, kernel_size=4
    ),
}
THD = {"gated_delta_net": gated_delta_net_thd, "mamba2": mamba2_thd}
PACKS = [(1,), (2,), (3,), (7, 1), (16,), (5, 33, 1, 8), (147, 2)]
"""One token, fewer than lanes and than the convolution sees, odd ones, more than a block of kernels."""


def padded_to(seqlens: Sequence[int], cp_size: int) -> tuple[int, ...]:
    multiple = 2 * cp_size if cp_size > 1 else 1
    return tuple(-(-seqlen // multiple) * multiple for seqlen in seqlens)


class Whole:
    """Outputs of a pack's samples, each by itself, and gradients of the sum of these by `weights`."""

    def __init__(self, sizes: LinearAttention, seqlens: Sequence[int]) -> None:
        self.sizes, self.seqlens = sizes, seqlens
        self.inputs, self.parameters = random_inputs(sizes, seqlens)
        generator = torch.Generator().manual_seed(1)
        shape = (sizes.num_heads, sizes.value_size)
        self.weights = [torch.randn(n, *shape, generator=generator, dtype=torch.float64) for n in seqlens]
        leaves = [tensor.requires_grad_() for sample in self.inputs for tensor in sample]
        for parameter in self.parameters:
            parameter.requires_grad_()
        reference = REFERENCES[sizes.kind]
        outs = [reference(*sample, *self.parameters, sizes) for sample in self.inputs]
        loss = sum((out * weight).sum() for out, weight in zip(outs, self.weights, strict=True))
        grads = torch.autograd.grad(loss, [*leaves, *self.parameters])
        number = len(self.inputs[0])
        of_tokens = [torch.cat(grads[first : len(leaves) : number]) for first in range(number)]
        self.expected = [torch.cat(outs).detach(), *of_tokens, *grads[len(leaves) :]]

    def on_lanes(self, cp_size: int, way: StateExchange) -> tuple[list[Tensor], list[int]]:
        """Return what lanes compute, as `expected`, and the bytes that they send."""
        padded = padded_to(self.seqlens, cp_size)
        order = torch.from_numpy(gathered_order(padded, cp_size))
        rows_of = order.argsort().chunk(cp_size)
        is_token = torch.cat([torch.arange(length) < n for length, n in zip(padded, self.seqlens, strict=True)])

        def of_lane(samples: Sequence[Tensor], rank: int) -> Tensor:
            """Return a lane's rows of samples, with something that is not 0 for padding."""
            whole = torch.full((sum(padded), *samples[0].shape[1:]), 0.5, dtype=torch.float64)
            whole[is_token] = torch.cat([sample.detach() for sample in samples])
            return whole[rows_of[rank]]

        def work(params: DynamicPackedSeqParams) -> tuple[list[Tensor], int]:
            rank = params.cp_group.rank()
            local = [of_lane(x, rank).requires_grad_() for x in zip(*self.inputs, strict=True)]
            parameters = [x.detach().clone().requires_grad_() for x in self.parameters]
            out = THD[self.sizes.kind](*local, *parameters, params, self.sizes)
            (out * of_lane(self.weights, rank))[is_token[rows_of[rank]]].sum().backward()
            return [out.detach(), *(x.grad for x in (*local, *parameters))], params.stats.bytes_sent

        tensors, sent = zip(*on_lanes(padded, cp_size, work, state_exchange=way), strict=True)
        found = [*zip(*tensors, strict=True)]
        num_of_tokens = 1 + len(self.inputs[0])
        of_tokens = [torch.cat(lanes)[order][is_token] for lanes in found[:num_of_tokens]]
        return [*of_tokens, *(sum(lanes) for lanes in found[num_of_tokens:])], list(sent)


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = list(zip(found, expected, strict=True))
    assert len(pairs) > 4
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


@pytest.mark.parametrize("way", ["heads", "states"])
@pytest.mark.parametrize("kind", LAYERS)
def test_packs_over_lanes_equal_samples_token_after_token(kind: str, way: StateExchange) -> None:
    for seqlens in PACKS:
        whole = Whole(LAYERS[kind], seqlens)
        for cp_size in (1, 2, 4):
            found, _ = whole.on_lanes(cp_size, way)
            assert error(found, whole.expected) < 1e-10, (seqlens, cp_size)
