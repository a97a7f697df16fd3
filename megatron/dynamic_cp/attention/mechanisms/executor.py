"""What a way to compute attention over several lanes must do, for one layer of one micro-batch.

    enter -> attend -> leave, and backward: enter_gradient -> attend_backward -> leave_gradients

Between entering and leaving, a lane holds queries and keys of its own choice: its shard, or its share of the heads.
`thd.attention_thd` runs these six and keeps what backward needs; an executor holds no tensors.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron.dynamic_cp.attention.merge import RowGradients, RowSums


class Executor(Protocol):
    """One way; made from (params, query heads, KV heads, device), the heads being those of a tensor-parallel rank."""

    def enter(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries that this lane computes and the keys and values that it brings, from its shards."""

    def attend(self, sums: RowSums, kv: Tensor) -> None:
        """Add up the attention of this lane's queries to all keys that they see; `kv`: of `enter`."""

    def leave(self, out_THD: Tensor) -> Tensor:
        """Return the output of this lane's shard, [T, heads, dim], from that of the queries that it computed."""

    def enter_gradient(self, grad_THD: Tensor) -> Tensor:
        """Return the gradient of the output that this lane computed, from that of its shard's output."""

    def attend_backward(self, rows: RowGradients, kv: Tensor) -> Tensor:
        """Return the gradient of `kv` and add up that of the queries in `rows`."""

    def leave_gradients(self, grad_q_THD: Tensor, grad_kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the shards of q, k and v."""
