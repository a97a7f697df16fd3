"""Core attention by TransformerEngine, through megatron-core's TEDotProductAttention, with a CP group per micro-batch.

TransformerEngine keeps the group that it was given last, and megatron-core 0.16.1 never takes it back. Here every call
sets group, ranks, stream and exchange, and restores the previous values even if it fails; backward uses what its
forward stored. For a causal mask TransformerEngine must get ONE tensor as all four cu_seqlens (padded boundaries),
padding at the end of each sequence, and the longest padded length as max_seqlen. With anything else versions before
2.18 silently give wrong results, and later ones take a slow path. Import this only where TransformerEngine is
installed.
Shapes: T local tokens, P lanes that exchange heads, R rows of theirs, H heads, D channels of a head, 2 keys and values.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_te_version
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.mechanisms.transfers import sent_bytes
from dynamic_cp.models.flags import SOFTMAX_TYPES
from dynamic_cp.types import CAUSAL, CpCommType
from megatron.dynamic_cp.attention.mechanisms.collectives import HeadExchange
from megatron.dynamic_cp.attention.te.support import (
    LACKS_MASKS,
    choose_kernel,
    installed_flash_attn,
    provider,
    release_of,
)
from megatron.dynamic_cp.flags.attention import windows_of
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams

Group = dist.ProcessGroup | list[dist.ProcessGroup] | None


class ScatterHeads(torch.autograd.Function):
    """(q_THD, k_THD, v_THD) -> this lane's heads of all rows of the inner group, (q_RHD, k_RHD, v_RHD)."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, exchange: HeadExchange
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange = exchange
        qkv_RHD = exchange.scatter_heads(q_THD, exchange.sent_kv(k_THD), exchange.sent_kv(v_THD))
        q_RHD, kv_2RHD = exchange.split(qkv_RHD)
        return q_RHD.contiguous(), kv_2RHD[0].contiguous(), kv_2RHD[1].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads_RHD: Tensor) -> tuple[Tensor | None, ...]:
        grad_TPHD = ctx.exchange.gather_heads(torch.cat(grads_RHD, dim=1))
        return *ctx.exchange.split_gradient(grad_TPHD), None


