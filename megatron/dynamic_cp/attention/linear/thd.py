"""Linear attention of a packed micro-batch in the way that its plan chose; torch alone, without megatron-core.

By heads, lanes exchange tokens of all heads for all tokens of some heads, and back. Each lane gets whole heads, one
more on the first lanes where they do not divide, and the groups that these need; a lane without heads takes part in the
exchanges. Then samples are whole, as on one lane. By states: see `states`. The gate, the norm and the projections of a
layer stay with the tokens.

Shapes: T local tokens, R tokens of all lanes, H heads, V channels of a value, C convolved channels.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509), for attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import LinearAttention, StateExchange
from dynamic_cp.types.branches import sees_prefixes
from megatron.dynamic_cp.attention.linear.kernels import choose_linear_kernel
from megatron.dynamic_cp.attention.linear.layer import LinearLayer, Share, channels_of
from megatron.dynamic_cp.attention.linear.layout import LaneIndex, LaneRows, gathered_rows
from megatron.dynamic_cp.attention.linear.recurrence import state_dtype
from megatron.dynamic_cp.attention.linear.states import by_states, exchanged, output_of_rows
from megatron.dynamic_cp.attention.mechanisms.transfers import Expected
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams


def by_heads(layer: LinearLayer, x_TC: Tensor, gates: list[Tensor], params: DynamicPackedSeqParams) -> Tensor:
    """Return the output of this lane's tokens, [T, heads, value size]."""
    num_lanes, own = LaneIndex.of(params)
    shares = [Share.of_lane(layer.sizes, lane, num_lanes) for lane in range(num_lanes)]
    gathered = gathered_rows(params, x_TC.device)
    # Each tensor is cut once, so that backward joins it once.
    of_gates = [gate.split([len(share.heads) for share in shares], dim=1) for gate in gates]
    messages = [*zip(channels_of(x_TC, layer.sizes, shares), *of_gates, strict=True)]
    expected = [[Expected(one.shape, one.dtype) for one in messages[own]]] * num_lanes
    received = [torch.cat(parts) for parts in zip(*exchanged(messages, expected, params), strict=True)]
    x_RC, *gates_RH = (_Moved.apply(rows, gathered.in_order, gathered.by_lane) for rows in received)
    output_RHV = _output_of_share(layer.of_share(shares[own]), x_RC, gates_RH, gathered.rows, params)
    by_lane = _Moved.apply(output_RHV, gathered.by_lane, gathered.in_order).chunk(num_lanes)
    expected = [[Expected((len(x_TC), len(share.heads), layer.sizes.value_size), x_TC.dtype)] for share in shares]
    returned = exchanged([[part] for part in by_lane], expected, params)
    return torch.cat([part for (part,) in returned], dim=1)


