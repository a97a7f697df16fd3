"""What lanes exchange: over which link, which heads each gets, and how many bytes a rank sends, in prices and runtime.

Heads. The `inner_cp_size` lanes of an inner group share the heads of their TP rank: lane i computes query heads i *
query_heads / inner_cp_size and the following, on the tokens of the whole inner group, with the KV heads that serve
them. If inner_cp_size does not divide the KV heads, every KV head is first repeated (copies side by side, as
repeat_interleave does) the least number of times that makes them divisible,

    copies = inner_cp_size / gcd(kv_heads, inner_cp_size),

and a lane gets kv_heads * copies / inner_cp_size of them. Copies always come out even: inner_cp_size divides
query_heads, so copies divides query_heads / kv_heads, and every lane's query heads are whole groups of its KV heads.
Backward sums the gradients of the copies where the KV head comes from. (Gathering all KV heads on every lane would move
gcd(kv_heads, inner_cp_size) times as much.)

Example: 32 query heads and 4 KV heads on 8 lanes: 2 copies of each, so 8, one for every lane with its 4 query heads.

Bytes of one layer's attention. With cp lanes in inner groups of u (p2p, all_gather: u = 1; a2a: u = cp), n = cp / u
members of the outer ring, and T tokens of the bucket, so T / cp of a rank, a rank sends

    inner all-to-alls   4 (Q, K, V before, O after), together (u - 1) / u of T / cp * (Q + O + copies * (K + V)) bytes
    outer ring          n - 1 steps of T / cp * copies * (K + V) bytes; all_gather sends the same at once

Backward, the ring carries keys and values once more and their gradients (twice the bytes); the all-to-alls carry the
gradients of O, Q, K, V: as many bytes as forward.

Example: 32 lanes, 8 a node. p2p sends 31 KV shards, each node boundary in the ring by one NIC; a2a+p2p/8 sends 3 by the
NIC, and 7/8 of a rank's Q, K, V and O inside the node.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import ACROSS_NODES, IN_NODE, Bucket, ModelShape, Topology


class Links(NamedTuple):
    """The links of all aligned groups, k being log2 of the CP size: [k, first lane >> k] -> ACROSS_NODES if the group
    spans nodes on any stage, else IN_NODE; [k] -> the links that groups of that size have."""

    of_group: Ints
    used: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def lanes_in_one_node(topology: Topology) -> int:
    """Return the largest inner group: the largest power of two that divides the lanes of a node and whose aligned
    groups each lie in one node; 1 if not even pairs do."""
    used = links_of(topology).used
    size = 1
    while topology.lanes_per_node % (2 * size) == 0 and used[min(size.bit_length(), len(used) - 1)] == (IN_NODE,):
        size *= 2
    return size


@lru_cache(maxsize=64)
def links_of(topology: Topology) -> Links:
    """Return `topology.spans_nodes` of every aligned group at once."""
    num_lanes = topology.num_lanes
    links = np.zeros((num_lanes.bit_length(), num_lanes), np.int64)
    used: list[tuple[int, ...]] = [(IN_NODE,)]
    for k in range(1, num_lanes.bit_length()):
        blocks = num_lanes >> k
        first_lanes = np.arange(blocks, dtype=np.int64) << k
        for stage in topology.stages_that_differ:
            links[k, :blocks] |= topology.spans_nodes_on(stage, first_lanes, 1 << k)
        num_across = int(links[k, :blocks].sum())
        used.append(((IN_NODE,) if num_across < blocks else ()) + ((ACROSS_NODES,) if num_across else ()))
    links.flags.writeable = False
    return Links(links, tuple(used))


def why_inner_groups_are_split(bucket: Bucket, topology: Topology) -> str | None:
    """Return why the inner groups of a bucket do not lie in one node each, with the remedy; None if they do."""
    inner, node = bucket.inner_cp_size, topology.lanes_per_node
    if node % inner:
        return f"inner_cp_size {inner} does not divide the {node} lanes of a node: use an inner size that does, or p2p"
    for first in bucket.lanes[::inner]:
        if topology.spans_nodes(first, inner):
            return (
                f"the inner group of lanes {first}-{first + inner - 1} lies on more than one node of {node} lanes: "
                "use a smaller inner_cp_size, or p2p"
            )
    return None


class KvHeads(NamedTuple):
    """KV heads in an exchange of heads: repetitions of each before it (1: none), and heads of a lane after it."""

    copies: int
    per_lane: int


def kv_heads_of(query_heads: int, kv_heads: int, inner_cp_size: int) -> KvHeads:
    """Return how the lanes of an inner group (1: nothing is exchanged) share the KV heads of a TP rank, at least 1,
    which divide its query heads; UnsupportedFeatureError if query heads do not divide."""
    if query_heads % inner_cp_size or query_heads % kv_heads:
        raise UnsupportedFeatureError(
            f"{query_heads} query heads and {kv_heads} KV heads of a TP rank cannot be exchanged among {inner_cp_size} "
            "lanes: the query heads must be a multiple of both; use p2p, fewer TP ranks or a smaller inner_cp_size"
        )
    copies = inner_cp_size // gcd(kv_heads, inner_cp_size)
    return KvHeads(copies, kv_heads * copies // inner_cp_size)


def heads_of_rank(model: ModelShape, tp_size: int) -> tuple[int, int] | None:
    """Return (query heads, KV heads) of a TP rank; None if they are not whole numbers. With fewer KV heads than TP
    ranks every rank keeps a whole one, and as many ranks must share each."""
    kv_heads = model.num_query_groups // tp_size
    smaller, larger = sorted((model.num_query_groups, tp_size))
    if model.num_attention_heads % tp_size or larger % smaller:
        return None
    query_heads = model.num_attention_heads // tp_size
    return (query_heads, max(1, kv_heads)) if query_heads % max(1, kv_heads) == 0 else None


COLLECTIVES_OF_A2A = 4
"""Queries, keys and values before, outputs after, as in TransformerEngine; our attention joins the first three."""
RING_BACKWARD_OVER_FORWARD = 2


class SentBytes(NamedTuple):
    """What a rank sends forward, in bytes per token of the rank (or bytes, if multiplied by its tokens): in one step of
    the outer ring, or of all_gather, and the number of steps; in all-to-alls of the inner group, and their number."""

    ring_step: float
    ring_steps: int
    inner: float
    inner_steps: int

    @property
    def forward(self) -> float:
        return self.ring_steps * self.ring_step + self.inner

    @property
    def backward(self) -> float:
        """Bytes of the backward pass, without what recomputation repeats."""
        return RING_BACKWARD_OVER_FORWARD * self.ring_steps * self.ring_step + self.inner


def sent_bytes(cp_size: int, inner_cp_size: int, query_bytes: float, kv_bytes: float, copies: int) -> SentBytes:
    """Return what a rank sends forward, per token; `query_bytes` are of the queries and outputs of a token, `kv_bytes`
    of its keys and values before they are repeated `copies` times."""
    inner = (copies * kv_bytes + query_bytes) * (inner_cp_size - 1) / inner_cp_size
    num_inner = COLLECTIVES_OF_A2A if inner_cp_size > 1 else 0
    return SentBytes(copies * kv_bytes, cp_size // inner_cp_size - 1, inner, num_inner)
