"""Attention of a packed micro-batch in the place of torch's `scaled_dot_product_attention`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import CAUSAL
from megatron.dynamic_cp.attention.thd import attention_thd
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams

_TORCH_CP = "torch.distributed.tensor.experimental"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    *,
    packed_seq_params: DynamicPackedSeqParams,
) -> Tensor:
    """Return attention inside each packed sequence, over the lanes of the micro-batch's own CP group.

    Causal or full as the model that was planned for, `ModelShape.causal_attention`; keys of padding are never seen.

    Takes torch's arguments, so that it can stand where a model calls `F.scaled_dot_product_attention`; the exchange
    between lanes is the one that the plan chose. Collective over the CP group, in backward, too.

    Args:
        query: local shard [1, heads, T, dim]; key, value: [1, kv_heads, T, dim], where kv_heads divides heads.
        attn_mask, dropout_p, enable_gqa: only None, 0 and True are possible.
        is_causal: None, or what the model that was planned for says.
        scale: of the scores; default 1 / sqrt(dim).
        packed_seq_params: of the micro-batch.

    Returns:
        [1, heads, T, dim].

    Raises:
        UnsupportedFeatureError: a mask, dropout, another `is_causal` than was planned for, or torch's context_parallel
            around this.
        InvalidInputError: another number of tokens than the micro-batch has on this lane, or a batch of several rows.
    """
    refuse_torch_context_parallel(query)
    planned = packed_seq_params.mask == CAUSAL
    if attn_mask is not None or dropout_p or is_causal not in (None, planned):
        what = "a mask" if attn_mask is not None else f"dropout {dropout_p}" if dropout_p else f"is_causal={is_causal}"
        raise UnsupportedFeatureError(
            f"attention with {what} is not supported for packed micro-batches, only {packed_seq_params.mask} attention "
            "inside each sequence, as planned: leave attn_mask, dropout_p and is_causal at None, 0 and "
            f"{planned}, or plan for a ModelShape with causal_attention={not planned}"
        )
    num_tokens = len(packed_seq_params.positions)
    if query.shape[0] != 1 or query.shape[2] != num_tokens:
        raise InvalidInputError(
            f"attention got {query.shape[0]} rows of {query.shape[2]} tokens, the micro-batch has 1 row of {num_tokens}"
            f" on this lane ({packed_seq_params.label}): pass the tokens of the micro-batch, unchanged, and its "
            "own packed_seq_params",
            rows=query.shape[0],
            tokens=query.shape[2],
            expected_tokens=num_tokens,
        )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise InvalidInputError(
            f"{query.shape[1]} query heads and {key.shape[1]} KV heads need enable_gqa=True",
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
        )
    # A shard of one token makes any layout contiguous by its strides, so ask for it.
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out_THD = attention_thd(q_THD, k_THD, v_THD, packed_seq_params, scale or query.shape[-1] ** -0.5)
    return out_THD.transpose(0, 1)[None]


def refuse_torch_context_parallel(query: Tensor) -> None:
    """Raise an error where torch's own context parallelism is at work.

    It is in force as `context_parallel(mesh, buffers=...)`, which patches `F.scaled_dot_product_attention` and has cut
    the buffers already, or as tensors that it has sharded.

    Raises:
        UnsupportedFeatureError: it is.
    """
    is_patched = getattr(F.scaled_dot_product_attention, "__module__", "").startswith(_TORCH_CP)
    if is_patched or isinstance(query, DTensor):
        what = "inside torch's context_parallel(...)" if is_patched else "with a DTensor"
        raise UnsupportedFeatureError(
            f"attention of a packed micro-batch was called {what}: torch's context parallelism cannot mask documents, "
            "so a row may hold only 1, and its degree is fixed; a packed row holds any number, on the lanes that its "
            "plan chose. Leave context_parallel out here, or use torch's attention with it, on unpacked sequences of "
            "equal length"
        )