class _Moved(torch.autograd.Function):
    """(rows, for each of them in another order which it is, the same back) -> those rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.back), None, None


def _output_of_share(
    layer: LinearLayer, x_RC: Tensor, gates_RH: list[Tensor], rows: LaneRows, params: DynamicPackedSeqParams
) -> Tensor:
    """Return the output of whole samples, of the heads of a share."""
    if layer.share.heads:
        return output_of_rows(layer, x_RC, gates_RH, rows, params)
    # Backward exchanges, too, and each parameter has a gradient on each lane. It reads a kept tensor: in checkpoints by
    # hooks that is when lanes compute the layer a second time, and exchange.
    nothing = torch.stack([parameter.sum() for parameter in layer.parameters]).sum()
    return x_RC[..., None].expand(-1, -1, layer.sizes.value_size) * x_RC.new_ones(()) + nothing


WAYS: dict[StateExchange, Callable[[LinearLayer, Tensor, list[Tensor], DynamicPackedSeqParams], Tensor]] = {
    "heads": by_heads,
    "states": by_states,
}


def gated_delta_net_thd(
    qkv_TC: Tensor,
    beta_TH: Tensor,
    decay_TH: Tensor,
    conv_weight: Tensor,
    params: DynamicPackedSeqParams,
    sizes: LinearAttention,
) -> Tensor:
    """Return the output of a gated delta net inside each packed sequence, [T, heads, value size].

    Convolves, applies SiLU, normalizes queries and keys to length 1, and passes states; gate, norm and projections are
    the caller's. Parameters are whole on each lane; their gradients are a lane's part, to be summed over lanes.

    Args:
        qkv_TC: local shard before the convolution: queries of all key heads, keys of all, values of all value heads.
        beta_TH: how much of a value is written, after the sigmoid, of each value head.
        decay_TH: logarithm of what is left of the state, -exp(A_log) softplus(alpha + dt_bias), float32.
        conv_weight: [channels, 1, kernel size].
        sizes: of this tensor-parallel rank (`LinearAttention.of_rank`).

    Raises UnsupportedFeatureError: a sample's mask is none of prefixes, attention is placed for a model without linear
    attention, or there is no kernel for these tensors."""
    return _in_its_way(_layer(qkv_TC, conv_weight, sizes), qkv_TC, [beta_TH, decay_TH], params)


def mamba2_thd(
    xbc_TC: Tensor,
    dt_TH: Tensor,
    decay_rate_H: Tensor,
    skip_H: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    params: DynamicPackedSeqParams,
    sizes: LinearAttention,
) -> Tensor:
    """Return the output of a Mamba-2 layer inside each packed sequence, [T, heads, value size].

    Convolves, applies SiLU, passes states, and adds each token's own weighted value; gate, norm and projections are the
    caller's. Parameters are whole on each lane; their gradients are a lane's part, to be summed over lanes.

    Args:
        xbc_TC: local shard before the convolution: x of all heads, B of all groups, C of all groups.
        dt_TH: steps, softplus(dt + dt_bias), float32.
        decay_rate_H: A_log, of which decays are exp(-exp(A_log) dt).
        skip_H: D.
        conv_weight, conv_bias: [channels, 1, kernel size], [channels].
        sizes: as for `gated_delta_net_thd`.

    Raises UnsupportedFeatureError: as `gated_delta_net_thd`."""
    layer = _layer(xbc_TC, conv_weight, sizes, bias_C=conv_bias, decay_rate_H=decay_rate_H, skip_H=skip_H)
    return _in_its_way(layer, xbc_TC, [dt_TH], params)


def _layer(x_TC: Tensor, conv_weight: Tensor, sizes: LinearAttention, **more: Tensor | None) -> LinearLayer:
    assert x_TC.shape[1] == sizes.convolved_channels, "channels are those of the sizes"
    return LinearLayer(
        sizes=sizes,
        share=Share.of_lane(sizes, 0, 1),
        kernel=choose_linear_kernel(x_TC.device, sizes),
        weight_CK=conv_weight.squeeze(1),
        **more,
    )


def _in_its_way(layer: LinearLayer, x_TC: Tensor, gates: list[Tensor], params: DynamicPackedSeqParams) -> Tensor:
    """Return the layer's output.

    With one lane nothing is exchanged; otherwise lanes exchange heads or pass on states, as the plan says.
    """
    if params.placed is not None and params.placed.state_runs is None:
        raise UnsupportedFeatureError(
            f"the plan places attention at {params.label} for a model without linear attention: plan with the layers "
            "of this model"
        )
    samples = params.masked_samples or (() if params.placed is None else params.placed.samples)
    for sample in samples:
        if not sees_prefixes(sample.mask):
            raise UnsupportedFeatureError(
                f"{sample.mask_in_words} at {params.label}, and a state of linear attention has seen all tokens before "
                "it: give samples no masks but those of responses and trees"
            )
    gates = [gate.to(state_dtype(x_TC.dtype)) for gate in gates]
    way = by_states if params.cp_group.size() == 1 else WAYS[params.state_exchange]
    with torch.autocast(x_TC.device.type, enabled=False):  # products of states are in their own type
        return way(layer, x_TC, gates, params)
