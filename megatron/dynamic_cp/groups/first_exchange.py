"""The first exchange of a group, at start-up: connections are made now, by what attention will do, and are checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.dynamic_cp.attention.mechanisms.transfers import (
    ExchangeError,
    RingShift,
    all_gather_tokens,
    all_to_all_heads,
)
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams, ExchangeStats


def flat_exchanges(exchanges: Sequence[str], cp_size: int, query_heads: int | None) -> tuple[str, ...]:
    """Return those of `exchanges` that a whole group of `cp_size` lanes does; a2a+p2p uses its two levels instead."""
    shares_evenly = query_heads is None or query_heads % cp_size == 0
    return tuple(one for one in exchanges if one != "a2a+p2p" and (one != "a2a" or shares_evenly))


def warm_up(group: dist.ProcessGroup, exchanges: Sequence[str], stats: ExchangeStats, device: torch.device) -> None:
    """Do each of `exchanges` (p2p, all_gather, a2a) once with one number per lane; no transfer in a group of one.

    Raises:
        ExchangeError: another number came than was sent, or none.
    """
    size, rank = group.size(), group.rank()
    if size == 1:
        return
    params = DynamicPackedSeqParams.build(
        (2 * size,),
        torch.zeros(2, dtype=torch.int64, device=device),
        group,
        cp_comm_type="p2p",
        label="start-up (warm-up of the group)",
        stats=stats,
    )
    own = torch.full((1,), float(rank), device=device)
    everyone = list(range(size))
    for exchange in exchanges:
        if exchange == "p2p":
            _check(group, exchange, RingShift(own, group, params).wait(), [(rank - 1) % size])
        elif exchange == "all_gather":
            _check(group, exchange, all_gather_tokens(own, params), everyone)
        elif exchange == "a2a":
            _check(group, exchange, all_to_all_heads(own.expand(size), group, params), everyone)


def _check(group: dist.ProcessGroup, exchange: str, received: Tensor, expected: list[int]) -> None:
    numbers = received.tolist()
    if numbers != expected:
        shown = (numbers, expected) if len(expected) > 1 else (numbers[0], expected[0])
        raise ExchangeError(f"warm-up of {group.group_desc} ({exchange}): received {shown[0]}, expected {shown[1]}")
