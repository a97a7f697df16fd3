"""Which heads a lane gets when heads are exchanged by all-to-all: the one rule that prices and the runtime share.

The `inner_cp_size` lanes of an inner group share out the heads of their TP rank: lane i computes query heads
i * query_heads / inner_cp_size and the following, on the tokens of the whole inner group. It needs the KV heads that
serve them. Where inner_cp_size does not divide the KV heads, every KV head is first repeated (each copy next to the
last, as repeat_interleave does) the least number of times that makes them divisible,

    copies = inner_cp_size / gcd(kv_heads, inner_cp_size),

and a lane gets kv_heads * copies / inner_cp_size of them. Copies always come out even: where inner_cp_size divides
query_heads, copies divides query_heads / kv_heads, so every lane's query heads are whole groups of its KV heads.

The other way, to gather all KV heads on every lane, moves gcd(kv_heads, inner_cp_size) times as much, so it is never
cheaper, and equal only where that is 1 (one KV head): it is not used.

Backward, the gradients of the copies of a KV head are summed where they come from.

Example: 32 query heads and 4 KV heads on 8 lanes: 2 copies of each, so 8, one for every lane with its 4 query heads.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import ModelShape


class KvHeads(NamedTuple):
    """KV heads of a lane after the exchange.

    Attributes:
        copies: how often each KV head is repeated before the exchange (1 = not).
        per_lane: KV heads of a lane after it.
    """

    copies: int
    per_lane: int


def kv_heads_of(query_heads: int, kv_heads: int, inner_cp_size: int) -> KvHeads:
    """Return how KV heads are shared out among the lanes of an inner group.

    Args:
        query_heads: of a TP rank, a multiple of kv_heads.
        kv_heads: of a TP rank (at least 1: with fewer KV heads than TP ranks every rank has a whole one).
        inner_cp_size: lanes of the inner group (1: nothing is exchanged).

    Raises:
        UnsupportedFeatureError: the query heads cannot be shared out evenly.
    """
    if query_heads % inner_cp_size or query_heads % kv_heads:
        raise UnsupportedFeatureError(
            f"{query_heads} query heads and {kv_heads} KV heads of a TP rank cannot be exchanged among "
            f"{inner_cp_size} lanes: the query heads must be a multiple of both; use p2p, fewer TP ranks or a smaller "
            "inner_cp_size",
            query_heads=query_heads,
            kv_heads=kv_heads,
            inner_cp_size=inner_cp_size,
        )
    copies = inner_cp_size // gcd(kv_heads, inner_cp_size)
    return KvHeads(copies, kv_heads * copies // inner_cp_size)


def heads_of_rank(model: ModelShape, tp_size: int) -> tuple[int, int] | None:
    """Return (query heads, KV heads) of a TP rank; None where they are not whole numbers.

    With fewer KV heads than TP ranks every rank keeps a whole one, which as many ranks must share each.
    """
    kv_heads = model.num_query_groups // tp_size
    smaller, larger = sorted((model.num_query_groups, tp_size))
    if model.num_attention_heads % tp_size or larger % smaller:
        return None
    query_heads = model.num_attention_heads // tp_size
    return (query_heads, max(1, kv_heads)) if query_heads % max(1, kv_heads) == 0 else None
