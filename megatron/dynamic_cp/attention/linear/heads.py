"""Linear attention by heads: lanes exchange tokens of all heads for all tokens of some heads, and back.

Each lane gets whole heads, one more on the first lanes where they do not divide, and the groups that these need; a
lane without heads takes part in the exchanges. Then samples are whole, as on one lane. The gate, the norm and the
projections of a layer stay with the tokens.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509), for attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.linear.exchange import exchanged
from megatron.dynamic_cp.attention.linear.layer import LinearLayer, Share, channels_of
from megatron.dynamic_cp.attention.linear.layout import gathered_rows, sample_runs
from megatron.dynamic_cp.attention.mechanisms.transfers import Expected
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams


def by_heads(layer: LinearLayer, x_TC: Tensor, gates: list[Tensor], params: DynamicPackedSeqParams) -> Tensor:
    """Return what this lane's tokens find, [T, heads, value size]."""
    num_lanes, rank = params.cp_group.size(), params.cp_group.rank()
    if num_lanes == 1:
        return whole_samples(layer, x_TC, gates, params)
    shares = [Share.of_lane(layer.sizes, lane, num_lanes) for lane in range(num_lanes)]
    rows = gathered_rows(params, x_TC.device)

    def message(share: Share) -> list[Tensor]:
        heads = slice(share.heads.start, share.heads.stop)
        return [channels_of(x_TC, layer.sizes, share), *(gate[:, heads] for gate in gates)]

    messages = [message(share) for share in shares]
    received = exchanged(messages, [[Expected(one.shape, one.dtype) for one in messages[rank]]] * num_lanes, params)
    x_RC, *gates_RH = (torch.cat(parts).index_select(0, rows.in_order) for parts in zip(*received, strict=True))
    found_RHV = whole_samples(layer.of_share(shares[rank]), x_RC, gates_RH, params)
    by_lane = found_RHV.index_select(0, rows.by_lane).chunk(num_lanes)
    expected = [[Expected((len(x_TC), len(share.heads), layer.sizes.value_size), x_TC.dtype)] for share in shares]
    returned = exchanged([[part] for part in by_lane], expected, params)
    return torch.cat([part for (part,) in returned], dim=1)


def whole_samples(layer: LinearLayer, x_TC: Tensor, gates: list[Tensor], params: DynamicPackedSeqParams) -> Tensor:
    """Return what the tokens of whole samples find."""
    if not layer.share.heads:  # backward exchanges, too, and each parameter has a gradient on each lane
        nothing = torch.stack([parameter.sum() for parameter in layer.parameters]).sum()
        return x_TC[..., None].expand(-1, -1, layer.sizes.value_size) + nothing
    runs = sample_runs(params, x_TC.device)
    x_TC = layer.convolved(x_TC, runs)
    found, _ = layer.kernel.scan(layer.steps(x_TC, gates), runs, None)
    assert found is not None
    return layer.finished(found, x_TC)
