"""Attention with heads exchanged for sequence (Ulysses, a2a), alone, around a ring (a2a+p2p) or around blocks.

The lanes of an inner group hand each other rows of q, k and v by one all-to-all: afterwards each has all rows of the
group, in the order of the sequences, for its own share of the heads. With a2a the inner group is the whole CP group
and the rows are whole sequences; with a2a+p2p the rows are a proper zigzag shard over the outer lanes (`row_order`),
and the ring of lanes with equal index does the rest with the longer shard and fewer heads. Around blocks, the lanes of
an inner group hold what it has in equal runs, and lanes with equal index do the rest. The output goes back by another
all-to-all; backward does the same in reverse, two collectives again.

Every lane gets the same number of query heads, and the KV heads that they use (`dynamic_cp.mechanisms.heads` has the
rule). With fewer KV heads than lanes a KV head goes to several lanes, and the owner of a token adds up their gradients.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509); Fang and Zhao, USP (arXiv 2405.07719) for the two together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dynamic_cp.mechanisms.heads import kv_heads_of
from megatron.dynamic_cp.attention.mechanisms.executor import ShardExecutor
from megatron.dynamic_cp.attention.mechanisms.ring import Ring
from megatron.dynamic_cp.attention.mechanisms.row_order import from_sequence_order, row_order
from megatron.dynamic_cp.attention.mechanisms.transfers import Transfer, all_to_all_heads
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams


class HeadExchange:
    """The two all-to-alls of a layer; P lanes, T rows on each, R = P * T rows of the inner group.

    Attributes:
        heads: this lane's share of the query heads.
    """

    def __init__(self, query_heads: int, kv_heads: int, params: DynamicPackedSeqParams, device: torch.device) -> None:
        assert params.heads_group is not None
        self._params, self._group = params, params.heads_group
        self._num_lanes = self._group.size()
        # Raises before anything is sent, on all lanes.
        self._copies, self._kv_share = kv_heads_of(query_heads, kv_heads, self._num_lanes)
        self._query_share = query_heads // self._num_lanes
        first = self._group.rank() * self._query_share
        self.heads = slice(first, first + self._query_share)
        # Around blocks, what lanes have one after the other is in order.
        self._order = row_order(params, device) if params.placed is None else None

    def scatter_heads(self, *shards_THD: Tensor) -> Tensor:
        """Return this lane's heads of all rows, [R, heads, dim] in sequence order, of tensors with heads to share."""
        parts = [x.unflatten(1, (self._num_lanes, -1)) for x in shards_THD]
        received_PTHD = all_to_all_heads(torch.cat(parts, dim=2).transpose(0, 1), self._group, self._params)
        received_RHD = received_PTHD.flatten(0, 1)
        return received_RHD if self._order is None else received_RHD.index_select(0, self._order)

    def gather_heads(self, x_RHD: Tensor) -> Tensor:
        """Return all lanes' heads of this lane's rows, [T, P, heads, dim]: undoes `scatter_heads`."""
        sent_RHD = x_RHD if self._order is None else from_sequence_order(x_RHD, self._order)
        return all_to_all_heads(sent_RHD.unflatten(0, (self._num_lanes, -1)), self._group, self._params).transpose(0, 1)

    def sent_kv(self, x_THD: Tensor) -> Tensor:
        """Return keys or values as they are sent, a head as often as lanes need it."""
        return x_THD if self._copies == 1 else x_THD.repeat_interleave(self._copies, dim=1)

    def _returned_kv(self, grad_TPHD: Tensor) -> Tensor:
        """Return the gradient of keys or values from what the lanes return: those of one head are added in float32."""
        grad_THD = grad_TPHD.flatten(1, 2)
        if self._copies == 1:
            return grad_THD
        dtype = torch.promote_types(grad_THD.dtype, torch.float32)
        return grad_THD.unflatten(1, (-1, self._copies)).sum(dim=2, dtype=dtype).to(grad_THD.dtype)

    def split(self, qkv_RHD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the views q_RHD and kv_2RHD of what `scatter_heads` returned for q, k and v."""
        query, key_value = qkv_RHD.split((self._query_share, 2 * self._kv_share), 1)
        return query, key_value.unflatten(1, (2, -1)).movedim(1, 0)

    def split_gradient(self, grad_TPHD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v of what `gather_heads` returned for those of this lane's heads."""
        query, key, value = grad_TPHD.split((self._query_share, self._kv_share, self._kv_share), 2)
        return query.flatten(1, 2), self._returned_kv(key), self._returned_kv(value)


class HeadsAround(ShardExecutor):
    """What comes before and after an executor that works with the rows of an inner group: exchanges of heads."""

    takes_narrow_values = False  # queries, keys and values are heads of one tensor

    def __init__(self, params: DynamicPackedSeqParams, query_heads: int, kv_heads: int, device: torch.device) -> None:
        super().__init__(params, query_heads, kv_heads, device)
        self._exchange = HeadExchange(query_heads, kv_heads, params, device)
        self.heads = self._exchange.heads

    def enter(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Return q_RHD and kv_2RHD, views of what came."""
        exchange = self._exchange
        return exchange.split(exchange.scatter_heads(q_THD, exchange.sent_kv(k_THD), exchange.sent_kv(v_THD)))

    def leave(self, out_RHD: Tensor) -> Tensor:
        """Return the shard's output, of all heads."""
        return self._exchange.gather_heads(out_RHD).flatten(1, 2)

    def enter_gradient(self, grad_THD: Tensor) -> Tensor:
        """Return the gradient of this lane's heads."""
        return self._exchange.scatter_heads(grad_THD)

    def leave_gradients(self, grad_q_RHD: Tensor, grad_2RHD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of the shards, of all heads, by one exchange."""
        grad_RHD = torch.cat((grad_q_RHD, grad_2RHD[0], grad_2RHD[1]), dim=1)
        return self._exchange.split_gradient(self._exchange.gather_heads(grad_RHD))


class HeadsAroundRing(HeadsAround, Ring):
    """Exchanged heads as an `executor.Executor`: between entering and leaving, a lane has its heads of longer shards.

    Where the inner group is the whole CP group, the ring is of this lane alone.
    """

    @staticmethod
    def transfers(params: DynamicPackedSeqParams) -> tuple[tuple[Transfer, ProcessGroup | None], ...]:
        """Return the all-to-all of the inner group, and the shift round the ring of outer lanes."""
        return (("all-to-all", params.heads_group), *Ring.transfers(params))
