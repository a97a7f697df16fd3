"""The first exchange of a group, at start-up: makes the connections that attention will use, and checks them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dynamic_cp.mechanisms.mechanism import Sharing
from dynamic_cp.mechanisms.registry import attentions_of
from dynamic_cp.types import Attention, CpCommType
from megatron.dynamic_cp.attention.mechanisms.transfers import (
    ExchangeError,
    Expected,
    LaneMessages,
    RingShift,
    Transfer,
    all_gather_tokens,
    all_to_all_heads,
)
from megatron.dynamic_cp.attention.thd import executor_class
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats, Levels


def possible_attentions(
    exchanges: Iterable[CpCommType],
    cp_size: int,
    query_heads: int | None,
    inner_sizes: Sequence[int],
    ring_sizes: Sequence[int] | None = None,
) -> list[Attention]:
    """Return how a group of `cp_size` lanes can compute attention in the plans of a run.

    Args:
        query_heads: of a tensor-parallel rank; None: as many as any group can share out.
        inner_sizes: of the inner groups that were built.
        ring_sizes: inner sizes with rings around them; None: all.
    """
    sharing = Sharing((query_heads or cp_size, 1), node_lanes=cp_size, allowed=tuple(inner_sizes), has_latents=True)
    rings = None if ring_sizes is None else tuple(ring_sizes)
    return attentions_of(exchanges, cp_size, sharing._replace(ring_sizes=rings))


def warm_up(
    attention: Attention,
    group: dist.ProcessGroup,
    levels: Levels,
    done: set[tuple[Transfer, dist.ProcessGroup]],
    stats: ExchangeStats,
    device: torch.device,
    ranks_per_node: int,
    more: Sequence[Transfer] = (),
) -> None:
    """Do each transfer of `attention` once, with one number per lane, unless it is done; collective.

    Args:
        group, levels: of a bucket that is computed so.
        done: transfers by which groups are connected; those of this call are added.
        ranks_per_node: messages are tried between any two ranks of a node.
        more: what other layers do over `group`.

    Raises ExchangeError: a wrong number came, or none."""
    params = DynamicPackedSeqParams.build(
        (2 * group.size(),),
        torch.zeros(2, dtype=torch.int64, device=device),
        group,
        cp_comm_type=attention.cp_comm_type,
        levels=levels,
        label="start-up (warm-up of the group)",
        stats=stats,
    )
    make = executor_class(params)
    assert make is not None, "plans may use it"
    for transfer, over in (*make.transfers(params), *((transfer, group) for transfer in more)):
        if over is None or (transfer, over) in done:
            continue
        done.add((transfer, over))
        size, rank = over.size(), over.rank()
        own = torch.full((1,), float(rank), device=device)
        if transfer == "shift":
            received, expected = RingShift(own, over, params).wait(), [(rank - 1) % size]
        elif transfer == "gather":
            received, expected = all_gather_tokens(own, params), list(range(size))
        elif transfer == "messages":
            received, expected = _messages(own, over, ranks_per_node, params)
        else:
            received, expected = all_to_all_heads(own.expand(size), over, params), list(range(size))
        _check(over, attention, received, expected)


def _messages(
    own: Tensor, group: dist.ProcessGroup, ranks_per_node: int, params: DynamicPackedSeqParams
) -> tuple[Tensor, list[int]]:
    """Return the numbers received from the other ranks of the node, and those expected. Two ranks connect at their
    first message, which would otherwise stall a step in the middle of its layers."""
    nodes = [rank // ranks_per_node for rank in dist.get_process_group_ranks(group)]
    me = group.rank()
    others = [member for member, node in enumerate(nodes) if node == nodes[me] and member != me]
    expected = Expected(own.shape, own.dtype)
    sent = LaneMessages([(member, [own]) for member in others], [(member, [expected]) for member in others], params)
    return torch.cat([own[:0], *(tensor for (tensor,) in sent.wait())]), others


def _check(group: dist.ProcessGroup, attention: Attention, received: Tensor, expected: list[int]) -> None:
    numbers = received.tolist()
    if numbers != expected:
        shown = (numbers, expected) if len(expected) > 1 else (numbers[0], expected[0])
        raise ExchangeError(f"warm-up of {group.group_desc} ({attention}): received {shown[0]}, expected {shown[1]}")
