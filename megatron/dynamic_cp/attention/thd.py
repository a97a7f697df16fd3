"""Attention of a packed micro-batch by the exchange that its plan chose; torch alone, without megatron-core."""

from __future__ import annotations

from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.attention.all_gather import AllGatherAttention
from megatron.dynamic_cp.attention.heads import HeadExchangeAttention
from megatron.dynamic_cp.attention.kernels import kernel_for
from megatron.dynamic_cp.attention.ring import RingAttention
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams

EXCHANGES = {
    "p2p": RingAttention,
    "all_gather": AllGatherAttention,
    "a2a": HeadExchangeAttention,
    "a2a+p2p": HeadExchangeAttention,
}


def attention_thd(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    params: DynamicPackedSeqParams,
    softmax_scale: float,
    backend: str = "auto",
) -> Tensor:
    """Return causal attention inside each packed sequence, [T, heads, dim], over the CP group of the micro-batch.

    One lane is a ring of one, whatever the exchange: the same code without a transfer.

    Args:
        q_THD: local shard [T, heads, dim]; k_THD, v_THD: [T, kv_heads, dim], kv_heads divides heads.
        backend: one of `kernels.BACKENDS`.

    Raises:
        UnsupportedFeatureError: an exchange that is not built here, or no kernel for these tensors.
    """
    alone = params.cp_group.size() == 1
    exchange = RingAttention if alone else EXCHANGES.get(params.cp_comm_type)
    if exchange is None:
        raise UnsupportedFeatureError(
            f"the plan asks for {params.cp_comm_type} at {params.label}, the torch attention "
            f"has {', '.join(EXCHANGES)}: plan with one of those (--cp-comm-type)",
            cp_comm_type=params.cp_comm_type,
        )
    return exchange.apply(q_THD, k_THD, v_THD, params, softmax_scale, kernel_for(q_THD, backend))
