"""Attention by collectives: one all-gather of keys and values, or heads exchanged for sequence (Ulysses).

all_gather holds the KV of whole sequences during a layer; one reduce-scatter returns their gradients. Heads (a2a,
a2a+p2p, around blocks): by one all-to-all of q, k and v, each lane of an inner group gets all rows of the group, in
sequence order, for its share of the heads; another returns the output. With a2a the inner group is the CP group and
rows are whole sequences. With a2a+p2p rows are a zigzag shard over the outer lanes, and the ring of lanes with equal
index does the rest; around blocks, lanes with equal index run a programme. A KV head that several lanes use is sent to
each (`transfers.kv_heads_of`), and the owner of a token adds up the gradients.

Order of gathered rows: a zigzag over cp lanes is a zigzag over outer lanes of zigzags over inner lanes. Lane k * inner
+ i holds chunks k * inner + i and 2 * cp - 1 - k * inner - i, so inner group k holds chunks k and 2 * outer - 1 - k of
2 * outer longer chunks, zigzag over its lanes. One function orders a whole group (outer = 1) and an inner group. At cp
4, inner 2:

    lanes 0..3                    0 7 | 1 6 | 2 5 | 3 4
    inner groups, in their order  0 1 6 7   | 2 3 4 5      = chunks 0 3 | 1 2 of a zigzag over 2 outer lanes

Shapes: T local tokens, S those of all lanes, P lanes that exchange heads, R = P * T rows of theirs, H heads, D channels
of a head, 2 keys and values. Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509); Fang and Zhao, USP (arXiv
2405.07719) for the two together.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dynamic_cp.mechanisms.transfers import kv_heads_of
from megatron.dynamic_cp.attention.mechanisms.executor import KeyValueExecutor, ShardExecutor
from megatron.dynamic_cp.attention.mechanisms.ring import Ring
from megatron.dynamic_cp.attention.mechanisms.transfers import (
    Transfer,
    all_gather_tokens,
    all_to_all_heads,
    reduce_scatter_tokens,
)
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.attention.packs import gathered_packs, to_device
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, packed_shard_positions


def gathered_order(padded_seqlens: tuple[int, ...], num_lanes: int) -> np.ndarray:
    """Return, for each token of the pack in sequence order, its row in the gathered shards, int64 [num_lanes * T].
    `padded_seqlens` are the tokens of each sequence on all `num_lanes` lanes together."""
    starts = np.repeat(np.cumsum((0, *padded_seqlens[:-1])), np.asarray(padded_seqlens) // num_lanes)
    rows_to_tokens = np.concatenate(
        [starts + packed_shard_positions(padded_seqlens, num_lanes, rank) for rank in range(num_lanes)]
    )
    order = np.empty_like(rows_to_tokens)
    order[rows_to_tokens] = np.arange(len(order))
    return order


def row_order(params: DynamicPackedSeqParams, device: torch.device) -> Tensor:
    """Return `gathered_order` of the inner group where heads are exchanged, else of the CP group; on the device."""

    def make() -> Tensor:
        group = params.heads_group or params.cp_group
        outer_size = params.cp_group.size() // group.size()
        seqlens = tuple(seqlen // outer_size for seqlen in params.padded_seqlens)
        return to_device(gathered_order(seqlens, group.size()), device)

    return params.cache.once("order of rows", make)


def from_sequence_order(x_SHD: Tensor, order: Tensor) -> Tensor:
    """Return the rows as the lanes hold them: undoes `index_select(0, order)`."""
    return torch.empty_like(x_SHD, memory_format=torch.contiguous_format).index_copy_(0, order, x_SHD)


class AllGather(KeyValueExecutor):
    """The gathering as an `executor.Executor`; backward gathers again, so only the lane's shards are kept."""

    grows_with_group = True
    stacked_dim = 1

    @staticmethod
    def transfers(params: DynamicPackedSeqParams) -> tuple[tuple[Transfer, ProcessGroup | None], ...]:
        return (("gather", params.cp_group),)

    def attend(self, sums: RowSums, kv: Tensor) -> None:
        gathered_2SHD = self._in_sequence_order(kv)
        for pack in gathered_packs(self._params, kv.device):
            sums.attend(pack, gathered_2SHD)

    def attend_backward(self, rows: RowGradients, kv: Tensor) -> Tensor:
        gathered_2SHD = self._in_sequence_order(kv)
        grad_2SHD = None
        for pack in gathered_packs(self._params, kv.device):
            grad_2SHD = rows.attend(pack, gathered_2SHD, grad_2SHD)
        assert grad_2SHD is not None
        grad = grad_2SHD.transpose(0, 1) if kv.dim() == 4 else self.joined_gradient(grad_2SHD, kv)
        return reduce_scatter_tokens(from_sequence_order(grad, row_order(self._params, kv.device)), self._params)

    def _in_sequence_order(self, kv: Tensor) -> Tensor:
        gathered = all_gather_tokens(kv, self._params).index_select(0, row_order(self._params, kv.device))
        return gathered.transpose(0, 1) if kv.dim() == 4 else self.padded_apart(gathered)