class GatherHeads(torch.autograd.Function):
    """Output of this lane's heads, out_RHD -> output of all heads of this lane's rows, out_THD."""

    @staticmethod
    def forward(ctx: Any, out_RHD: Tensor, exchange: HeadExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.gather_heads(out_RHD).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.scatter_heads(grad_THD), None


class TransformerEngineAttention(TEDotProductAttention):  # type: ignore[misc]
    """TEDotProductAttention whose CP group and exchange are those of the micro-batch."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        **kwargs: Any,
    ) -> None:
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise UnsupportedFeatureError(
                f"{attention_type} attention with mask {attn_mask_type} is not supported, only causal self-attention"
            )
        if config.softmax_type != SOFTMAX_TYPES[0]:
            raise UnsupportedFeatureError(
                f"--softmax-type {config.softmax_type} is checked with local layers only: use --transformer-impl local"
            )
        if windows_of(config).of_layer(layer_number) is not None:
            raise UnsupportedFeatureError(
                f"layer {layer_number} has a window (--window-size), which is checked with local layers only: use "
                "--transformer-impl local"
            )
        super().__init__(config, layer_number, attn_mask_type, attention_type, **kwargs)
        if TEDotProductAttention.cp_stream is None:
            # megatron-core creates it only at a static CP size above 1.
            TEDotProductAttention.cp_stream = torch.cuda.Stream()
        self._built_with = (layer_number, attn_mask_type, attention_type, kwargs)
        self._te_version = str(get_te_version())
        capability = torch.cuda.get_device_capability()
        flash_attn = installed_flash_attn(capability, release_of(self._te_version))
        self._kernel, _ = choose_kernel(config.attention_backend.name, capability, flash_attn=flash_attn)
        # In a dict, so that they are no submodules: they hold no weights, and checkpoints do not know them.
        self._shares_of_heads: dict[tuple[int, int], TEDotProductAttention] = {}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: DynamicPackedSeqParams | None = None,
    ) -> Tensor:
        """Return the context [T, heads * dim] of shards query [T, heads, dim], key and value [T, kv_heads, dim]. Raises
        UnsupportedFeatureError: full attention, samples with masks of their own, or an exchange that the installed
        version or its kernel lacks. Start-up finds them earlier."""
        params = DynamicPackedSeqParams.checked(packed_seq_params)
        if params.masked_samples is not None:
            raise UnsupportedFeatureError(
                f"samples of {params.label} have masks of their own, and {LACKS_MASKS}: use local layers"
            )
        if params.mask != CAUSAL:
            raise UnsupportedFeatureError(
                f"the micro-batch has {params.mask} attention ({params.label}), TransformerEngine is called for causal "
                "only: use --transformer-impl local"
            )
        assert params.cp_group is not None
        if params.cp_group.size() == 1:
            return self._attend_over(query, key, value, params, None, [], "p2p")
        exchange, kv_heads = params.cp_comm_type, key.shape[1]
        who = provider(exchange, self._te_version, self._kernel, kv_heads=kv_heads, inner_cp_size=params.inner_cp_size)
        if who == "wrapped":
            return self._share_out_heads(query, key, value, params)
        group: Group = params.cp_group
        if params.heads_group is not None and params.ring_group is not None:
            group = [params.heads_group, params.ring_group]
        out = self._attend_over(
            query, key, value, params, group, dist.get_process_group_ranks(params.cp_group), exchange
        )
        _count(query, key, out, params, params.cp_group.size(), params.inner_cp_size)
        return out

    @property
    def implementation(self) -> str:
        return f"TransformerEngine {self._te_version} with {self._kernel}"

    def _share_out_heads(self, query: Tensor, key: Tensor, value: Tensor, params: DynamicPackedSeqParams) -> Tensor:
        """Exchange heads ourselves; TransformerEngine runs the ring of outer lanes with whole sequences' boundaries."""
        exchange = HeadExchange(query.shape[1], key.shape[1], params, query.device)
        q_RHD, k_RHD, v_RHD = ScatterHeads.apply(query, key, value, exchange)
        module = self._with_heads(q_RHD.shape[1], k_RHD.shape[1])
        ring, ranks = params.ring_group, []
        if ring is not None:
            ranks = dist.get_process_group_ranks(ring)
        out = module._attend_over(q_RHD, k_RHD, v_RHD, params, ring, ranks, "p2p")
        _count(q_RHD, k_RHD, out, params, params.ring_size, 1)
        return GatherHeads.apply(out.unflatten(-1, (q_RHD.shape[1], -1)), exchange).flatten(1)

    def _with_heads(self, query_heads: int, kv_heads: int) -> TransformerEngineAttention:
        """Return this attention for a lane's share of the heads, whose number TransformerEngine checks."""
        module = self._shares_of_heads.get((query_heads, kv_heads))
        if module is None:
            config = copy.copy(self.config)
            config.num_attention_heads = query_heads * config.tensor_model_parallel_size
            config.num_query_groups = kv_heads * config.tensor_model_parallel_size
            layer_number, attn_mask_type, attention_type, kwargs = self._built_with
            module = type(self)(config, layer_number, attn_mask_type, attention_type, **kwargs)
            self._shares_of_heads[query_heads, kv_heads] = module
        return module.train(self.training)

    def _attend_over(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: DynamicPackedSeqParams,
        group: Group,
        ranks: list[int],
        exchange: CpCommType,
    ) -> Tensor:
        # Has no group, so that megatron-core's module keeps the one that is set: it could not set the two groups of
        # a2a+p2p, nor restore the old ones.
        plain = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=params.cu_seqlens_q,
            cu_seqlens_kv=params.cu_seqlens_kv,
            cu_seqlens_q_padded=params.cu_seqlens_q_padded,
            cu_seqlens_kv_padded=params.cu_seqlens_kv_padded,
            max_seqlen_q=params.max_seqlen_q,
            max_seqlen_kv=params.max_seqlen_kv,
        )
        if len(value) == 1:
            # TransformerEngine compares strides of keys and values; those of a single row may be anything. If these two
            # own their memory, it also assumes that queries are contiguous.
            query, key, value = (x.clone(memory_format=torch.contiguous_format) for x in (query, key, value))
        with self._group_set(group, ranks, exchange):
            out: Tensor = super().forward(query, key, value, None, AttnMaskType.causal, packed_seq_params=plain)
        return out

    @contextlib.contextmanager
    def _group_set(self, group: Group, ranks: list[int], exchange: CpCommType) -> Iterator[None]:
        before = (self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type)
        stream = None if group is None else TEDotProductAttention.cp_stream
        self.set_context_parallel_group(group, ranks, stream, exchange)
        try:
            yield
        finally:
            self.set_context_parallel_group(*before)


def _count(query: Tensor, key: Tensor, out: Tensor, params: DynamicPackedSeqParams, cp_size: int, inner: int) -> None:
    """Count what TransformerEngine sends by the planner's formula: its transfers cannot be seen from here."""
    sent = sent_bytes(cp_size, inner, 2 * query.nbytes, 2 * key.nbytes, 1)
    params.stats.bytes_sent += round(sent.forward)
    if out.requires_grad:
        stats, backward = params.stats, round(sent.backward)

        def add(grad: Tensor) -> None:
            stats.bytes_sent += backward

        out.register_hook(add)