class HeadExchange:
    """A layer's two all-to-alls over P lanes of T rows each, R = P * T; this lane computes the query heads `heads`."""

    def __init__(self, query_heads: int, kv_heads: int, params: DynamicPackedSeqParams, device: torch.device) -> None:
        assert params.heads_group is not None
        self._params, self._group = params, params.heads_group
        self._num_lanes = self._group.size()
        # Raises on all lanes, before anything is sent.
        self._copies, self._kv_share = kv_heads_of(query_heads, kv_heads, self._num_lanes)
        self._query_share = query_heads // self._num_lanes
        first = self._group.rank() * self._query_share
        self.heads = slice(first, first + self._query_share)
        # Around blocks, the lanes' runs follow each other in order.
        self._order = row_order(params, device) if params.placed is None else None

    def scatter_heads(self, *shards_THD: Tensor) -> Tensor:
        """Return this lane's heads of all rows, [R, heads, dim] in sequence order, from shards with all heads."""
        parts = [x.unflatten(1, (self._num_lanes, -1)) for x in shards_THD]
        received_PTHD = all_to_all_heads(torch.cat(parts, dim=2).transpose(0, 1), self._group, self._params)
        received_RHD = received_PTHD.flatten(0, 1)
        return received_RHD if self._order is None else received_RHD.index_select(0, self._order)

    def gather_heads(self, x_RHD: Tensor) -> Tensor:
        """Return all lanes' heads of this lane's rows, [T, P, heads, dim]: undoes `scatter_heads`."""
        sent_RHD = x_RHD if self._order is None else from_sequence_order(x_RHD, self._order)
        return all_to_all_heads(sent_RHD.unflatten(0, (self._num_lanes, -1)), self._group, self._params).transpose(0, 1)

    def sent_kv(self, x_THD: Tensor) -> Tensor:
        """Return keys or values as they are sent, each head once per lane that needs it."""
        return x_THD if self._copies == 1 else x_THD.repeat_interleave(self._copies, dim=1)

    def _returned_kv(self, grad_TPHD: Tensor) -> Tensor:
        """Return the gradient of keys or values; the shares of one head are added in float32."""
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
        """Return the gradients of q, k and v from what `gather_heads` returned for those of this lane's heads."""
        query, key, value = grad_TPHD.split((self._query_share, self._kv_share, self._kv_share), 2)
        return query.flatten(1, 2), self._returned_kv(key), self._returned_kv(value)


class HeadsAround(ShardExecutor):
    """An executor on the rows of an inner group, with exchanges of heads before and after."""

    takes_narrow_values = False  # queries, keys and values are heads of one tensor

    def __init__(self, params: DynamicPackedSeqParams, query_heads: int, kv_heads: int, device: torch.device) -> None:
        super().__init__(params, query_heads, kv_heads, device)
        self._exchange = HeadExchange(query_heads, kv_heads, params, device)
        self.heads = self._exchange.heads

    def enter(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        exchange = self._exchange
        return exchange.split(exchange.scatter_heads(q_THD, exchange.sent_kv(k_THD), exchange.sent_kv(v_THD)))

    def leave(self, out_RHD: Tensor) -> Tensor:
        return self._exchange.gather_heads(out_RHD).flatten(1, 2)

    def enter_gradient(self, grad_THD: Tensor) -> Tensor:
        return self._exchange.scatter_heads(grad_THD)

    def leave_gradients(self, grad_q_RHD: Tensor, grad_2RHD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the shards, with all heads, by one exchange."""
        grad_RHD = torch.cat((grad_q_RHD, grad_2RHD[0], grad_2RHD[1]), dim=1)
        return self._exchange.split_gradient(self._exchange.gather_heads(grad_RHD))


class HeadsAroundRing(HeadsAround, Ring):
    """Heads exchanged around a ring, as an `executor.Executor`; with a2a the ring is this lane alone."""

    @staticmethod
    def transfers(params: DynamicPackedSeqParams) -> tuple[tuple[Transfer, ProcessGroup | None], ...]:
        return (("all-to-all", params.heads_group), *Ring.transfers(params))
